"""The toy's training step as the compiler made it for 8 devices, and what its text says: shapes, loops, collectives."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from pretraining.plan.traffic import ring
from tests.parallel.toy import TOY

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, HIDDEN, LAYERS = TOY["global_batch_size"], TOY["seq_length"], TOY["hidden_size"], TOY["num_layers"]


def program(folder: Path, **fields: Any) -> str:
    """The optimised HLO of the toy's training step."""
    case = {"the case": {"sharding_strategy": "ddp", "batch_size": ROWS, "num_kv_heads": 8, "num_steps": 1, **fields}}
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    driver = Path(__file__).with_name("xla_driver.py")
    subprocess.run(
        [sys.executable, driver, json.dumps(case)], env=environment, check=True, capture_output=True, timeout=600
    )
    return max((path.read_text() for path in folder.glob("*after_optimizations.txt")), key=len)


def results(text: str, operation: str) -> list[tuple[int, ...]]:
    """The shapes that every `operation` of the program gives."""
    shapes = re.findall(rf"= \w+\[([\d,]*)\]\S* {operation}\(", text)
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]


def loops(text: str) -> list[str]:
    """The types of what every loop carries, stacked weights and activations among it."""
    return re.findall(r"= (\(.*?\)) while\(", text)


def kept(text: str) -> list[tuple[int, ...]]:
    """The shapes, without their layers, of what the largest loop stacks for the backward pass.

    Weights and their gradients are [layers, blocks of a body, ..]: nothing else has a 1 there.
    """
    stacks = re.findall(rf"f32\[{LAYERS},([\d,]*)\]", max(loops(text), key=len))
    shapes = [tuple(map(int, stack.split(","))) for stack in stacks]
    return [shape for shape in shapes if shape[0] != 1]


# ---- collectives

WIDTHS = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1, "s64": 8}
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")


def computations(text: str) -> dict[str, list[str]]:
    """Name -> instructions."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            name = "ENTRY" if line.startswith("ENTRY") else head[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line)
    return found


def sent(text: str, tokens: int) -> dict[str, int]:
    """Operation -> bytes that leave one device.

    A sum of a weight's gradient that is cut at once counts as the reduce-scatter it stands for, which the CPU's
    compiler does not write. What has `tokens` rows is no weight.
    """
    parts = computations(text)
    total: dict[str, int] = defaultdict(int)
    todo = [("ENTRY", 1)]
    while todo:
        name, times = todo.pop()
        for line in parts[name]:
            if loop := re.search(r" while\(.*body=%([\w.-]+)", line):
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                assert turns, line
                todo.append((loop[1], times * int(turns[1])))
            elif called := re.search(r" call\(.*to_apply=%([\w.-]+)", line):
                todo.append((called[1], times))
            elif one := _collective(line, name, parts, tokens):
                total[one[0]] += times * one[1]
    return dict(total)


def _collective(line: str, where: str, parts: dict[str, list[str]], tokens: int) -> tuple[str, int] | None:
    found = re.search(rf"%(\S+) = (.*?) ({'|'.join(OPERATIONS)})\(", line)
    if not found:
        return None
    name, result, operation = found.groups()
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
    whole = sum(WIDTHS[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in shapes)
    group = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    listed = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    ranks = len(group[1].split(",")) if group else int(listed[2]) if listed else 1
    weight = not any(dims.startswith(f"{tokens},") for _, dims in shapes)
    if operation == "all-reduce" and weight and _is_cut(name, where, parts):
        return "reduce-scatter", ring(whole, ranks)
    return operation, ring(whole, ranks, both=operation == "all-reduce")


def _is_cut(name: str, where: str, parts: dict[str, list[str]]) -> bool:
    """Whether all that becomes of a sum is a slice of it."""
    users = [line for line in parts[where] if re.search(rf"[(, ]%{re.escape(name)}[,)]", line)]
    bodies = [re.search(r"calls=%([\w.-]+)", user) for user in users]
    texts = [parts[body[1]] if body else [user] for user, body in zip(users, bodies, strict=True)]
    return bool(users) and all(any(" dynamic-slice(" in line for line in text) for text in texts)
