"""Compare pipeline stages with one process of the torch engine on every mesh; tests run a selection of these cases.

    python -m tests.parallel.matrix xla 8 [part of a case's name]
    python -m tests.parallel.matrix torch 2|4|8 [part of a case's name]

Cases: stages and pieces, with every strategy, tensor, sequence and context ranks, blocks recomputed, numbers of layers,
on the torch engine every schedule, and on the XLA engine splash attention, interpreted. A pipeline gets at least twice
as many micro-batches as it has stages. Cases that combine two settings for the first time run first, so that an
interrupted run has tried every pair. Prints a line per case: the largest relative differences over 8 steps of its
losses and of its gradient norms from those of one process. Exits with 1 if a case failed or one is larger than
TOLERANCE.

The toy's AdamW has an eps of 1e-3. With 1e-8 an update depends on little more than the signs of the gradient, and an
element near 0 has its sign by rounding: sums in another order, which differ by 4e-7 in the first norm, differed by 4e-5
after four steps, without stages as well. With 1e-3 they stay below 1e-6, and an update depends on a gradient's size,
too. With initial weights of 0.1 no parameter's gradient is negligible: twice the gradient of one q_proj (1e-4) or of
one norm's weight (7e-5) exceeds TOLERANCE, and so does 1.001 times those of one stage (1.7e-4).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np

from main_training import configure
from pretraining.config.errors import ConfigError
from pretraining.parallel.layout import uneven_shards
from pretraining.parallel.mesh import resolve_batch, resolve_mesh
from tests.parallel.launch import ALONE, run_on_torch, run_on_xla
from tests.parallel.toy import TOY

Fields = dict[str, Any]
FIGURES = ("loss", "grad_norm")
TOLERANCE = 1e-5  # largest relative difference of a figure
CASES_PER_START = 18  # of the processes: few enough for launch.run's time limit on a busy machine

STEPS: Fields = {"num_steps": 8, "batch_size": 1, "optimizer_eps": 1e-3, "init_std": 0.1}
LAYERS = (8, 6)
STAGES = (1, 2, 4)
PIECES = (1, 2)
PLACEMENTS: dict[str, Fields] = {
    "ddp": {"sharding_strategy": "ddp"},
    "fsdp": {"sharding_strategy": "fsdp"},
    "hsdp": {"sharding_strategy": "hsdp", "sharding_group_size": 2},
    "zero1": {"sharding_strategy": "zero1"},
    "sequence": {"sharding_strategy": "fsdp", "tensor_parallel_size": 2, "sequence_parallel": True},
    "context": {"sharding_strategy": "fsdp", "context_parallel_size": 2},
    "splash": {"sharding_strategy": "fsdp", "tensor_parallel_size": 2, "attention_impl": "splash"},
    "context with splash": {"sharding_strategy": "fsdp", "context_parallel_size": 2, "attention_impl": "splash"},
}
RECOMPUTED: dict[str, Fields] = {
    "kept": {},
    "recomputed": {"fsdp_activation_checkpointing": True},
    "a third": {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/3"},
}
SCHEDULES = {"xla": ("auto",), "torch": ("auto", "GPipe")}


def shared_fields(devices: int, layers: int) -> Fields:
    """Return the fields of a case and of its reference."""
    return {**STEPS, "global_batch_size": 2 * devices, "num_layers": layers}


def cases_of(engine: str, devices: int) -> dict[str, Fields]:
    """Return the cases that this many devices can run, by name."""
    found: dict[str, Fields] = {}
    dimensions = (LAYERS, STAGES, PIECES, PLACEMENTS, RECOMPUTED, SCHEDULES[engine])
    for layers, stages, pieces, placement, recomputed, schedule in itertools.product(*dimensions):
        fields: Fields = {**shared_fields(devices, layers), **PLACEMENTS[placement], **RECOMPUTED[recomputed]}
        if stages > 1:
            fields |= {"pipeline_parallel_size": stages, "virtual_pipeline_size": pieces, "pipeline_schedule": schedule}
        elif (pieces, schedule) != (1, "auto"):
            continue
        if can_run(engine, devices, fields):
            found[f"{layers} layers, {stages} x {pieces} {schedule}, {placement}, {recomputed}"] = fields
    return found


def pairs_first(names: list[str]) -> list[str]:
    """Return the names ordered by the number of pairs of settings that none before has, most first."""
    pairs = {name: set(itertools.combinations(name.split(", "), 2)) for name in names}
    ordered: list[str] = []
    tried: set[tuple[str, str]] = set()
    while len(ordered) < len(names):
        ordered.append(max(pairs.keys() - set(ordered), key=lambda name: (len(pairs[name] - tried), name)))
        tried |= pairs[ordered[-1]]
    return ordered


def can_run(engine: str, devices: int, fields: Fields) -> bool:
    """Return whether the configuration is valid on this many devices."""
    try:
        config = configure({**TOY, **fields, "engine": engine}, report=False)
        mesh = resolve_mesh(config, devices, devices)
        resolve_batch(config, mesh.data_ranks)
    except ConfigError:
        return False
    return engine == "xla" or not list(uneven_shards(config, mesh))


def losses_of(engine: str, devices: int, cases: dict[str, Fields]) -> dict[str, Any]:
    """Train the cases; ALONE devices: one, without a process group."""
    if engine == "torch":
        return run_on_torch(devices, cases)
    return run_on_xla(max(devices, 1), {name: {**fields, "evaluates": False} for name, fields in cases.items()})[0]


def difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists; NaN if one has it."""
    return float(np.max([abs(one / other - 1) for one, other in zip(found, expected, strict=True)]))


def compare(engine: str, devices: int, cases: dict[str, Fields], alone: dict[str, Any]) -> int:
    """Train the cases in one start, print their lines, and return how many failed or differ.

    If the start fails, each of its cases gets its own. `alone` is of one process, by number of layers.
    """
    try:
        outcomes = losses_of(engine, devices, cases)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        if len(cases) > 1:
            return sum(compare(engine, devices, {name: fields}, alone) for name, fields in cases.items())
        print(f"failed: {next(iter(cases))}: {error}", flush=True)
        return 1
    far = 0
    for name, outcome in outcomes.items():
        expected = alone[str(cases[name]["num_layers"])]
        found = [difference(outcome[figure], expected[figure]) for figure in FIGURES]
        far += not max(found) <= TOLERANCE
        print(*(f"{value:.1e}" for value in found), f" {name}", flush=True)
    return far


def main(engine: str, devices: int, part: str = "") -> int:
    """Run, print, and return the exit code; see the module's docstring."""
    alone = losses_of("torch", ALONE, {str(layers): shared_fields(devices, layers) for layers in LAYERS})
    cases = {name: fields for name, fields in cases_of(engine, devices).items() if part in name}
    ordered = pairs_first(list(cases))
    far = 0
    for first in range(0, len(ordered), CASES_PER_START):
        names = ordered[first : first + CASES_PER_START]
        far += compare(engine, devices, {name: cases[name] for name in names}, alone)
    print(f"{len(cases)} cases on {devices} devices of the {engine} engine: {far} failed or differ by over {TOLERANCE}")
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
