"""A plan as one page of text, and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pretraining.config.declaration import settings_of
from pretraining.config.errors import counted
from pretraining.config.variants import model_shape
from pretraining.extensions.flops import flops_formula
from pretraining.extensions.units import amount, describe_micro_batches, flop, size
from pretraining.monitor.figures import duration, percent
from pretraining.optim.precision import precision_of
from pretraining.parallel.recompute import model_mask
from pretraining.parallel.sharding import axes_of
from pretraining.tools.plan.compiled import CompiledStep
from pretraining.tools.plan.engines import engine_of
from pretraining.tools.plan.plan import USABLE, Plan, best_cuts, is_same, nearest_fit, plan_of, refusals
from pretraining.tools.plan.settings import PlanConfig
from pretraining.tools.plan.stages import micro_batches_per_graph, planned_idle_share

SHOWN = 20  # fastest configurations of a search
WORDS = (
    "mesh: stage x replica x shard x context x tensor. batches: micro-batches of so many rows per rank.",
    "MFU counts the operations of the model: 6 N + 12 L d S, all of attention's square. The assumed share of the peak",
    "counts those that run, with recomputation and without the masked half of attention. An MFU may be above it.",
)
# The settings that the plan varies.
VARIED = (
    "sharding_strategy",
    "sharding_group_size",
    "tensor_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "pipeline_cuts",
    "pipeline_balance",
    "pipeline_schedule",
    "batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "rampup_batch_size",
    "fsdp_activation_checkpointing",
    "selective_checkpointing",
    "checkpoint_granularity",
    "checkpoint_modules",
    "plan_devices",
)


def _varied(config: PlanConfig) -> list[str]:
    """Return the settings that the plan varies, of those whose extension is there."""
    return [name for name in VARIED if name in settings_of(type(config))]


def page(plan: Plan) -> str:
    """Return the plan as one screen of text."""
    return "\n".join([*_head(plan), "", *_parameters(plan), "", *_memory(plan), "", *_traffic(plan), "", *_time(plan)])


def _head(plan: Plan) -> list[str]:
    config, shape = plan.config, model_shape(plan.config)
    axes = " x ".join(f"{axis} {count}" for axis, count in plan.mesh._asdict().items() if count > 1) or "1"
    mask, rows = model_mask(config), config.global_batch_size or 0
    lines = [
        f"plan           {config.model_variant}, {shape.parameters:,} parameters, {config.sharding_strategy}",
        f"devices        {config.plan_devices:,} x {plan.kind.device.name} ({size(plan.kind.device.memory)}): {axes}; "
        f"{engine_of(config)} engine",
        f"hosts          {plan.island.describe(config.plan_devices)}",
        f"batch          {config.tokens_per_step:,} tokens/step = {counted(rows, 'sequence')} of "
        f"{config.seq_length:,}; {describe_micro_batches(config.gradient_accumulation_steps or 1, config.batch_size)}"
        f"{config.batch_changes}",
        f"recomputed     {sum(mask)} of {len(mask)} blocks",
    ]
    lines += [f"refused        {problem.subject} {problem.remedy}" for problem in refusals(plan)]
    lines += [
        f"pipeline       {note.removeprefix('pipeline: ')}" for note in config.division.notes(engine_of(config))[:1]
    ]
    if better := best_cuts(plan):
        flags = flags_of(better.config, config, alone=False)
        lines.append(f"best cuts      {flags}: {better.step_seconds:.3f} s instead of {plan.step_seconds:.3f} s")
    return lines


def _parameters(plan: Plan) -> list[str]:
    width = max(len(weight.name) for weight in plan.weights)
    lines = [f"{'parameter':<{width}}  {'shape':<16} {'tensors':>7}  {'bytes/device':>15}  sharded"]
    for weight in plan.weights:
        shape = " x ".join(map(str, weight.shape))
        axes = [f"{dim}: {'+'.join(axes_of(axis))}" for dim, axis in enumerate(weight.spec) if axis]
        cells = f"{shape:<16} {weight.tensors:>7}  {plan.bytes_of(weight):>15,}"
        lines.append(f"{weight.name:<{width}}  {cells}  {', '.join(axes) or 'replicated'}")
    return lines


def _memory(plan: Plan) -> list[str]:
    amounts = {**plan.memory._asdict(), "together": plan.memory.total}
    lines = [f"{name:<14} {count:>18,} bytes/device  {size(count):>12}" for name, count in amounts.items()]
    verdict, memory = "fits" if plan.fits else "does not fit", plan.kind.device.memory
    lines[-1] += f": {verdict} in {size(USABLE * memory)} ({USABLE:.0%} of {size(memory)})"
    if len(plan.stage_memory) > 1:
        lines.append(f"{'by stage':<14} {', '.join(size(memory.total) for memory in plan.stage_memory)}")
    if not plan.fits:
        lines.append(f"{'nearest':<14} {_change(plan.config, nearest_fit(plan))}")
    return lines


def _change(config: PlanConfig, other: PlanConfig | None) -> str:
    if other is None:
        return "no change of sharding, recomputation, batch_size or up to 16 times the devices makes it fit"
    return f"fits with {flags_of(other, config, alone=False)}"


def flags_of(config: PlanConfig, asked: PlanConfig, *, alone: bool = True) -> str:
    """Return the flags that turn the configuration `asked` into `config`, and with `alone` the defaults, too.

    Without gradient_accumulation_steps where the global batch says it.
    """
    bases = (asked, type(asked)(plan_devices=asked.plan_devices)) if alone else (asked,)
    shown = ("sharding_strategy", "batch_size") if alone else ()
    names = [n for n in _varied(config) if n in shown or any(getattr(config, n) != getattr(base, n) for base in bases)]
    if asked.gradient_accumulation_steps is None and "global_batch_size" in names:
        names = [name for name in names if name != "gradient_accumulation_steps"]
    return " ".join(f"--{name}={getattr(config, name)}" for name in names)


def _traffic(plan: Plan) -> list[str]:
    lines = [f"{'collective':<26} {'operation':<15} {'along':<24} {'bytes/device and step':>22} {'least':>19}"]
    for one in plan.collectives:
        along = "+".join(axis for axis in one.axes if getattr(plan.mesh, axis) > 1)
        lines.append(f"{one.purpose:<26} {one.operation:<15} {along:<24} {one.bytes:>22,} {one.least:>19,}")
    return lines if plan.collectives else ["no collectives"]


def _time(plan: Plan) -> list[str]:
    config, kind, devices = plan.config, plan.kind, plan.config.plan_devices
    tokens = config.sequences_of_run * config.seq_length
    cost = [f"cost           {_cost(plan):,.0f} at {config.plan_price:g} per device and hour"] * bool(config.plan_price)
    computation, overlapped = f"{plan.compute_seconds:.3f} s of computation", f"{plan.overlapped_seconds:.3f} s"
    return [
        f"FLOP/token     {flop(plan.flops)} ({flops_formula(config)})",
        f"step           {plan.step_seconds:.3f} s predicted, MFU {percent(plan.mfu)}: the longer of "
        f"{computation} and {overlapped} of communication that overlaps with it, and {plan.exposed_seconds:.3f} s of "
        "communication that does not",
        f"speed          {plan.tokens_per_second:,.0f} tokens/s, {plan.tokens_per_second / devices:,.0f} per device",
        f"run            {counted(config.num_steps, 'step')}: {duration(plan.run_seconds)}, "
        f"{amount(tokens)} tokens, {flop(plan.run_flops)}",
        *cost,
        f"assumed        {kind.efficiency:.0%} of {flop(kind.device.peak_flops)}/s, recomputation included; "
        f"{kind.link / 1e9:,.0f} GB/s within {counted(plan.island.devices, 'device')}, "
        f"{kind.network / 1e9:,.4g} GB/s beyond",
        *_other_products(config),
    ]


def _other_products(config: PlanConfig) -> list[str]:
    """Return a line where the run's products have another peak than bf16, of which alone the plan knows the speed."""
    is_fp32 = precision_of(config).compute.itemsize == 4
    products = "fp8" if config.precision_mode == "fp8" else "fp32" * is_fp32
    note = f"assumed        bf16 products, although this run's are {products}: the time is that of bf16"
    return [note] * bool(products)


