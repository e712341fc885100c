"""A configuration on devices that are not present: memory, communication, time of a step, and whether it fits.

The step's time assumes: operations run at the kind's efficiency; collectives of parameters and gradients overlap with
them, so the longer of the two counts; collectives of activations do not overlap; a pipeline's stages idle while it
fills and drains; a mesh axis that spans hosts (TPUs: slices) communicates at the network's rate, any other at the
link's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from pretraining.config.errors import ConfigError, Problem
from pretraining.config.settings import ShardingStrategy
from pretraining.config.support import unsupported
from pretraining.config.validate import problems
from pretraining.config.variants import model_shape
from pretraining.extensions.flops import flops_per_token, frozen_weights, training_flops
from pretraining.extensions.state_bytes import StateTensor, state_tensors
from pretraining.models.checks import CHECKS as MODEL_CHECKS
from pretraining.parallel.checks import CHECKS as PARALLEL_CHECKS
from pretraining.parallel.layout import uneven_shards
from pretraining.parallel.mesh import Mesh, resolve_batch, resolve_mesh
from pretraining.parallel.recompute import model_mask
from pretraining.tools.plan.devices import PLAN_KINDS, Island, PlanKind, island_of
from pretraining.tools.plan.engines import engine_of, layout_in
from pretraining.tools.plan.memory import DeviceMemory, device_memory, tensor_bytes, weights_of
from pretraining.tools.plan.settings import PlanConfig
from pretraining.tools.plan.stages import has_stages, largest_share, other_cuts, pipelines, planned_idle_share
from pretraining.tools.plan.traffic import Collective, collectives

CHECKS = (*MODEL_CHECKS, *PARALLEL_CHECKS)
REFINED = 8  # fastest meshes, whose micro-batches and recomputation are searched, too
MICRO_BATCHES = (1, 2, 4, 8, 16)  # rows
RECOMPUTED_SHARES = ("1/2", "1/4")  # of the blocks
USABLE = 0.92  # of the memory: the rest is the runtime's, and fragments (a CUDA context and NCCL take 2 to 4 GiB)


class Plan(NamedTuple):
    """What follows from a configuration on so many devices of a kind."""

    config: PlanConfig  # with its batch resolved
    kind: PlanKind
    island: Island  # the devices with fast links between them
    mesh: Mesh
    weights: list[StateTensor]  # of the stage that holds most
    stage_memory: list[DeviceMemory]  # by stage; one where stages are alike
    collectives: list[Collective]
    flops: int  # per token, 6 N + 12 L d S
    executed: float  # operations that a device runs in a step
    compute_seconds: float
    overlapped_seconds: float  # of communication that runs at the same time as the computation
    exposed_seconds: float  # of communication that the computation waits for

    @property
    def memory(self) -> DeviceMemory:
        """What a device of the stage holds that holds most."""
        return max(self.stage_memory, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether a device's memory is large enough."""
        return self.memory.total <= USABLE * self.kind.device.memory

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return max(self.compute_seconds, self.overlapped_seconds) + self.exposed_seconds

    @property
    def least_seconds(self) -> float:
        """Seconds of a step that the model's own operations take at the peak."""
        return self.flops * self.config.tokens_per_step / (self.kind.device.peak_flops * self.config.plan_devices)

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's own operations reach."""
        return self.least_seconds / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices per second."""
        return self.config.tokens_per_step / self.step_seconds

    @property
    def run_seconds(self) -> float:
        """Seconds of all steps, of which those of a smaller global batch or of shorter rows are shorter."""
        seconds = 0.0
        for length, count in tokens_by_length(self.config).items():
            plan = self if length == self.config.seq_length else plan_of(_with_length(self.config, length))
            seconds += count / plan.tokens_per_second
        return seconds

    @property
    def run_flops(self) -> int:
        """Operations of the model in all steps, in the convention of `flops`."""
        return sum(training_flops(self.config, length).full * n for length, n in tokens_by_length(self.config).items())

    def bytes_of(self, weight: StateTensor) -> int:
        """Return the bytes of a parameter on one device."""
        return tensor_bytes(self.config, self.mesh, weight)


def plan_of(config: PlanConfig) -> Plan:
    """Return the plan for plan_devices of plan_device_kind. Raises ConfigError where sizes do not divide."""
    kind = PLAN_KINDS[config.plan_device_kind]
    island = island_of(kind, config.plan_devices, config.plan_topology)
    mesh = resolve_mesh(config, config.plan_devices, island.devices)
    config = resolve_batch(config, mesh.data_ranks)
    stages = list(state_tensors(config, layout_in(config, mesh)))
    stage_memory = [device_memory(config, mesh, tensors, stage) for stage, tensors in enumerate(stages)]
    fullest = max(range(len(stages)), key=lambda stage: stage_memory[stage].total)
    weights = weights_of(stages[fullest])
    executed = executed_flops(config, weights) * config.tokens_per_step / config.plan_devices
    sent = collectives(config, mesh, weights)
    seconds = [collective.bytes / _rate(collective, mesh, kind, island) for collective in sent]
    waits = [collective.axes[0] in ("tensor", "context", "stage") for collective in sent]
    exposed = sum(duration for duration, waited in zip(seconds, waits, strict=True) if waited)
    return Plan(
        config=config,
        kind=kind,
        island=island,
        mesh=mesh,
        weights=weights,
        stage_memory=stage_memory,
        collectives=sent,
        flops=training_flops(config, config.seq_length).full,
        executed=executed,
        compute_seconds=executed / (kind.device.peak_flops * kind.efficiency),
        overlapped_seconds=sum(seconds) - exposed,
        exposed_seconds=exposed,
    )


def tokens_by_length(config: PlanConfig) -> dict[int, int]:
    """Return the tokens of a run by the length of the rows in which they are trained on."""
    stages = []
    if text := getattr(config, "seq_length_stages", ""):  # of an extension
        from pretraining.extensions.length_stages.settings import parse_stages

        stages = parse_stages(text)
    ends = [0, *(min(stage.last, config.num_steps) for stage in stages), config.num_steps]
    batches, tokens = config.global_batches(config.global_batch_size or 0), dict[int, int]()
    for before, last in pairwise(ends):
        if count := (batches.trained(last) - batches.trained(before)) * config.seq_length:
            length = config.row_length(last)
            tokens[length] = tokens.get(length, 0) + count
    return tokens


def _with_length(config: PlanConfig, length: int) -> PlanConfig:
    """Return a configuration whose rows all have this length, with as many tokens in a micro-batch and in a step."""
    rows, total = (count * config.seq_length // length for count in (config.batch_size, config.global_batch_size or 0))
    others: dict[str, Any] = {"seq_length_stages": ""}
    others |= {"rampup_batch_size": ""} if hasattr(config, "rampup_batch_size") else {}  # of an extension
    return replace(config, seq_length=length, batch_size=rows, global_batch_size=total, **others)


def executed_flops(config: PlanConfig, weights: list[StateTensor]) -> float:
    """Return the operations of matrix products that are run per token, given the parameters of one device.

    6 N, attention below the diagonal (6 L d S), its scores once more in every backward pass (L d S), and of a
    recomputed block the forward pass without its last product, whose result is not needed again. A pipeline of the XLA
    engine runs its blocks in idle ticks, too, and padding like layers. On the torch engine all stages count as the one
    with most work, of which the head is a part, and idle time counts like work.
    """
    shape = model_shape(config)
    scores = shape.num_layers * shape.num_attention_heads * shape.head_dim * config.seq_length
    blocks = [weight for weight in weights if ".layers." in weight.name and len(weight.shape) > 1]
    layer = sum(math.prod(weight.shape) for weight in blocks)
    repeated = sum(math.prod(weight.shape) for weight in blocks if "down_proj" not in weight.name)
    again = 2 * sum(model_mask(config)) * (repeated + scores / shape.num_layers)
    of_blocks = 6 * shape.num_layers * layer - 2 * frozen_weights(config) + 7 * scores + again
    of_others = flops_per_token(shape, config.seq_length).causal - 6 * (shape.num_layers * layer + scores)
    if engine_of(config) == "xla":
        return (
            of_others + of_blocks * (1 + planned_idle_share(config)) * len(config.division.stack()) / shape.num_layers
        )
    return largest_share(config, of_blocks, of_others) * (1 + planned_idle_share(config))


def best_cuts(plan: Plan) -> Plan | None:
    """Return the plan with the pipeline_cuts that compute least; None if its step is not shorter, or does not fit.

    Equal pieces are best where the stages share embedding and head; where the last stage has the head, its piece is
    shorter.
    """
    config = plan.config
    chosen = min((config, *other_cuts(config)), key=lambda choice: executed_flops(choice, plan.weights))
    if chosen is config:
        return None
    best = plan_of(chosen)
    return best if best.step_seconds < plan.step_seconds and best.fits >= plan.fits else None


def _rate(collective: Collective, mesh: Mesh, kind: PlanKind, island: Island) -> float:
    """Return the bytes per second along its axes: ranks of the mesh's last axis are neighbours, of the first far."""
    names = list(mesh._asdict())
    widest = min(names.index(axis) for axis in collective.axes)
    reach = math.prod(list(mesh)[widest:])
    return kind.network if reach > island.devices else kind.link


