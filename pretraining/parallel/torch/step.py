"""The optimizer step of the torch engine, on this process's shards as plain tensors.

A plain tensor costs no DTensor dispatch, and takes the masks of torch's fused optimizers in every version of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from pretraining.config.training import TrainConfig
from pretraining.noise import name_hashes, random_bits
from pretraining.optim.optimizer import Optimizer, ParameterState
from pretraining.optim.rules import Adam, Moments
from pretraining.parallel.accelerator import accelerator_of
from pretraining.parallel.step import Gradients, OptimizerStep
from pretraining.parallel.torch.state import WEIGHT, LocalShards, to_local
from pretraining.parallel.torch.tensor import all_reduce_partial_gradients

# Parameters of one shape, weight decay and learning rate that a call of the fused kernel updates. A TPU compiles a
# program for each list of shapes: its size must not grow with depth.
FUSED_PARAMETERS = 16


class TorchStep(OptimizerStep):
    """See step.OptimizerStep. Gradients are FSDP's: averaged over data-parallel ranks."""

    def __init__(
        self,
        config: TrainConfig,
        optimizer: Optimizer,
        device: torch.device,
        shards: LocalShards,
        tensor_ranks: DeviceMesh | None,
    ) -> None:
        self.shards, self._tensor_ranks = shards, tensor_ranks
        for parameter in optimizer.parameters:
            parameter.weight = to_local(parameter.weight)
        super().__init__(config, optimizer, device)
        # The fused kernel takes one counter per parameter.
        self._updates = {parameter.name: torch.zeros((), device=device) for parameter in optimizer.parameters}
        self._updates[optimizer.parameters[0].name] = optimizer.updates
        self._sums: dict[str, Tensor] = {}  # of gradients that are summed in another dtype than their parameters'
        # One kernel for all parameters is 5 to 10 times faster than one kernel for each operation.
        dtypes = self.precision.parameters, self.precision.gradients, self.precision.optimizer_state
        self._is_fused = set(dtypes) == {torch.float32} and all(
            type(parameter.rule) is Adam and parameter.rule.decoupled for parameter in optimizer.parameters
        )
        # Of a kind, the fused kernel takes some, and a rule of full tensors one for each device.
        self.groups, devices = [], shards.mesh.data_ranks * shards.mesh.tensor
        for _, group in groupby(sorted(optimizer.parameters, key=self._kind), key=self._kind):
            alike = list(group)
            size = FUSED_PARAMETERS if self._is_fused else devices if alike[0].rule.needs_full_tensor else 1
            self.groups += [alike[i : i + size] for i in range(0, len(alike), size)]

    def _kind(self, parameter: ParameterState) -> tuple[Any, ...]:
        """Return what parameters that are updated together have in common; the same in every process."""
        shape, spec = self.shards.shapes[parameter.name], self.shards.layout.parameter(parameter.name)
        return str(parameter.rule), parameter.decay, parameter.rate_scale, shape, str(spec)

    def add_loss(self, loss: Tensor, count: Tensor) -> None:
        """Add the summed loss of a micro-batch, or of several, and the number of its trained tokens."""
        self.totals += torch.stack((loss.detach(), count)).to(self.device)

    def add_gradients(self) -> None:
        """Add the gradients of a micro-batch to those before it, after its backward pass."""
        if self.precision.gradients == self.precision.parameters:
            return
        for name, weight in self.shards.weights.items():
            if weight.grad is not None:
                grad, weight.grad = to_local(weight.grad).to(self.precision.gradients), None
                self._sums[name] = self._sums[name] + grad if name in self._sums else grad

    def loss_factor(self) -> Tensor:
        """Factor of the gradients of a summed loss in fp16: the loss scale is that of a micro-batch's mean."""
        assert self.loss_scale is not None
        return self.loss_scale.scale / (self.config.batch_size * self.config.seq_length)

    def reduce_gradients(self) -> Gradients:
        """Sum loss, tokens and norm over processes in one collective."""
        weights, mesh = self.shards.weights, self.shards.mesh
        gradients = self._sums or {name: to_local(w.grad) for name, w in weights.items() if w.grad is not None}
        self.complete(gradients)
        order = self.config.grad_clip_norm_type or math.inf
        sums = torch.cat((self.totals, self.power_sum(gradients, order)))
        reduce_over_processes(sums)
        trained = sums[1].clamp(min=1)  # a global batch without trained tokens has a loss and gradients of 0
        count = trained / mesh.tensor  # tensor ranks count the same tokens
        divisor = count / mesh.data_ranks * (self.loss_factor() if self.loss_scale else 1)
        norm = self._largest(gradients) if math.isinf(order) else sums[2] ** (1 / order)
        self._sums = {}
        for weight in weights.values():
            weight.grad = None
        return Gradients(gradients, divisor, sums[0] / trained, norm / divisor)

    def complete(self, gradients: dict[str, Tensor]) -> None:
        """All-reduce in place the gradients of which several processes have a part, besides FSDP's."""
        if self._tensor_ranks:
            layout, sequence_parallel = self.shards.layout, self.config.sequence_parallel
            all_reduce_partial_gradients(gradients, self._tensor_ranks, layout, sequence_parallel)

    def power_sum(self, shards: dict[str, Tensor], order: float = 2.0) -> Tensor:
        """This process's share of the sum of |x|^order over tensors sharded like the parameters of these names, [1].

        0 for the infinity norm, which is no sum.
        """
        if math.isinf(order):
            return torch.zeros(1, device=self.device)
        dims = {name: self.shards.layout.tensor_dimension(name) for name in shards}
        sharded = [shard for name, shard in shards.items() if dims[name] is not None]
        replicated = [shard for name, shard in shards.items() if dims[name] is None]
        sums = [total_norm(tensors, order, self.device) ** order for tensors in (sharded, replicated)]
        mesh = self.shards.mesh
        return (sums[0] + sums[1] / mesh.tensor)[None] / mesh.replica

    def _largest(self, shards: dict[str, Tensor]) -> Tensor:
        """Infinity norm of the unsharded tensors."""
        largest = total_norm(shards.values(), math.inf, self.device)
        reduce_over_processes(largest, "max")
        return largest

    def update(self, gradients: Gradients, clip: Tensor | None, rate: Tensor | float, is_accepted: Tensor) -> None:
        """Update with torch's fused AdamW where it serves.

        Its masks are those that torch.amp.GradScaler passes: the divisor, and whether the update is refused, in which
        case neither the tensors nor the counters change.
        """
        if not self._is_fused:
            super().update(gradients, clip, rate, is_accepted)
            return
        assert gradients.divisor is not None
        divisor = gradients.divisor if clip is None else gradients.divisor / clip
        divides = accelerator_of(self.config, self.device.type).divides_gradients
        for group in self.groups:
            first = group[0]
            rule: Any = first.rule
            grads = [gradients.by_name[parameter.name] for parameter in group]
            adamw(
                [parameter.weight for parameter in group],
                grads if divides else list(torch._foreach_div(grads, divisor)),
                [parameter.moments["exp_avg"] for parameter in group],
                [parameter.moments["exp_avg_sq"] for parameter in group],
                [],
                [self._updates[parameter.name] for parameter in group],
                fused=True,
                grad_scale=divisor if divides else None,
                found_inf=(~is_accepted).float(),
                amsgrad=False,
                maximize=False,
                lr=rate * first.rate_scale,
                weight_decay=first.decay / first.rate_scale,
                beta1=rule.beta1,
                beta2=rule.beta2,
                eps=rule.eps,
            )
        for parameter in self.optimizer.parameters:
            for name, follow in parameter.followers.items():
                moment = parameter.moments[name]
                moment.copy_(torch.where(is_accepted, follow(moment, parameter.weight), moment))

    def compute_updates(
        self, parameters: Sequence[ParameterState], gradients: Sequence[Tensor], step: Tensor, rate: Tensor
    ) -> Iterable[tuple[Tensor, Moments]]:
        """See OptimizerStep. Rules that need full tensors are an extension's, which has them on this engine."""
        if parameters[0].rule.needs_full_tensor:
            return self.config.full_tensor_updates(self.shards, parameters, gradients, step, rate)
        return super().compute_updates(parameters, gradients, step, rate)

    def place(self, parameter: ParameterState, tensor: Tensor, *, is_moment: bool) -> None:
        """See OptimizerStep. A local shard stays where it is."""

    def random_bits(self, parameter: ParameterState, prefix: str, tensor: Tensor, update: Tensor) -> Tensor:
        """See OptimizerStep."""
        key = name_hashes(self.config.seed, [prefix + parameter.name])[0].to(tensor.device, non_blocking=True)
        spec = parameter.moment_specs()[prefix[:-1]] if prefix else WEIGHT
        return random_bits(key, update, tensor.shape, self.shards.offsets(parameter.name, spec))

    @torch.no_grad()
    def finish_loading(self, restart_optimizer: bool) -> None:
        """See OptimizerStep. The load has set one of the fused kernel's counters."""
        super().finish_loading(restart_optimizer)
        for counter in self._updates.values():
            counter.copy_(self.optimizer.updates)


def total_norm(tensors: Iterable[Tensor], order: float, device: torch.device) -> Tensor:
    """Return the norm of the tensors as one vector, [], fp32 on `device`; 0 without an element.

    torch's get_total_norm rounds the norm of each bf16 tensor to bf16, and has no infinity norm of an empty shard.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(filled, order, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms).to(device), order)


def reduce_over_processes(values: Tensor, operation: str = "sum") -> None:
    """All-reduce `values` in place, where there are several processes; an operation that can be traced."""
    if dist.is_initialized():
        funcol.all_reduce_inplace(values, operation, dist.group.WORLD)