def ranking(plans: list[Plan], asked: PlanConfig) -> str:
    """Return a line for each of the 20 fastest configurations and for the one `asked`, marked, and the best's flags."""
    if not plans:
        return "no mesh of these devices fits; --plan_search=False shows the nearest change"
    own = plan_of(asked)
    listed = [*enumerate(plans[:SHOWN], 1)]
    if own.config.plan_devices and not any(is_same(plan, own) for _, plan in listed):
        listed.append((1 + sum(plan.step_seconds < own.step_seconds for plan in plans), own))
    cost = f" {'cost':>12}" if asked.plan_price else ""
    head = f"{'':>5} {'step s':>9} {'MFU':>6} {'memory':>11}{cost}  {'':<6} {'mesh':<18} "
    lines = [f"{head}{'batches':<12} recomputed"]
    lines += [_row(number, plan, "yours" if is_same(plan, own) else "") for number, plan in listed]
    return "\n".join(
        [*lines, "", *WORDS, f"{len(plans)} configurations fit; the fastest:", flags_of(plans[0].config, asked)]
    )


def _row(number: int, plan: Plan, mark: str) -> str:
    """Return a line of at most 120 characters: many pipeline_cuts end in two dots."""
    config, mask = plan.config, model_mask(plan.config)
    figures = f"{number:>5} {plan.step_seconds:>9.3f} {percent(plan.mfu):>6} {size(plan.memory.total):>11}"
    figures += f" {_cost(plan):>12,.0f}" if config.plan_price else ""
    batch = f"{config.gradient_accumulation_steps} of {config.batch_size}"
    mesh, recomputed = "x".join(map(str, plan.mesh)), f"{sum(mask)} of {len(mask)}"
    cells = f"{config.sharding_strategy:<6} {mesh:<18} {batch:<12} {recomputed:<10}"
    cuts = getattr(config, "pipeline_cuts", "")
    marks = [mark, "" if plan.fits else "does not fit", cuts and f"cuts {cuts}"]
    line = f"{figures}  {cells} {', '.join(filter(None, marks))}".rstrip()
    return line if len(line) <= 120 else f"{line[:118]}.."


