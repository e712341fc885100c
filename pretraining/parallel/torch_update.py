"""The end of a step of the torch engine: from this process's gradients to its new parameters, on plain tensors.

Everything that is decided is decided on the device: whether an update is applied, fp16's scale, the clipping.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from pretraining.config.training import TrainConfig
from pretraining.noise import keys, noise
from pretraining.optim.optimizer import Optimizer, Slot
from pretraining.optim.precision import Precision
from pretraining.optim.rounding import rounded
from pretraining.optim.rules import Adam, Moment, State
from pretraining.parallel import loss_scale
from pretraining.parallel.health import HEALTH, judge
from pretraining.parallel.layout import tensor_dimension
from pretraining.parallel.torch_state import Parts, local
from pretraining.parallel.torch_tensor import add_up_parts


class Figures:
    """Scalars of one step, still on the device."""

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        self._names, self._values = names, values

    def read(self) -> dict[str, float]:
        """One transfer for all of them."""
        return dict(zip(self._names, self._values.tolist(), strict=True))


class Update:
    """An optimizer with its state on this process, and what a step has gathered for it so far."""

    def __init__(
        self,
        config: TrainConfig,
        precision: Precision,
        parts: Parts,
        optimizer: Optimizer,
        home: torch.device,
        tensor_ranks: DeviceMesh | None,
    ) -> None:
        """Hand this process's shards to the optimizer as plain tensors, and make their state on `home`.

        A plain tensor costs no DTensor dispatch, and takes the masks of a fused step in every version of torch.
        """
        self.config, self.precision, self.parts, self.home = config, precision, parts, home
        self.optimizer, self._ranks = optimizer, tensor_ranks
        self.slots = {slot.name: slot for slot in optimizer.slots}
        for slot in optimizer.slots:
            held = local(slot.weight)
            slot.weight = held.clone() if precision.copies else held
            slot.begin(self._moment)
        optimizer.updates = torch.zeros((), device=home)
        self._counters = [optimizer.updates, *(torch.zeros((), device=home) for _ in optimizer.slots[1:])]
        self._sums: dict[str, Tensor] = {}  # of gradients that are added up in another dtype than their parameters'
        self._totals = torch.zeros(2, device=home)  # loss and trained tokens of this step so far, of this process
        self.health = torch.zeros(len(HEALTH), device=home)
        narrow = precision.products == torch.float16
        self.loss_scale = loss_scale.LossScale(config, home) if narrow else None
        self._round_copies()

    def _moment(self, slot: Slot, shape: torch.Size, moment: Moment) -> Tensor:
        if moment.initial is None:
            return slot.weight.to(self.precision.state, copy=True)
        return torch.full(shape, moment.initial, dtype=self.precision.state, device=self.home)

    def take(self, loss: Tensor, count: Tensor) -> None:
        """One micro-batch, after its backward pass: its summed loss and its number of trained tokens."""
        self._totals += torch.stack((loss.detach(), count)).to(self.home)
        if self.precision.gradients == self.precision.stored:
            return
        for name, weight in self.parts.weights.items():
            if weight.grad is not None:
                grad, weight.grad = local(weight.grad).to(self.precision.gradients), None
                self._sums[name] = self._sums[name] + grad if name in self._sums else grad

    def factor(self) -> Tensor:
        """By which fp16 multiplies the gradients of a summed loss: its scale is that of a micro-batch's mean."""
        assert self.loss_scale is not None
        return self.loss_scale.scale / (self.config.batch_size * self.config.seq_length)

    @torch.no_grad()
    def apply(self, rate: float) -> Figures:
        """One collective for loss, tokens and norm; then mean, clip and step, which is nothing where it is refused.

        FSDP hands back gradients averaged over data-parallel ranks; what is wanted is their sum over trained tokens.
        """
        weights, mesh = self.parts.weights, self.parts.mesh
        gradients = self._sums or {name: local(w.grad) for name, w in weights.items() if w.grad is not None}
        if self._ranks:
            add_up_parts(gradients, self._ranks, self.config.sequence_parallel)
        kind = self.config.grad_clip_norm_type or math.inf
        sums = torch.cat((self._totals, self.powers(gradients, kind)))
        sum_over_processes(sums)
        count = sums[1] / mesh.tensor  # tensor ranks count the same tokens
        divisor = count / mesh.data_ranks * (self.factor() if self.loss_scale else 1)
        largest = self._largest(gradients) if math.isinf(kind) else sums[2] ** (1 / kind)
        loss, norm = sums[0] / sums[1], largest / divisor
        accepted = self._judged(loss, norm)
        if limit := self.config.grad_clip_thresh:
            divisor = divisor / (limit / (norm + 1e-6)).clamp(max=1.0)
        step = self._fused_step if self._is_fused() else self._plain_step
        step(gradients, rate, divisor, accepted)
        self._round_copies()
        self._totals.zero_()
        self._sums = {}
        for weight in weights.values():
            weight.grad = None
        figures = {"loss": loss, "grad_norm": norm, **dict(zip(HEALTH, self.health, strict=True))}
        if self.loss_scale:
            figures["loss_scale"] = self.loss_scale.scale
        return Figures(tuple(figures), torch.stack(tuple(figures.values())))

    def _judged(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether this step may be applied. What fp16's scale makes overflow is left out, and counted as nothing."""
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if not self.loss_scale:
            return judge(self.health, finite, self.config.max_skipped_steps)
        counted = judge(self.health, finite | self.loss_scale.excuses(loss), self.config.max_skipped_steps)
        self.loss_scale.update(finite)
        return counted & finite

    def powers(self, held: dict[str, Tensor], kind: float = 2.0) -> Tensor:
        """This process's part of the sum of powers that makes the norm of what is split like the parameters of these
        names, [1]; 0 for the largest, which is no sum."""
        if math.isinf(kind):
            return torch.zeros(1, device=self.home)
        split = [part for name, part in held.items() if tensor_dimension(name) is not None]
        whole = [part for name, part in held.items() if tensor_dimension(name) is None]
        norms = [nn.utils.get_total_norm(parts, kind) ** kind for parts in (split, whole)]
        return (norms[0] + norms[1] / self.parts.mesh.tensor)[None] / self.parts.mesh.replica  # replicas hold the same

    def _largest(self, held: dict[str, Tensor]) -> Tensor:
        """Of all values, their sign left out."""
        top = nn.utils.get_total_norm(list(held.values()), math.inf)
        if dist.is_initialized():
            dist.all_reduce(top, dist.ReduceOp.MAX)
        return top

    def _is_fused(self) -> bool:
        """AdamW in fp32: torch has one kernel for all parameters, 5 to 10 times faster than one for each operation."""
        wide = all(dtype == torch.float32 for dtype in self.precision[2:5])
        return wide and all(type(slot.rule) is Adam and slot.rule.decoupled for slot in self.optimizer.slots)

    def _fused_step(self, gradients: dict[str, Tensor], rate: float, divisor: Tensor, accepted: Tensor) -> None:
        """AdamW on gradients / `divisor`; refused, nothing changes, the count of updates included.

        The two are the masks that torch's fused optimizers take from its GradScaler.
        """
        for decay in sorted({slot.decay for slot in self.optimizer.slots}):
            chosen = [(i, slot) for i, slot in enumerate(self.optimizer.slots) if slot.decay == decay]
            rule: Any = chosen[0][1].rule
            adamw(
                [slot.weight for _, slot in chosen],
                [gradients[slot.name] for _, slot in chosen],
                [slot.state["exp_avg"] for _, slot in chosen],
                [slot.state["exp_avg_sq"] for _, slot in chosen],
                [],
                [self._counters[i] for i, _ in chosen],
                fused=True,
                grad_scale=divisor,
                found_inf=(~accepted).float(),
                amsgrad=False,
                maximize=False,
                lr=rate,
                weight_decay=decay,
                **{"beta1": rule.beta1, "beta2": rule.beta2, "eps": rule.eps},
            )

    def _plain_step(self, gradients: dict[str, Tensor], rate: float, divisor: Tensor, accepted: Tensor) -> None:
        """Any optimizer's rule, parameter by parameter."""
        step, rates = self.optimizer.updates + 1, torch.tensor(rate, device=self.home)
        for slot in self.optimizer.slots:
            gradient = gradients[slot.name].float() / divisor
            weight, state = self._updated(slot, gradient, step, rates)
            for name, new in state.items():
                self._write(slot.state[name], new, slot, f"{name}.", step, accepted)
            self._write(slot.weight, weight, slot, "", step, accepted)
        self.optimizer.updates.copy_(torch.where(accepted, step, self.optimizer.updates))

    def _updated(self, slot: Slot, gradient: Tensor, step: Tensor, rate: Tensor) -> tuple[Tensor, State]:
        """New weight and state of this process's shard; a rule that looks at whole tensors gets them as DTensors."""
        if not slot.rule.whole or not isinstance(self.parts.weights[slot.name], DTensor):
            return slot.updated(gradient, step, rate)
        held = {"": slot.weight, **slot.state}
        wholes: dict[str, Any] = {name: self.parts.logical(slot.name, tensor) for name, tensor in held.items()}
        whole = replace(slot, weight=wholes.pop(""), state=wholes)
        weight, state = whole.updated(self.parts.logical(slot.name, gradient), step, rate)
        return _part_like(whole.weight, weight), {
            name: _part_like(whole.state[name], new) for name, new in state.items()
        }

    def _write(self, held: Tensor, new: Tensor, slot: Slot, prefix: str, step: Tensor, accepted: Tensor) -> None:
        """An accepted update to where its tensor is, rounded as the precision says."""
        if held.dtype != new.dtype and self.precision.rounds:
            new = rounded(new, self._noise(slot, prefix, held, step))
        held.copy_(torch.where(accepted, new.to(held.dtype), held))

    def _noise(self, slot: Slot, prefix: str, held: Tensor, step: Tensor) -> Tensor:
        key = keys(self.config.seed, [prefix + slot.name])[0].to(held.device)
        return noise(key, step, held.shape, self.parts.starts(slot.name, held))

    @torch.no_grad()
    def _round_copies(self) -> None:
        """What the model runs on, where that is a rounded copy of what the optimizer keeps."""
        if self.precision.copies:
            for slot in self.slots.values():
                bits = self._noise(slot, "", slot.weight, self._counters[0])
                self.parts.own(slot.name).copy_(rounded(slot.weight, bits))

    @torch.no_grad()
    def loaded(self, restart_optimizer: bool) -> None:
        """Copy the update count, which a load has written into one of many; see engine.TrainingState."""
        for counter in self._counters[1:]:
            counter.copy_(self._counters[0])
        if restart_optimizer:
            for slot in self.slots.values():
                slot.begin(self._moment)  # one may be a copy of the weight
        self._round_copies()


def sum_over_processes(sums: Tensor) -> None:
    """In place, where there are several."""
    if dist.is_initialized():
        dist.all_reduce(sums)


def _part_like(old: Any, new: Any) -> Tensor:
    """Of the DTensor `new`, what this process holds where it lies as `old` does."""
    part: Tensor = new.redistribute(placements=old.placements).to_local()
    return part
