"""A configuration on devices that are not there: what it holds, what it sends, how long a step takes, whether it fits.

The step's time assumes: operations at the kind's efficiency; collectives of parameters and gradients hidden behind
them, so that the longer of the two counts; those of activations not hidden; a pipeline's stages idle as long as it
takes to fill and drain; a mesh axis that reaches over hosts at the network's rate, others at the link's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pretraining.config.devices import PLAN_KINDS, DeviceKind
from pretraining.config.errors import ConfigError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problems
from pretraining.config.variants import model_shape
from pretraining.monitor.flops import flops_per_token
from pretraining.parallel.layout import StateTensor
from pretraining.parallel.mesh import Mesh, resolve_batch, resolve_mesh
from pretraining.parallel.recompute import block_mask
from pretraining.plan.memory import DeviceMemory, device_memory, tensor_bytes, tensors_of, weights_of
from pretraining.plan.stages import Stage, idle, staged, stages
from pretraining.plan.traffic import Collective, collectives

USABLE = 0.92  # of the memory: the rest is the runtime's, and fragments (a CUDA context and NCCL take 2 to 4 GiB)


class Plan(NamedTuple):
    """What follows from a configuration on so many devices of a kind."""

    config: TrainConfig  # with its batch resolved
    kind: DeviceKind
    mesh: Mesh  # of one stage's devices
    stage: Stage  # of a pipeline, the one that holds most: what follows is its
    weights: list[StateTensor]
    memory: DeviceMemory
    collectives: list[Collective]
    flops: int  # per token, 6 N + 12 L d S
    executed: float  # operations that a device runs in a step
    compute_seconds: float
    hidden_seconds: float  # of communication, behind the computation
    exposed_seconds: float

    def bytes_of(self, weight: StateTensor) -> int:
        """Return the bytes of a parameter on one device."""
        return tensor_bytes(self.config, self.mesh, weight)

    @property
    def fits(self) -> bool:
        """Whether a device holds it."""
        return self.memory.total <= USABLE * self.kind.memory

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return max(self.compute_seconds, self.hidden_seconds) * (1 + idle(self.config)) + self.exposed_seconds

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's own operations take."""
        work = self.flops * self.config.tokens_per_step / (self.kind.peak_flops * self.config.plan_devices)
        return work / self.step_seconds


def plan_of(config: TrainConfig) -> Plan:
    """The plan that --plan_devices and --plan_device_kind ask for. ConfigError where sizes do not divide."""
    kind, config = PLAN_KINDS[config.plan_device_kind], replace(config)
    devices = config.plan_devices // config.pipeline_parallel_size
    mesh = resolve_mesh(config, devices, min(kind.per_host, devices))
    resolve_batch(config, mesh.data_ranks)
    shape = model_shape(config)
    flops = flops_per_token(shape, config.seq_length).full
    part = staged(config)
    tensors = {stage: tensors_of(part, mesh, stage) for stage in stages(config)}
    memories = {stage: device_memory(part, mesh, held, stage) for stage, held in tensors.items()}
    stage = max(memories, key=lambda one: memories[one].total)
    weights = weights_of(tensors[stage])
    executed = executed_flops(config, weights) * config.tokens_per_step / config.plan_devices
    sent = collectives(part, mesh, weights, stage)
    seconds = {one.what: one.bytes / _rate(one, mesh, kind) for one in sent}
    exposed = sum(seconds[one.what] for one in sent if one.axes[0] in ("tensor", "context", "stage"))
    return Plan(
        config,
        kind,
        mesh,
        stage,
        weights,
        memories[stage],
        sent,
        flops,
        executed,
        executed / (kind.peak_flops * kind.efficiency),
        sum(seconds.values()) - exposed,
        exposed,
    )