def nearest_fit(plan: Plan) -> PlanConfig | None:
    """Return the configuration after the smallest of some changes that makes it fit; None if none of them does.

    The global batch is the same wherever the devices and micro-batches divide it.
    """
    config, devices = plan.config, plan.config.plan_devices
    accumulated = config.gradient_accumulation_steps if has_stages(config) else None
    other_batch: dict[str, Any] = {"global_batch_size": None, "gradient_accumulation_steps": accumulated}
    other_batch |= {"rampup_batch_size": ""} if hasattr(config, "rampup_batch_size") else {}  # of an extension
    recompute = {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1"}
    shard: dict[str, Any] = {"sharding_strategy": "fsdp", "sharding_group_size": 0}
    smallest = {**shard, **recompute, "batch_size": 1}
    changes = [
        recompute,
        {**recompute, "batch_size": 1},
        shard,
        {**shard, **recompute},
        smallest,
        *({**smallest, "tensor_parallel_size": ranks} for ranks in (2, 4, 8)),
        *({**smallest, "plan_devices": devices * factor} for factor in (2, 4, 8, 16)),
    ]
    for change, batch in product(changes, ({"gradient_accumulation_steps": None}, other_batch)):
        other = _plan_if_valid(replace(config, **{**batch, **change}))
        if other and other.fits:
            return other.config
    return None


def refusals(plan: Plan) -> list[Problem]:
    """Return the problems for which the planned configuration would not train on its engine."""
    config, engine = plan.config, engine_of(plan.config)
    uneven = uneven_shards(config, plan.mesh) if engine == "torch" else ()
    return [*unsupported(config, engine), *uneven]


def _plan_if_valid(config: PlanConfig) -> Plan | None:
    try:
        plan = None if problems(config, CHECKS, missing_matters=False) else plan_of(config)
    except ConfigError:
        return None
    return None if plan is None or refusals(plan) else plan


def search(config: PlanConfig) -> list[Plan]:
    """Return the plan of every mesh that fits and trains on its engine with this global batch, the fastest first.

    A mesh on which batch_size does not fit has micro-batches of one row. Of the REFINED fastest meshes, other sizes of
    micro-batches and other shares of recomputed blocks follow.
    """
    total = plan_of(config).config.global_batch_size or 1
    plans: list[Plan] = []
    for candidate in _candidates(config):
        plan = _plan_if_valid(_with_batch(candidate, total, config.batch_size))
        if plan and not plan.fits and plan.config.batch_size > 1:
            plan = _plan_if_valid(_with_batch(candidate, total, 1))
        if plan and plan.fits and not _is_another_name(plan):
            plans.append(best_cuts(plan) or plan)
    plans.sort(key=_cost)
    others = [_plan_if_valid(other) for plan in plans[:REFINED] for other in _refinements(plan.config, total)]
    refined = [plan for plan in others if plan and plan.fits]
    return sorted({_settings_that_count(plan): plan for plan in (*refined, *plans)}.values(), key=_cost)


def _cost(plan: Plan) -> tuple[float, int]:
    """Return what a search minimises: the time of a step, then memory."""
    return round(plan.step_seconds, 6), plan.memory.total


def _refinements(config: PlanConfig, total: int) -> Iterator[PlanConfig]:
    """Yield `config` with other micro-batches and shares of recomputed blocks."""
    shares = ("1", *RECOMPUTED_SHARES) if config.fsdp_activation_checkpointing else ("1",)
    for share, rows in product(shares, MICRO_BATCHES):
        yield _with_batch(replace(config, selective_checkpointing=share), total, rows)


def _settings_that_count(plan: Plan) -> tuple[object, ...]:
    """Return what two plans of one global batch differ in, if their steps do."""
    config = plan.config
    stages = (*config.division.pieces(), getattr(config, "pipeline_schedule", ""))
    shards = (config.sharding_strategy, plan.mesh, config.sequence_parallel)
    return (*shards, config.batch_size, model_mask(config), stages)


def is_same(plan: Plan, other: Plan) -> bool:
    """Return whether two plans of one global batch are the same configuration, however it is written."""
    return _settings_that_count(plan) == _settings_that_count(other)


def _is_another_name(plan: Plan) -> bool:
    """Return whether the strategy shards as a simpler one does: hsdp in one group, or any over a single rank."""
    if plan.config.sharding_strategy == "hsdp":
        return plan.mesh.replica == 1 or plan.mesh.shard * plan.mesh.context == 1
    return plan.config.sharding_strategy != "ddp" and plan.mesh.shard * plan.mesh.context == 1


def _candidates(config: PlanConfig) -> Iterator[PlanConfig]:
    devices = config.plan_devices
    linked = island_of(PLAN_KINDS[config.plan_device_kind], devices, config.plan_topology).devices
    tensors = [ranks for ranks in (1, 2, 4, 8, 16) if ranks <= linked]
    strategies: tuple[ShardingStrategy, ...] = ("ddp", "zero1", "fsdp", "hsdp")
    choices = product(strategies, pipelines(config), tensors, (1, 2, 4), (False, True))
    for strategy, (stages, settings), tensor, context, recompute in choices:
        if devices % (stages * tensor * context):
            continue
        yield replace(
            config,
            sharding_strategy=strategy,
            sharding_group_size=0,
            tensor_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            context_parallel_size=context,
            **settings,
            fsdp_activation_checkpointing=recompute,
            selective_checkpointing="1",
            checkpoint_granularity="full",
            checkpoint_modules="",
        )


def _with_batch(config: PlanConfig, total: int, rows: int) -> PlanConfig:
    """Return `config` with a global batch of `total` rows, in micro-batches of `rows` or as many as there are.

    With stages there are at least as many micro-batches.
    """
    ranks = config.plan_devices // (config.tensor_parallel_size * config.context_parallel_size)  # stages x data ranks
    batch_size = max(1, min(total // ranks, rows))
    return replace(config, batch_size=batch_size, global_batch_size=total, gradient_accumulation_steps=None)