def _cost(plan: Plan) -> float:
    """Return what the run costs at plan_price."""
    return plan.run_seconds / 3600 * plan.config.plan_devices * plan.config.plan_price


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the same as data: bytes, seconds, shares of 1."""
    return {
        "config": {name: getattr(plan.config, name) for name in _varied(plan.config)},
        "device_kind": plan.kind.device._asdict() | {"link": plan.kind.link, "network": plan.kind.network},
        "island": plan.island._asdict(),
        "mesh": plan.mesh._asdict(),
        "idle_share": planned_idle_share(plan.config),
        "best_cuts": getattr((best_cuts(plan) or plan).config, "pipeline_cuts", ""),
        "parameters": [{**weight._asdict(), "bytes": plan.bytes_of(weight)} for weight in plan.weights],
        "bytes_per_device": {**plan.memory._asdict(), "total": plan.memory.total},
        "bytes_by_stage": [memory.total for memory in plan.stage_memory],
        "fits": plan.fits,
        "flops_per_token": plan.flops,
        "executed_flops": plan.executed,
        "collectives": [collective._asdict() for collective in plan.collectives],
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "run_seconds": plan.run_seconds,
        "mfu": plan.mfu,
    }


# ---- With the compiler's figures


def compiled_page(plan: Plan, compiled: CompiledStep) -> str:
    """Return the plan's figures next to those of the program that the TPU's compiler made, with their ratio."""
    seconds = sum(program.seconds for program in compiled.programs)
    head = f"compiled       for {compiled.target}, in {seconds:.0f} s after {compiled.traced_seconds:.0f} s of tracing"
    if compiled.refused:
        agrees = "which the plan says, too" if not plan.fits else "although the plan says that it fits"
        return f"{head}\nrefused        {compiled.refused}\n               {agrees}"
    lines = [head, f"{'per device':<32} {'plan':>22} {'compiler':>22} {'compiler / plan':>16}"]
    for name, planned, measured in _comparison(plan, compiled):
        ratio = f"{measured / planned:.3f}" if planned else "-"
        lines.append(f"{name:<32} {planned:>22,} {measured:>22,} {ratio:>16}")
    return "\n".join(lines)


def _comparison(plan: Plan, compiled: CompiledStep) -> list[tuple[str, int, int]]:
    """Return rows of a name, the plan's figure and the compiler's."""
    planned: Counter[str] = Counter()
    for one in plan.collectives:
        planned[one.operation] += one.bytes
    operations = sorted(planned.keys() | compiled.sent.keys())
    accumulates = (plan.config.gradient_accumulation_steps or 1) > micro_batches_per_graph(plan.config)
    state = plan.memory.parameters + plan.memory.moments + accumulates * plan.memory.gradients
    return [
        ("bytes of state", state, compiled.state_bytes),
        ("bytes within a step", plan.memory.total - state, compiled.transient_bytes),
        *((f"bytes sent, {name}", planned[name], compiled.sent.get(name, 0)) for name in operations),
        ("bytes sent together", planned.total(), sum(compiled.sent.values())),
        ("FLOP of a step", int(plan.executed), compiled.flops),
    ]


def compiled_json(compiled: CompiledStep) -> dict[str, Any]:
    """Return the compiler's figures as data."""
    totals = {"state_bytes": compiled.state_bytes, "transient_bytes": compiled.transient_bytes}
    programs = [program._asdict() for program in compiled.programs]
    return {**compiled._asdict(), **totals, "refused": compiled.refused, "programs": programs}