def executed_flops(config: TrainConfig, weights: list[StateTensor]) -> float:
    """Return the operations of matrix products that are run per token, given the parameters of one stage.

    6 N, attention below the diagonal (6 L d S), its scores once more in every backward pass (L d S), and of a
    recomputed block the forward pass without its last product, whose result is not needed again.
    """
    shape = model_shape(config)
    scores = shape.num_layers * shape.num_attention_heads * shape.head_dim * config.seq_length
    blocks = [weight for weight in weights if ".layers." in weight.name and len(weight.shape) > 1]
    stage = sum(weight.tensors * math.prod(weight.shape) for weight in blocks if "down_proj" not in weight.name)
    again = stage * config.pipeline_parallel_size
    share = sum(block_mask(config, shape.num_layers)) / shape.num_layers
    return flops_per_token(shape, config.seq_length).causal + scores + share * 2 * (again + scores)


def _rate(one: Collective, mesh: Mesh, kind: DeviceKind) -> float:
    """Bytes a second along the axes: the last axis of the mesh has neighbours, the first the devices furthest apart."""
    if one.axes == ("stage",):
        return kind.network if mesh.size >= kind.per_host else kind.link
    names = list(mesh._asdict())
    widest = min(names.index(axis) for axis in one.axes)
    reach = math.prod(list(mesh)[widest:])
    return kind.network if reach > kind.per_host else kind.link


def nearest_fit(plan: Plan) -> TrainConfig | None:
    """The least of some changes after which it fits; None where none of them is enough."""
    config, devices = plan.config, plan.config.plan_devices
    base: dict[str, Any] = {"global_batch_size": None, "gradient_accumulation_steps": None}
    recomputed = {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1"}
    split: dict[str, Any] = {"sharding_strategy": "fsdp", "sharding_group_size": 0}
    tries = [
        recomputed,
        {**recomputed, "batch_size": 1},
        {**split},
        {**split, **recomputed},
        {**split, **recomputed, "batch_size": 1},
        *({**split, **recomputed, "batch_size": 1, "tensor_parallel_size": t} for t in (2, 4, 8)),
        *({**split, **recomputed, "batch_size": 1, "plan_devices": devices * factor} for factor in (2, 4, 8, 16)),
    ]
    for changed in tries:
        other = _possible(replace(config, **{**base, **changed}))
        if other and other.fits:
            return other.config
    return None


def _possible(config: TrainConfig) -> Plan | None:
    """The plan, where the configuration is one."""
    try:
        return None if problems(config, missing_matters=False) else plan_of(config)
    except ConfigError:
        return None


def search(config: TrainConfig) -> list[Plan]:
    """Every way to lay this global batch over the devices that fits, the quickest first."""
    first = plan_of(config)
    found = [plan for other in _meshes(config) if (plan := _possible(_same_batch(other, first.config))) and plan.fits]
    return sorted(found, key=lambda plan: plan.step_seconds)


def _meshes(config: TrainConfig) -> Iterator[TrainConfig]:
    kind = PLAN_KINDS[config.plan_device_kind]
    tensors = [t for t in (1, 2, 4, 8, 16) if config.plan_devices % t == 0 and t <= kind.per_host]
    contexts = [c for c in (1, 2, 4) if config.plan_devices % c == 0]
    for strategy in ("ddp", "zero1", "fsdp", "hsdp"):
        for tensor in tensors:
            for context in contexts:
                for recompute in (False, True):
                    yield replace(
                        config,
                        sharding_strategy=strategy,
                        sharding_group_size=0,
                        tensor_parallel_size=tensor,
                        sequence_parallel=tensor > 1,
                        context_parallel_size=context,
                        fsdp_activation_checkpointing=recompute,
                        selective_checkpointing="1",
                        checkpoint_granularity="full",
                        checkpoint_modules="",
                    )


def _same_batch(config: TrainConfig, first: TrainConfig) -> TrainConfig:
    """The same global batch, in the largest micro-batches that its rows allow."""
    ranks = config.plan_devices // (config.tensor_parallel_size * config.context_parallel_size)
    total = first.global_batch_size or 1
    rows = max(1, min(total // ranks, first.batch_size))
    return replace(config, batch_size=rows, global_batch_size=total, gradient_accumulation_steps=None)
