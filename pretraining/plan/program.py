"""What one execution of a compiled program does, read from its text (XLA's HLO): collectives and matrix products.

Loops count as often as they turn. A TPU's compiler writes an all-gather or a reduce-scatter beside a matrix product as
a loop that passes one part on at each turn (a "windowed" product), and one collective as several instructions of one
channel, spread over the computation that hides it; both count as what they stand for.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from pretraining.plan.traffic import ring

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

Computations = dict[str, list[str]]  # name -> instructions; the program's own is ENTRY


class Sent(NamedTuple):
    """One collective."""

    operation: str  # of OPERATIONS
    purpose: str  # the same, or of a part that is passed on: what the parts come to
    shapes: list[tuple[int, ...]]  # what it gives on one device
    whole: int  # bytes of that; of a reduce-scatter of what it takes
    ranks: int  # of a group
    times: int  # in one execution

    @property
    def bytes(self) -> int:
        """That leave one device in one execution."""
        if self.operation == "collective-permute":
            return self.whole * self.times
        return ring(self.whole, self.ranks, both=self.operation == "all-reduce") * self.times


def computations(text: str) -> Computations:
    """The program, cut up."""
    found: Computations = {}
    name = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            name = "ENTRY" if line.startswith("ENTRY") else head[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line)
    return found


def executed(parts: Computations) -> Iterator[tuple[str, str, int]]:
    """Every instruction with the computation it stands in, and how often it runs."""
    todo = [("ENTRY", 1)]
    while todo:
        name, times = todo.pop()
        for line in parts[name]:
            yield name, line, times
            if loop := re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line):
                todo.append((loop[2], times * _turns(line, parts[loop[1]], parts[loop[2]])))
            elif called := re.search(r" (?:call|fusion|async-start)\(.*(?:calls|to_apply)=%([\w.-]+)", line):
                todo.append((called[1], times))
            elif branches := re.search(r" conditional\(.*branch_computations=\{([^}]*)\}", line):
                todo += [(branch.strip(" %"), times) for branch in branches[1].split(",")]


def _turns(loop: str, condition: list[str], body: list[str]) -> int:
    """What the compiler noted, or the counter's bound over its step; it starts at 0."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop):
        return int(noted[1])
    bounds = _constants(condition)
    elements = {found[1]: int(found[2]) for line in condition if (found := _ELEMENT.search(line))}
    for line in condition:
        compared = re.search(r" compare\(%([\w.-]+), %([\w.-]+)\), direction=LT", line)
        if compared and compared[1] in elements and bounds.get(compared[2], 0) > 0:
            return -(-bounds[compared[2]] // _step(body, elements[compared[1]]))
    raise ValueError(f"a loop that does not count: {condition}")


_ELEMENT = re.compile(r"%([\w.-]+) = \S+ get-tuple-element\(%[\w.-]+\), index=(\d+)")


def _constants(lines: list[str]) -> dict[str, int]:
    found = (re.search(r"%([\w.-]+) = \S+ constant\((\d+)\)", line) for line in lines)
    return {one[1]: int(one[2]) for one in found if one}


def _step(body: list[str], element: int) -> int:
    """By how much a loop's body raises the counter that is this element of what it carries."""
    counters = {found[1] for line in body if (found := _ELEMENT.search(line)) and int(found[2]) == element}
    steps = _constants(body)
    for line in body:
        added = re.search(r" add\(%([\w.-]+), %([\w.-]+)\)", line)
        if added and added[1] in counters and added[2] in steps and _result(body, element) in line.split(" = ")[0]:
            return steps[added[2]]
    return 1


def _result(body: list[str], element: int) -> str:
    """The name of what a body gives as this element."""
    root = next(line for line in body if "ROOT " in line)
    names = re.findall(r"%([\w.-]+)", root.split(" tuple(")[1].split(")")[0]) if " tuple(" in root else []
    return names[element] if names else ""


# ---- Collectives


def collectives(text: str) -> list[Sent]:
    """Every collective of the program."""
    parts = computations(text)
    found: dict[str, Sent] = {}
    for where, line, times in executed(parts):
        if one := _collective(where, line, times, parts):
            channel = re.search(r"channel_id=(\d+)", line)
            key = channel[1] if channel else line
            if key not in found or times < found[key].times:
                found[key] = one
    return list(found.values())


def _collective(where: str, line: str, times: int, parts: Computations) -> Sent | None:
    found = re.search(rf"%(\S+) = (.*?) ({'|'.join(OPERATIONS)})(-start)?\(", line)
    if not found:
        return None
    name, result, operation, started = found.groups()
    sizes = [(kind, tuple(map(int, filter(None, dims.split(","))))) for kind, dims in _shapes(result)]
    if started and operation in ("all-gather", "collective-permute"):  # operands, results, and of the latter two flags
        sizes = sizes[1:2] if operation == "collective-permute" else sizes[len(sizes) // 2 :]
    ranks = _ranks(line)
    whole = sum(WIDTHS[kind] * math.prod(shape) for kind, shape in sizes)
    if operation == "reduce-scatter":
        whole *= ranks
    if operation == "all-reduce" and _is_cut(name, where, parts):
        operation = "reduce-scatter"
    elif operation == "all-reduce" and _is_laid_out(line, parts[where], parts):
        operation = "all-gather"
    return Sent(operation, stands_for(operation, where), [shape for _, shape in sizes], whole, ranks, times)


def stands_for(operation: str, where: str) -> str:
    """What a collective is a part of: of a windowed product's loop, named after what it does there."""
    windowed = re.search(r"windowed_dot_general_body_(ag|rs)", where)
    return {"ag": "all-gather", "rs": "reduce-scatter"}[windowed[1]] if windowed else operation


def _shapes(text: str) -> list[tuple[str, str]]:
    return [(kind, dims) for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", text) if kind in WIDTHS]


def _ranks(line: str) -> int:
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(counted[2]) if counted else 1


def _is_cut(name: str, where: str, parts: Computations) -> bool:
    """Whether all that becomes of a sum is a slice of it: a reduce-scatter, as compilers without one write it."""
    users = [line for line in parts[where] if re.search(rf"[(, ]%{re.escape(name)}[,)]", line)]
    bodies = [re.search(r"calls=%([\w.-]+)", user) for user in users]
    texts = [parts[body[1]] if body else [user] for user, body in zip(users, bodies, strict=True)]
    return bool(users) and all(any(" dynamic-slice(" in line for line in text) for text in texts)


def _is_laid_out(line: str, lines: list[str], parts: Computations) -> bool:
    """Whether what is added up are parts, each in its own place: an all-gather, as a TPU's compiler writes it on a
    cube of 64 chips."""
    first = re.search(r" all-reduce(?:-start)?\(%([\w.-]+)", line)
    made = first and next((other for other in lines if f"%{first[1]} = " in other), "")
    if made and (element := re.search(r" get-tuple-element\(%([\w.-]+)\)", made)):
        made = next((other for other in lines if f"%{element[1]} = " in other), "")
    body = re.search(r"calls=%([\w.-]+)", made or "")
    return any(" dynamic-update-slice(" in other for other in (parts[body[1]] if body else [made or ""]))


def totals(found: list[Sent]) -> dict[str, int]:
    """Purpose -> bytes that leave one device."""
    sums: dict[str, int] = defaultdict(int)
    for one in found:
        sums[one.purpose] += one.bytes
    return dict(sums)


# ---- Matrix products


def product_flops(text: str) -> int:
    """Floating-point operations of all matrix products on one device."""
    parts = computations(text)
    shapes: dict[str, tuple[int, ...]] = {}
    for lines in parts.values():
        for line in lines:
            if named := re.search(r"%([\w.-]+) = \w+\[([\d,]*)\]", line):
                shapes[named[1]] = tuple(map(int, filter(None, named[2].split(","))))
    total = 0
    for _, line, times in executed(parts):
        if found := re.search(r"%([\w.-]+) = \S+ (dot|convolution)\(%([\w.-]+), %([\w.-]+)\)", line):
            result, kind, left, right = found.groups()
            count = _of_dot if kind == "dot" else _of_convolution
            total += times * count(line, shapes[result], shapes[left], shapes[right])
    return total


def _of_dot(line: str, result: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> int:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
    summed = [left[int(dim)] for dim in contracted[1].split(",")] if contracted else []
    return 2 * math.prod(result) * math.prod(summed)


def _of_convolution(line: str, result: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """A TPU's compiler writes every product as one, with what a batched product has apart as a spatial dimension: of
    each, only the pairs of a result and a place of the window that fall on a value and not between or beside count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    assert labels, line
    window = re.search(r"window=\{([^}]*)\}", line)
    options = dict(part.split("=") for part in window[1].split()) if window else {}
    pairs = 1
    for dim in range(sum(label.isdigit() for label in labels[1])):
        values, results = left[labels[1].index(str(dim))], result[labels[3].index(str(dim))]
        pairs *= _pairs(values, results, {name: value.split("x")[dim] for name, value in options.items()})
    rows, channels = result[labels[3].index("b")], result[labels[3].index("f")]
    return 2 * rows * channels * right[labels[2].index("i")] * pairs


def _pairs(values: int, results: int, window: dict[str, str]) -> int:
    size, stride = int(window.get("size", 1)), int(window.get("stride", 1))
    spread, apart = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    before = int(window.get("pad", "0_0").split("_")[0])
    places = (at * stride + step * apart - before for at in range(results) for step in range(size))
    return sum(0 <= place <= (values - 1) * spread and place % spread == 0 for place in places)
