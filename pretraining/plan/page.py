"""A plan as one page of text, and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.monitor.figures import flop, percent, size
from pretraining.parallel.recompute import block_mask
from pretraining.parallel.sharding import axes_of
from pretraining.plan.compiled import Truth
from pretraining.plan.engines import engine_of
from pretraining.plan.plan import USABLE, Plan, nearest_fit
from pretraining.plan.stages import idle

FIELDS = (  # what a change of the layout is made of
    *("sharding_strategy", "sharding_group_size", "tensor_parallel_size", "sequence_parallel", "context_parallel_size"),
    *("batch_size", "fsdp_activation_checkpointing", "selective_checkpointing", "plan_devices"),
)


def page(plan: Plan) -> str:
    """One screen."""
    return "\n".join([*_head(plan), "", *_parameters(plan), "", *_memory(plan), "", *_traffic(plan), "", *_time(plan)])


def _head(plan: Plan) -> list[str]:
    config, shape = plan.config, model_shape(plan.config)
    ranks = {"stage": plan.stage.of, **plan.mesh._asdict()}
    axes = " x ".join(f"{axis} {count}" for axis, count in ranks.items() if count > 1) or "1"
    mask = block_mask(config, shape.num_layers)
    return [
        f"plan           {config.model_variant}, {shape.parameters:,} parameters, {config.sharding_strategy}",
        f"devices        {config.plan_devices:,} x {plan.kind.name} ({size(plan.kind.memory)}): {axes}; "
        f"{engine_of(config)} engine",
        f"batch          {config.tokens_per_step:,} tokens a step: {config.global_batch_size:,} sequences of "
        f"{config.seq_length:,}; {config.batch_size} a rank and pass, {config.gradient_accumulation_steps} passes",
        f"recomputed     {sum(mask)} of {len(mask)} blocks",
        *([_stage_line(plan)] if plan.stage.of > 1 else []),
    ]


def _stage_line(plan: Plan) -> str:
    number, of, pieces = plan.stage
    told = f"stage          {number + 1} of {of}, which holds most; {pieces} pieces of its layers"
    return f"{told}; idle for {percent(idle(plan.config))} of the time it works. No engine trains with stages yet"


def _parameters(plan: Plan) -> list[str]:
    names = max(len(weight.name) for weight in plan.weights)
    lines = [f"{'parameter':<{names}}  {'shape':<16} {'tensors':>7}  {'bytes/device':>15}  split"]
    for weight in plan.weights:
        shape = " x ".join(map(str, weight.shape))
        split = ", ".join(f"{i}: {'+'.join(axes_of(axis))}" for i, axis in enumerate(weight.spec) if axis) or "whole"
        lines.append(f"{weight.name:<{names}}  {shape:<16} {weight.tensors:>7}  {plan.bytes_of(weight):>15,}  {split}")
    return lines


def _memory(plan: Plan) -> list[str]:
    lines = [
        f"{name:<14} {count:>18,} bytes/device  {size(count):>12}" for name, count in plan.memory._asdict().items()
    ]
    usable = USABLE * plan.kind.memory
    verdict = "fits" if plan.fits else "does not fit"
    lines.append(
        f"{'together':<14} {plan.memory.total:>18,} bytes/device  {size(plan.memory.total):>12}: {verdict} in "
        f"{size(usable)} ({USABLE:.0%} of {size(plan.kind.memory)})"
    )
    if not plan.fits:
        lines.append(f"{'nearest':<14} {_change(plan.config, nearest_fit(plan))}")
    return lines


def _change(config: TrainConfig, other: TrainConfig | None) -> str:
    if other is None:
        return "no change of sharding, recomputation, batch_size or up to 16 times the devices makes it fit"
    changed = [name for name in FIELDS if getattr(config, name) != getattr(other, name)]
    return f"fits with {' '.join(f'--{name}={getattr(other, name)}' for name in changed)}"


def _traffic(plan: Plan) -> list[str]:
    lines = [f"{'collective':<26} {'operation':<15} {'along':<24} {'bytes/device and step':>22} {'least':>19}"]
    for one in plan.collectives:
        along = "+".join(axis for axis in one.axes if getattr(plan.mesh, axis, 2) > 1)
        lines.append(f"{one.what:<26} {one.operation:<15} {along:<24} {one.bytes:>22,} {one.least:>19,}")
    return lines if plan.collectives else ["no collectives"]


def _time(plan: Plan) -> list[str]:
    return [
        f"FLOP/token     {flop(plan.flops)} (6 N + 12 L d S)",
        f"step           {plan.step_seconds:.3f} s predicted, MFU {percent(plan.mfu)}: computation "
        f"{plan.compute_seconds:.3f} s at {plan.kind.efficiency:.0%} of {flop(plan.kind.peak_flops)}/s, recomputation "
        f"included; {plan.hidden_seconds:.3f} s of communication behind it, {plan.exposed_seconds:.3f} s not hidden",
        f"assumed        {plan.kind.link / 1e9:,.0f} GB/s within {plan.kind.per_host} devices, "
        f"{plan.kind.network / 1e9:,.0f} GB/s beyond",
    ]


def ranking(plans: list[Plan]) -> str:
    """A line for each mesh that fits, the quickest first."""
    if not plans:
        return "no mesh of these devices fits; --plan_search=False shows the nearest change"
    lines = [f"{'step s':>9} {'MFU':>6} {'memory':>11}  flags"]
    for plan in plans[:20]:
        flags = " ".join(f"--{name}={getattr(plan.config, name)}" for name in FIELDS[:-1] if _tells(plan.config, name))
        lines.append(f"{plan.step_seconds:>9.3f} {percent(plan.mfu):>6} {size(plan.memory.total):>11}  {flags}")
    return "\n".join([*lines, f"{len(plans)} meshes fit"])


def _tells(config: TrainConfig, name: str) -> bool:
    value = getattr(config, name)
    return name in ("sharding_strategy", "batch_size") or value not in (0, 1, False, "1")


def as_json(plan: Plan) -> dict[str, Any]:
    """The same as data: bytes, seconds, shares of 1."""
    return {
        "config": {name: getattr(plan.config, name) for name in FIELDS},
        "device_kind": plan.kind._asdict(),
        "mesh": {"stage": plan.stage.of, **plan.mesh._asdict()},
        "parameters": [{**weight._asdict(), "bytes": plan.bytes_of(weight)} for weight in plan.weights],
        "bytes_per_device": {**plan.memory._asdict(), "total": plan.memory.total},
        "fits": plan.fits,
        "flops_per_token": plan.flops,
        "executed_flops": plan.executed,
        "collectives": [one._asdict() for one in plan.collectives],
        "step_seconds": plan.step_seconds,
        "mfu": plan.mfu,
    }


# ---- Beside the compiler's


def compiled_page(plan: Plan, truth: Truth) -> str:
    """The plan's figures and those of the program that the TPU's compiler made, with their ratio."""
    seconds = sum(program.seconds for program in truth.programs)
    head = f"compiled       for {truth.target}, in {seconds:.0f} s after {truth.traced_seconds:.0f} s of tracing"
    if truth.refused:
        expected = "so does the plan" if not plan.fits else "where the plan says that it fits"
        return f"{head}\nrefused        {truth.refused}\n               {expected}"
    lines = [head, f"{'per device':<32} {'plan':>22} {'compiler':>22} {'compiler / plan':>16}"]
    return "\n".join([*lines, *(_compared(*row) for row in _rows(plan, truth))])


def _rows(plan: Plan, truth: Truth) -> list[tuple[str, int, int]]:
    """What, the plan's figure, the compiler's."""
    planned: Counter[str] = Counter()
    for one in plan.collectives:
        planned[one.operation] += one.bytes
    kinds = sorted(planned.keys() | truth.sent.keys())
    accumulates = (plan.config.gradient_accumulation_steps or 1) > 1
    held = plan.memory.parameters + plan.memory.moments + accumulates * plan.memory.gradients
    return [
        ("bytes held from step to step", held, truth.held),
        ("bytes within a step", plan.memory.total - held, truth.rest),
        *((f"bytes sent, {kind}", planned[kind], truth.sent.get(kind, 0)) for kind in kinds),
        ("bytes sent together", planned.total(), sum(truth.sent.values())),
        ("FLOP of a step", int(plan.executed), truth.flops),
    ]


def _compared(what: str, planned: int, measured: int) -> str:
    ratio = f"{measured / planned:.3f}" if planned else "-"
    return f"{what:<32} {planned:>22,} {measured:>22,} {ratio:>16}"


def compiled_json(truth: Truth) -> dict[str, Any]:
    """The same as data."""
    return {
        "target": truth.target,
        "refused": truth.refused,
        "held_bytes": truth.held,
        "rest_bytes": truth.rest,
        "sent_bytes": truth.sent,
        "flops": truth.flops,
        "programs": [program._asdict() for program in truth.programs],
    }
