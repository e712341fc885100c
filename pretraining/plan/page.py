"""A plan as one page of text, and as JSON."""

from __future__ import annotations

from typing import Any

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.monitor.figures import flop, percent, size
from pretraining.parallel.recompute import block_mask
from pretraining.parallel.sharding import axes_of
from pretraining.plan.plan import EFFICIENCY, USABLE, Plan, nearest_fit

FIELDS = (  # what a change of the layout is made of
    *("sharding_strategy", "sharding_group_size", "tensor_parallel_size", "sequence_parallel", "context_parallel_size"),
    *("batch_size", "fsdp_activation_checkpointing", "selective_checkpointing", "plan_devices"),
)


def page(plan: Plan) -> str:
    """One screen."""
    return "\n".join([*_head(plan), "", *_parameters(plan), "", *_memory(plan), "", *_traffic(plan), "", *_time(plan)])


def _head(plan: Plan) -> list[str]:
    config, shape = plan.config, model_shape(plan.config)
    axes = " x ".join(f"{axis} {ranks}" for axis, ranks in plan.mesh._asdict().items() if ranks > 1) or "1"
    mask = block_mask(config, shape.num_layers)
    return [
        f"plan           {config.model_variant}, {shape.parameters:,} parameters, {config.sharding_strategy}",
        f"devices        {plan.mesh.size:,} x {plan.kind.name} ({size(plan.kind.memory)}): {axes}",
        f"batch          {config.tokens_per_step:,} tokens a step: {config.global_batch_size:,} sequences of "
        f"{config.seq_length:,}; {config.batch_size} a rank and pass, {config.gradient_accumulation_steps} passes",
        f"recomputed     {sum(mask)} of {len(mask)} blocks",
    ]


def _parameters(plan: Plan) -> list[str]:
    names = max(len(weight.name) for weight in plan.weights)
    lines = [f"{'parameter':<{names}}  {'shape':<16} {'tensors':>7}  {'bytes/device':>15}  split"]
    for weight in plan.weights:
        shape = " x ".join(map(str, weight.shape))
        split = ", ".join(f"{i}: {'+'.join(axes_of(axis))}" for i, axis in enumerate(weight.spec) if axis) or "whole"
        lines.append(f"{weight.name:<{names}}  {shape:<16} {weight.tensors:>7}  {weight.bytes:>15,}  {split}")
    return lines


def _memory(plan: Plan) -> list[str]:
    lines = [f"{name:<14} {count:>18,} bytes/device  {size(count):>12}" for name, count in plan.state._asdict().items()]
    usable = USABLE * plan.kind.memory
    verdict = "fits" if plan.fits else "does not fit"
    lines.append(
        f"{'together':<14} {plan.state.total:>18,} bytes/device  {size(plan.state.total):>12}: {verdict} in "
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
        along = "+".join(axis for axis in one.axes if getattr(plan.mesh, axis) > 1)
        lines.append(f"{one.what:<26} {one.operation:<15} {along:<24} {one.bytes:>22,} {one.least:>19,}")
    return lines if plan.collectives else ["no collectives"]


def _time(plan: Plan) -> list[str]:
    return [
        f"FLOP/token     {flop(plan.flops)} (6 N + 12 L d S)",
        f"step           {plan.step_seconds:.3f} s predicted, MFU {percent(plan.mfu)}: computation "
        f"{plan.compute_seconds:.3f} s at {EFFICIENCY:.0%} of {flop(plan.kind.peak.flops)}/s, recomputation included; "
        f"{plan.hidden_seconds:.3f} s of communication behind it, {plan.exposed_seconds:.3f} s of it not hidden",
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
        lines.append(f"{plan.step_seconds:>9.3f} {percent(plan.mfu):>6} {size(plan.state.total):>11}  {flags}")
    return "\n".join([*lines, f"{len(plans)} meshes fit"])


def _tells(config: TrainConfig, name: str) -> bool:
    value = getattr(config, name)
    return name in ("sharding_strategy", "batch_size") or value not in (0, 1, False, "1")


def as_json(plan: Plan) -> dict[str, Any]:
    """The same as data: bytes, seconds, shares of 1."""
    return {
        "config": {name: getattr(plan.config, name) for name in FIELDS},
        "device_kind": plan.kind._asdict(),
        "mesh": plan.mesh._asdict(),
        "parameters": [weight._asdict() for weight in plan.weights],
        "bytes_per_device": {**plan.state._asdict(), "total": plan.state.total},
        "fits": plan.fits,
        "flops_per_token": plan.flops,
        "collectives": [one._asdict() for one in plan.collectives],
        "step_seconds": plan.step_seconds,
        "mfu": plan.mfu,
    }
