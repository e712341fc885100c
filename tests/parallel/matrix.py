"""Compare pipeline stages with one device on every mesh; the tests run a selection of these cases.

    python -m tests.parallel.matrix xla 8 [part of a case's name]
    python -m tests.parallel.matrix torch 2|4|8 [part of a case's name]

Cases: stages and pieces, with every strategy, tensor, sequence and context ranks, blocks recomputed, numbers of layers,
and on the torch engine every schedule. A pipeline gets at least twice as many micro-batches as it has stages. Cases
that combine two settings for the first time run first, so that an interrupted run has tried every pair. Prints a line
per case: the largest relative differences over 8 steps of its losses and gradient norms from those of one device, in
the order of TOLERANCES. Exits with 1 if a case failed or one is larger.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

from pretraining.config.errors import ConfigError
from pretraining.configure import configure
from pretraining.parallel.layout import uneven_shards
from pretraining.parallel.mesh import resolve_batch, resolve_mesh
from tests.parallel.launch import ALONE, run_on_torch, run_on_xla
from tests.parallel.toy import TOY

Fields = dict[str, Any]
# Largest relative differences: of the losses, and of the gradient norms of the first step and of all. Sums in another
# order differ by 4e-7 in the first norm; four steps amplify that a hundredfold, with tensor ranks alone as well.
TOLERANCES = {"loss": 1e-5, "first norm": 2e-6, "norm": 1e-4}
CASES_PER_START = 8  # of the processes: few enough for launch.run's time limit on a busy machine

STEPS: Fields = {"num_steps": 8, "batch_size": 1}
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
}
RECOMPUTED: dict[str, Fields] = {
    "kept": {},
    "recomputed": {"fsdp_activation_checkpointing": True},
    "a third": {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/3"},
}
SCHEDULES = {"xla": ("auto",), "torch": ("auto", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble")}


def shared_fields(devices: int, layers: int) -> Fields:
    """Return the fields of a case and of its reference."""
    return {**STEPS, "global_batch_size": 2 * devices, "num_layers": layers}


def cases_of(engine: str, devices: int) -> dict[str, Fields]:
    """Return the cases that this many devices can run, by name."""
    found: dict[str, Fields] = {}
    dimensions = (LAYERS, STAGES, PIECES, PLACEMENTS, RECOMPUTED, SCHEDULES[engine])
    for layers, stages, pieces, placement, recomputed, schedule in itertools.product(*dimensions):
        fields: Fields = {**shared_fields(devices, layers), **PLACEMENTS[placement], **RECOMPUTED[recomputed]}
        if schedule.endswith("ZeroBubble"):
            fields["use_torch_compile"] = False
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
    """Return the largest relative difference of two lists."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def differences(outcome: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the differences that TOLERANCES limits."""
    norms, theirs = outcome["grad_norm"], expected["grad_norm"]
    first, every = difference(norms[:1], theirs[:1]), difference(norms, theirs)
    return {"loss": difference(outcome["loss"], expected["loss"]), "first norm": first, "norm": every}


def main(engine: str, devices: int, part: str = "") -> int:
    """Run, print, and return the exit code; see the module's docstring."""
    alone = losses_of(engine, ALONE, {str(layers): shared_fields(devices, layers) for layers in LAYERS})
    cases = {name: fields for name, fields in cases_of(engine, devices).items() if part in name}
    far = 0
    ordered = pairs_first(list(cases))
    for first in range(0, len(ordered), CASES_PER_START):
        names = ordered[first : first + CASES_PER_START]
        try:
            outcomes = losses_of(engine, devices, {name: cases[name] for name in names})
        except (AssertionError, subprocess.TimeoutExpired) as error:
            far += len(names)
            print(f"failed: {'; '.join(names)}: {error}", flush=True)
            continue
        for name, outcome in outcomes.items():
            found = differences(outcome, alone[str(cases[name]["num_layers"])])
            far += any(found[figure] > tolerance for figure, tolerance in TOLERANCES.items())
            print(*(f"{value:.1e}" for value in found.values()), f" {name}", flush=True)
    print(f"{len(cases)} cases on {devices} devices of the {engine} engine, {far} failed or beyond {TOLERANCES}")
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
