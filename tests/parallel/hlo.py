"""The toy's training step as the compiler made it for 8 devices, and what its text says: shapes, loops, collectives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pretraining.plan.program import collectives
from tests.parallel.toy import TOY

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, HIDDEN, LAYERS = TOY["global_batch_size"], TOY["seq_length"], TOY["hidden_size"], TOY["num_layers"]


def program(folder: Path, stage: str = "after_optimizations", **fields: Any) -> str:
    """The HLO of the toy's training step, optimised or ("before_optimizations") as it was traced."""
    case = {"the case": {"sharding_strategy": "ddp", "batch_size": ROWS, "num_kv_heads": 8, "num_steps": 1, **fields}}
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    driver = Path(__file__).with_name("xla_driver.py")
    subprocess.run(
        [sys.executable, driver, json.dumps(case)], env=environment, check=True, capture_output=True, timeout=600
    )
    return max((path.read_text() for path in folder.glob(f"*{stage}.txt")), key=len)


def results(text: str, operation: str) -> list[tuple[int, ...]]:
    """The shapes that every `operation` of the program gives."""
    shapes = re.findall(rf"= \w+\[([\d,]*)\]\S* {operation}\(", text)
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]


def loops(text: str) -> list[str]:
    """The types of what every loop carries, stacked weights and activations among it."""
    return re.findall(r"= (\(.*?\)) while\(", text)


def saved_for_backward(text: str) -> list[tuple[int, ...]]:
    """The shapes, without their layers, of what the largest loop stacks for the backward pass.

    Weights and their gradients are [layers, blocks of a body, ..]: nothing else has a 1 there.
    """
    stacks = re.findall(rf"f32\[{LAYERS},([\d,]*)\]", max(loops(text), key=len))
    shapes = [tuple(map(int, stack.split(","))) for stack in stacks]
    return [shape for shape in shapes if shape[0] != 1]


# ---- collectives


def sent(text: str, tokens: int) -> dict[str, int]:
    """Operation -> bytes that leave one device. What has `tokens` rows is no weight: its sum, cut or not, stays one."""
    total: Counter[str] = Counter()
    for one in collectives(text):
        summed = one.operation == "reduce-scatter" and any(shape[:1] == (tokens,) for shape in one.shapes)
        whole = one._replace(operation="all-reduce") if summed else one
        total[whole.operation] += whole.bytes
    return dict(total)
