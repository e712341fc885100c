"""Bytes that a compiled program of a TPU reads from and writes to HBM, from its text (XLA's HLO).

Every instruction that runs counts what it reads and writes, loops as often as they iterate; arrays in on-chip memory do
not count. Of an operand that a fusion only slices the slices count, of a result that is written in place the part that
is written. Collectives count what they send twice: read where it leaves, and written where it arrives. A kernel counts
its operands and results once.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from pretraining.tools.plan.program import OPERATIONS, WIDTHS, computations, executed, program_collectives

ARRAY = re.compile(rf"\b({'|'.join(WIDTHS)})\[([\d,]*)\](\{{[^}}]*\}})?")
ON_CHIP = re.compile(r"S\([1-9]")  # memory space of a layout
# Instructions that name, pass on or wait for data, or whose bodies are counted
FREE = (
    *("get-tuple-element", "tuple", "bitcast", "parameter", "constant", "iota", "while", "conditional", "call"),
    *("partition-id", "after-all", "async-update", "opt-barrier"),
)
SLICES, UPDATE = ("dynamic-slice", "slice", "gather"), "dynamic-update-slice"


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    result: str  # type, with layouts
    operation: str
    operands: list[str]
    body: str  # of a fusion, otherwise empty
    line: str

    @property
    def size(self) -> int:
        """Bytes of all arrays of the result."""
        return sum(size for size, _ in _arrays(self.result))

    @property
    def size_in_hbm(self) -> int:
        """Bytes of those that are not in on-chip memory."""
        return sum(size for size, is_in_hbm in _arrays(self.result) if is_in_hbm)


Bodies = dict[str, dict[str, Instruction]]


def hbm_bytes(text: str) -> int:
    """Return the bytes that one device reads and writes in one execution of the program."""
    parts = computations(text)
    bodies = {name: _instructions(lines) for name, lines in parts.items()}
    local = sum(
        times * _traffic(bodies[name], instruction, bodies)
        for name, line, times in executed(parts, enters_fusions=False)
        if (instruction := _instruction(line))
    )
    return local + 2 * sum(collective.bytes for collective in program_collectives(text))


def _instructions(lines: list[str]) -> dict[str, Instruction]:
    found = (_instruction(line) for line in lines)
    return {instruction.name: instruction for instruction in found if instruction}


def _instruction(line: str) -> Instruction | None:
    match = re.search(r"%([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)(.*)", line)
    if not match:
        return None
    name, result, operation, operands, rest = match.groups()
    body = re.search(r"calls=%([\w.-]+)", rest) if operation == "fusion" else None
    return Instruction(name, result, operation, re.findall(r"%([\w.-]+)", operands), body[1] if body else "", line)


def _arrays(kind: str) -> list[tuple[int, bool]]:
    """Return the bytes of each array of a type, and whether it is in HBM."""
    return [
        (WIDTHS[dtype] * math.prod(map(int, filter(None, dims.split(",")))), not ON_CHIP.search(layout))
        for dtype, dims, layout in ARRAY.findall(kind)
    ]


def _traffic(here: dict[str, Instruction], one: Instruction, bodies: Bodies) -> int:
    """Return the bytes that one execution of an instruction moves, without those of collectives."""
    base = one.operation.removesuffix("-start")
    is_collective = base in OPERATIONS or one.name.startswith("async-collective")
    if one.operation in FREE or one.operation.endswith("-done") or is_collective:
        return 0
    if one.operation == "custom-call" and "tpu_custom_call" not in one.line:
        return 0
    if one.operation in SLICES:
        return one.size + one.size_in_hbm
    if one.operation == UPDATE:
        return 2 * here[one.operands[1]].size
    if one.operation.endswith("-start"):  # an asynchronous copy: its result names both arrays, of which one is smaller
        ends = _arrays(one.result)[:2]
        return min(size for size, _ in ends) * sum(is_in_hbm for _, is_in_hbm in ends)
    read = 0
    for number, operand in enumerate(one.operands):
        source = here.get(operand)
        if source and source.size_in_hbm and not source.result.startswith("("):
            read += _read(one.body, bodies, number, source.size_in_hbm) if one.body else source.size_in_hbm
    return read + _written(one, bodies)


def _read(body: str, bodies: Bodies, number: int, size: int) -> int:
    """Return the bytes that a fusion reads of its operand `number`, of `size` bytes."""
    here = bodies[body]
    names = [one.name for one in here.values() if f" parameter({number})" in one.line]
    total = 0
    for name in names:  # grows by the names that stand for the same array
        for user in (one for one in here.values() if name in one.operands):
            if user.operation in SLICES:
                total += user.size
            elif user.operation in ("bitcast", "get-tuple-element") and user.name not in names:
                names.append(user.name)
            elif user.operation == "fusion":
                total += _read(user.body, bodies, user.operands.index(name), size)
            elif not _passes_on(user, name):
                return size
    return min(total, size)


def _passes_on(user: Instruction, name: str) -> bool:
    """Return whether `user` reads nothing of `name`: a part of it is written in place, or a collective is counted."""
    is_target = user.operation == UPDATE and user.operands[0] == name
    return is_target or user.operation == "tuple" or user.operation.removesuffix("-start") in OPERATIONS


def _written(one: Instruction, bodies: Bodies) -> int:
    """Return the bytes of the results that an instruction writes to HBM."""
    arrays = _arrays(one.result)
    parts = _parts_written(one.body, bodies) if one.body else []
    if len(parts) != len(arrays):
        return one.size_in_hbm
    sizes = (size if part is None else min(part, size) for (size, _), part in zip(arrays, parts, strict=True))
    return sum(size for size, (_, is_in_hbm) in zip(sizes, arrays, strict=True) if is_in_hbm)


def _parts_written(body: str, bodies: Bodies) -> list[int | None]:
    """Return the bytes written of each result of a fusion; None: all."""
    here = bodies[body]
    root = next(one for one in here.values() if "ROOT " in one.line)
    parts: list[int | None] = []
    for name in root.operands if root.operation == "tuple" else [root.name]:
        result: Instruction | None = here[name]
        while result and result.operation == "bitcast":
            result = here.get(result.operands[0])
        if result is None or result.operation == "parameter" or result.operation in OPERATIONS:
            parts.append(0)
        elif result.operation == UPDATE:
            parts.append(here[result.operands[1]].size)
        else:
            parts += _parts_written(result.body, bodies) if result.body else [None]
    return parts
