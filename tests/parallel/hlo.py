"""HLO of the toy's training step on 8 devices, and its shapes, loops and collectives."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from pretraining.tools.plan.program import program_collectives
from tests.parallel.launch import run_on_xla
from tests.parallel.toy import TOY

ROWS, LENGTH, HIDDEN, LAYERS = TOY["global_batch_size"], TOY["seq_length"], TOY["hidden_size"], TOY["num_layers"]


def compile_cases(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a step of each case in one process; what it prints, and the step's optimised HLO as "program"."""
    common = {"sharding_strategy": "ddp", "batch_size": ROWS, "num_kv_heads": 8, "num_steps": 1, "evaluates": False}
    flags = f"{os.environ['XLA_FLAGS']} --xla_dump_to={folder} --xla_dump_hlo_as_text"
    outcomes, _ = run_on_xla(8, {case: {**common, **fields} for case, fields in cases.items()}, XLA_FLAGS=flags)
    return {case: {**outcome, "program": read_program(folder / case)} for case, outcome in outcomes.items()}


def read_program(folder: Path, stage: str = "after_optimizations") -> str:
    """The largest program of a case, its training step: optimised, or as it was traced ("before_optimizations")."""
    return max((path.read_text() for path in folder.glob(f"*{stage}.txt")), key=len, default="")


def results(text: str, operation: str) -> list[tuple[int, ...]]:
    """Shapes of the results of every `operation` of the program."""
    shapes = re.findall(rf"= \w+\[([\d,]*)\]\S* {operation}\(", text)
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]


def loops(text: str) -> list[str]:
    """Types of what every loop carries, stacked weights and activations among it."""
    return re.findall(r"= (\(.*?\)) while\(", text)


def saved_for_backward(text: str) -> list[tuple[int, ...]]:
    """Shapes, without their layers, of what the largest loop stacks for the backward pass.

    Weights and their gradients are [layers, blocks of a body, ..]: nothing else has a 1 there.
    """
    stacks = re.findall(rf"f32\[{LAYERS},([\d,]*)\]", max(loops(text), key=len))
    shapes = [tuple(map(int, stack.split(","))) for stack in stacks]
    return [shape for shape in shapes if shape[0] != 1]


# ---- collectives


def sent(text: str, tokens: int) -> dict[str, int]:
    """Operation -> bytes that leave one device. What has `tokens` rows is no weight: its sum, cut or not, stays one."""
    total: Counter[str] = Counter()
    for one in program_collectives(text):
        summed = one.operation == "reduce-scatter" and any(shape[:1] == (tokens,) for shape in one.shapes)
        whole = one._replace(operation="all-reduce") if summed else one
        total[whole.operation] += whole.bytes
    return dict(total)
