"""The optimizer step of both engines: mean, clipping, finite check, update, masked write and rounding.

An engine's subclass supplies the gradients and their norm, the random bits, and the placement of what is written.
Everything is decided on the device: whether an update is applied, fp16's loss scale, the clipping. No step waits for
the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pretraining.config.training import TrainConfig
from pretraining.optim.optimizer import Optimizer, ParameterState
from pretraining.optim.precision import precision_of, round_stochastically
from pretraining.optim.rules import Moments, MomentSpec
from pretraining.parallel.engine import LOSS_SCALE, RECENT_FIGURES

COUNTERS = ("updates", "refused", "first_refused")  # see engine.StepResult


class Gradients(NamedTuple):
    """The gradients of one global batch."""

    by_name: dict[str, Tensor]  # multiplied by `divisor`, where there is one
    divisor: Tensor | None
    loss: Tensor  # mean over the trained tokens of the global batch
    norm: Tensor  # of the gradients of that mean

    def mean(self, name: str, clip: Tensor | None) -> Tensor:
        """Return a gradient of that mean, multiplied by `clip`."""
        gradient = self.by_name[name]
        if self.divisor is not None:
            gradient = gradient.float() / self.divisor
        return gradient if clip is None else gradient * clip


class OptimizerStep(ABC):
    """The optimizer's state on the devices, and the sums of the current global batch."""

    def __init__(self, config: TrainConfig, optimizer: Optimizer, device: torch.device) -> None:
        """Create the moments and counters on `device`; the subclass has placed the parameters."""
        self.config, self.optimizer, self.device = config, optimizer, device
        self.precision = precision_of(config)
        self.totals = torch.zeros(2, device=device)  # loss and trained tokens of this global batch so far
        self.counters = torch.zeros(len(COUNTERS), device=device)
        self.loss_scale = config.loss_scale_on(device)
        self.recent = config.recent_figures_on(device)
        parts = {LOSS_SCALE: self.loss_scale, RECENT_FIGURES: self.recent}
        self.parts = {name: part for name, part in parts.items() if part}  # what only some runs have, by its name
        optimizer.updates = torch.zeros((), device=device)
        self.groups = [[parameter] for parameter in optimizer.parameters]  # what `compute_updates` takes at once
        # The model runs on the rounded copies; the optimizer state keeps the fp32 parameters.
        self.rounded_copies: dict[str, Tensor] = {}
        if self.precision.keeps_rounded_copy:
            for parameter in optimizer.parameters:
                self.rounded_copies[parameter.name] = parameter.weight
                parameter.weight = parameter.weight.detach().clone()
                self.place(parameter, parameter.weight, is_moment=False)
        for parameter in optimizer.parameters:
            parameter.initialize_moments(self._initial_moment)
        self.round_copies()

    # ---- Supplied by the engine

    @abstractmethod
    def reduce_gradients(self) -> Gradients:
        """Return the gradients of all micro-batches, summed over devices, and forget them."""

    @abstractmethod
    def random_bits(self, parameter: ParameterState, prefix: str, tensor: Tensor, update: Tensor) -> Tensor:
        """Return 16 random bits for each local element of the parameter (prefix "") or of its moment ("<moment>.")."""

    @abstractmethod
    def place(self, parameter: ParameterState, tensor: Tensor, *, is_moment: bool) -> None:
        """Shard `tensor`, which has been written, as the layout shards the parameter or its moments."""

    def on_full(self, function: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
        """See rules.OnFull."""
        return function(matrices)

    def compute_updates(
        self, parameters: Sequence[ParameterState], gradients: Sequence[Tensor], step: Tensor, rate: Tensor
    ) -> Iterable[tuple[Tensor, Moments]]:
        """Return the new weight and moments of each parameter of a group, in fp32."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            yield parameter.compute_update(gradient, step, rate, self.on_full)

    # ---- The step

    @torch.no_grad()
    def apply(self, rate: Tensor | float) -> Tensor:
        """Update the parameters with the gradients of the global batch; a refused update changes no tensor.

        rate: the learning rate. Returns what `figures` names.
        """
        gradients = self.reduce_gradients()
        is_accepted = self._accept(gradients)
        clip = (limit / (gradients.norm + 1e-6)).clamp(max=1.0) if (limit := self.config.grad_clip_thresh) else None
        self.update(gradients, clip, rate, is_accepted)
        self.round_copies()
        self.totals.zero_()
        return torch.stack((gradients.loss, gradients.norm, *self.counters.unbind(), *self._part_figures().values()))

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of what `apply` returns; see engine.StepResult."""
        return ("loss", "grad_norm", *COUNTERS, *self._part_figures())

    def _part_figures(self) -> dict[str, Tensor]:
        return {name: figure for part in self.parts.values() for name, figure in part.figures().items()}

    def update(self, gradients: Gradients, clip: Tensor | None, rate: Tensor | float, is_accepted: Tensor) -> None:
        """Apply the update rule to each group of parameters in turn."""
        rate = torch.as_tensor(rate, dtype=torch.float32).to(self.device, non_blocking=True)
        step = self.optimizer.updates + 1
        for group in self.groups:
            means = [gradients.mean(parameter.name, clip) for parameter in group]
            for parameter, (weight, moments) in zip(group, self.compute_updates(group, means, step, rate), strict=True):
                for name, target in parameter.moments.items():
                    moment = self._stored(moments[name], target, parameter, f"{name}.", step)
                    target.copy_(torch.where(is_accepted, moment, target))
                    self.place(parameter, target, is_moment=True)
                stored = self._stored(weight, parameter.weight, parameter, "", step)
                parameter.weight.copy_(torch.where(is_accepted, stored, parameter.weight))
                self.place(parameter, parameter.weight, is_moment=False)
        self.optimizer.updates.copy_(torch.where(is_accepted, step, self.optimizer.updates))

    def _stored(self, value: Tensor, target: Tensor, parameter: ParameterState, prefix: str, step: Tensor) -> Tensor:
        """`value` in the dtype of `target`, rounded as the precision mode says."""
        if value.dtype != target.dtype and self.precision.stochastic_rounding:
            value = round_stochastically(value, self.random_bits(parameter, prefix, target, step))
        return value.to(target.dtype)

    def _accept(self, gradients: Gradients) -> Tensor:
        """Return whether the update may be applied. An overflow that fp16's loss scale caused does not count."""
        is_finite = torch.isfinite(gradients.loss) & torch.isfinite(gradients.norm)
        is_overflow = self.loss_scale.can_back_off(gradients.loss) if self.loss_scale else torch.zeros_like(is_finite)
        is_accepted = self._count(is_finite | is_overflow) & is_finite
        if self.loss_scale:
            self.loss_scale.update(is_finite)
        if self.recent:
            is_accepted = is_accepted & self.recent.are_ordinary(gradients.loss, gradients.norm)
        return is_accepted

    def _count(self, is_healthy: Tensor) -> Tensor:
        """Count this step; return whether it may be applied: after max_skipped_steps refusals none may be."""
        steps, refused, first = self.counters.unbind()
        steps, refused = steps + 1, refused + (~is_healthy).float()
        first = torch.where((first == 0) & ~is_healthy, steps, first)
        self.counters.copy_(torch.stack((steps, refused, first)))
        return is_healthy & (refused <= self.config.max_skipped_steps)

    # ---- State

    def tensors(self, model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
        """Yield every parameter (prefix "") and moment (prefix "optimizer.<moment>."): prefix, parameter name, tensor.

        Of a parameter with a rounded copy, on which the model runs, the parameter itself.
        """
        trained = {parameter.name: parameter.weight for parameter in self.optimizer.parameters}
        for name, weight in model.named_parameters():
            yield "", name, trained.get(name, weight)
        for parameter in self.optimizer.parameters:
            for name, moment in parameter.moments.items():
                yield f"optimizer.{name}.", parameter.name, moment

    def small_tensors(self) -> dict[str, Tensor]:
        """Return the rest of the state, alike on all devices, by its name in a checkpoint."""
        return {"optimizer.step": self.optimizer.updates, **{name: part.state for name, part in self.parts.items()}}

    def part_tensors(self) -> list[Tensor]:
        """Return the tensors of what only some runs have."""
        return [value for part in self.parts.values() for value in vars(part).values() if isinstance(value, Tensor)]

    def bytes_per_device(self, model: nn.Module, device_bytes: Callable[[Tensor], int]) -> dict[str, int]:
        """See engine.Trainee; `device_bytes` measures the local shard of one tensor."""
        sums = {"parameters": sum(map(device_bytes, self.rounded_copies.values())), "moments": 0}
        for prefix, _, tensor in self.tensors(model):
            sums["moments" if prefix else "parameters"] += device_bytes(tensor)
        return sums

    def _initial_moment(self, parameter: ParameterState, shape: torch.Size, spec: MomentSpec) -> Tensor:
        dtype = self.precision.optimizer_state
        if spec.initial is None:
            moment = (parameter.weight.detach() * 1).to(dtype)  # on XLA a clone keeps the parameter's sharding
        else:
            moment = torch.full(shape, spec.initial, dtype=dtype, device=self.device)
        self.place(parameter, moment, is_moment=True)
        return moment

    @torch.no_grad()
    def round_copies(self) -> None:
        """Round the copies that the model runs on, where the precision mode keeps any."""
        for parameter in self.optimizer.parameters if self.rounded_copies else ():
            copy = self.rounded_copies[parameter.name]
            bits = self.random_bits(parameter, "", parameter.weight, self.optimizer.updates)
            copy.copy_(round_stochastically(parameter.weight, bits))
            self.place(parameter, copy, is_moment=False)

    @torch.no_grad()
    def finish_loading(self, restart_optimizer: bool) -> None:
        """Complete the state after a load has filled it. See engine.TrainingState.commit."""
        if restart_optimizer:
            self.optimizer.updates.zero_()  # what was there before the load may have counted some
            for part in self.parts.values():
                part.restart()
            for parameter in self.optimizer.parameters:
                parameter.initialize_moments(self._initial_moment)  # some rules start from a copy of the weight
        self.round_copies()
