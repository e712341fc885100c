"""Collectives and matrix products of a compiled program, read from its text (XLA's HLO).

Loops count as often as they iterate. A TPU's compiler writes an all-gather or a reduce-scatter next to a matrix product
as a loop that passes one shard on per iteration (a "windowed" product), and one collective as several instructions of
one channel, spread over the computation that hides it; both count as the collective that they implement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from pretraining.tools.plan.traffic import ring

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ELEMENT = re.compile(r"%([\w.-]+) = \S+ get-tuple-element\(%([\w.-]+)\), index=(\d+)")

Computations = dict[str, list[str]]  # name -> instructions; the program's own is ENTRY


class CompiledCollective(NamedTuple):
    """One collective of a program."""

    operation: str  # of OPERATIONS
    purpose: str  # the operation that it implements
    shapes: list[tuple[int, ...]]  # of its results on one device
    size: int  # bytes of those; of a reduce-scatter those of its operand
    ranks: int  # of a group
    times: int  # that it runs in one execution
    dtype: str  # of its results, as XLA names it
    overlaps: bool  # whether matrix products run between its beginning and its end

    @property
    def bytes(self) -> int:
        """Bytes that leave one device in one execution."""
        if self.operation == "collective-permute":
            return self.size * self.times
        return ring(self.size, self.ranks, both=self.operation == "all-reduce") * self.times


def computations(text: str) -> Computations:
    """Split the program into its computations."""
    found: Computations = {}
    name = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            name = "ENTRY" if line.startswith("ENTRY") else head[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line)
    return found


def executed(parts: Computations, *, enters_fusions: bool = True) -> Iterator[tuple[str, str, int]]:
    """Yield every instruction with the computation that contains it, and how often it runs."""
    calls = r" (?:call|fusion|async-start)\(" if enters_fusions else r" call\("
    todo = [("ENTRY", 1)]
    while todo:
        name, times = todo.pop()
        for line in parts[name]:
            yield name, line, times
            if loop := re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line):
                todo.append((loop[2], times * _iterations(line, parts[loop[1]], parts[loop[2]])))
            elif called := re.search(rf"{calls}.*(?:calls|to_apply)=%([\w.-]+)", line):
                todo.append((called[1], times))
            elif branches := re.search(r" conditional\(.*branch_computations=\{([^}]*)\}", line):
                todo += [(branch.strip(" %"), times) for branch in branches[1].split(",")]


def _iterations(loop: str, condition: list[str], body: list[str]) -> int:
    """Return the compiler's count, or the counter's bound over its step; counters start at 0."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop):
        return int(known[1])
    bounds = _constants(condition)
    elements = {match[1]: int(match[3]) for line in condition if (match := ELEMENT.search(line))}
    for line in condition:
        compared = re.search(r" compare\(%([\w.-]+), %([\w.-]+)\), direction=LT", line)
        if compared and compared[1] in elements and bounds.get(compared[2], 0) > 0:
            return -(-bounds[compared[2]] // _step(body, elements[compared[1]]))
    raise ValueError(f"a loop without a counter: {condition}")


def _constants(lines: list[str]) -> dict[str, int]:
    matches = (re.search(r"%([\w.-]+) = \S+ constant\((\d+)\)", line) for line in lines)
    return {match[1]: int(match[2]) for match in matches if match}


def _step(body: list[str], element: int) -> int:
    """Return by how much a loop's body increases the counter, which is this element of the tuple that it carries."""
    counters = {match[1] for line in body if (match := ELEMENT.search(line)) and int(match[3]) == element}
    steps = _constants(body)
    for line in body:
        added = re.search(r" add\(%([\w.-]+), %([\w.-]+)\)", line)
        if added and added[1] in counters and added[2] in steps and _result(body, element) in line.split(" = ")[0]:
            return steps[added[2]]
    return 1


def _result(body: list[str], element: int) -> str:
    """Return the name of this element of a body's result."""
    root = next(line for line in body if "ROOT " in line)
    names = re.findall(r"%([\w.-]+)", root.split(" tuple(")[1].split(")")[0]) if " tuple(" in root else []
    return names[element] if names else ""


# ---- Collectives


def program_collectives(text: str) -> list[CompiledCollective]:
    """Return every collective of the program; of the instructions of one channel, the one that runs least often."""
    parts = computations(text)
    found: dict[str, CompiledCollective] = {}
    for name, line, times in executed(parts):
        if collective := _collective(name, line, times, parts):
            channel = re.search(r"channel_id=(\d+)", line)
            key = channel[1] if channel else line
            known = found.get(key, collective)
            rarest = collective if times < known.times else known
            found[key] = rarest._replace(overlaps=known.overlaps or collective.overlaps)
    return list(found.values())


def _collective(computation: str, line: str, times: int, parts: Computations) -> CompiledCollective | None:
    match = re.search(rf"%(\S+) = (.*?) ({'|'.join(OPERATIONS)})(-start)?\(", line)
    if not match:
        return None
    name, result, operation, started = match.groups()
    types = [(kind, _extents(dims)) for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", result) if kind in WIDTHS]
    if started and operation == "collective-permute":  # operand, result and two flags
        types = types[1:2]
    elif started and operation == "all-gather":  # operands and results
        types = types[len(types) // 2 :]
    ranks = _ranks(line)
    size = sum(WIDTHS[kind] * math.prod(shape) for kind, shape in types)
    if operation == "reduce-scatter":
        size *= ranks
    if operation == "all-reduce" and _is_sliced(name, computation, parts):
        operation = "reduce-scatter"
    elif operation == "all-reduce" and _sums_padded_shards(line, parts[computation], parts):
        operation = "all-gather"
    windowed = re.search(r"windowed_dot_general_body_(ag|rs)", computation)
    purpose = {"ag": "all-gather", "rs": "reduce-scatter"}[windowed[1]] if windowed else operation
    dtypes = "+".join(sorted({kind for kind, _ in types}))
    overlaps = _overlaps(name, computation, parts)
    return CompiledCollective(operation, purpose, [shape for _, shape in types], size, ranks, times, dtypes, overlaps)


def _overlaps(name: str, computation: str, parts: Computations) -> bool:
    """Return whether a product runs while the collective `name` does.

    The compiler writes both into one fusion, or the collective as two instructions with the product between them.
    """
    if computation.startswith("async_collective_fusion"):
        return _has_product(parts[computation], parts)
    lines = parts[computation]
    begin = next(number for number, line in enumerate(lines) if f"%{name} = " in line)
    between: list[str] = []
    for line in lines[begin + 1 :]:
        if re.search(rf"-done\(%{re.escape(name)}[,)]", line):
            return _has_product(between, parts)
        between.append(line)
    return False


def _has_product(lines: list[str], parts: Computations) -> bool:
    for line in lines:
        if " convolution(" in line or " dot(" in line or "tpu_custom_call" in line:
            return True
        called = re.search(r" (?:fusion|call|while)\(.*(?:calls|to_apply|body)=%([\w.-]+)", line)
        if called and _has_product(parts[called[1]], parts):
            return True
    return False


def _extents(dims: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, dims.split(","))))


def _ranks(line: str) -> int:
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(counted[2]) if counted else 1


def _is_sliced(name: str, computation: str, parts: Computations) -> bool:
    """Return whether a sum is only sliced: compilers without a reduce-scatter write it so."""
    users = [line for line in parts[computation] if re.search(rf"[(, ]%{re.escape(name)}[,)]", line)]
    bodies = [re.search(r"calls=%([\w.-]+)", user) for user in users]
    texts = [parts[body[1]] if body else [user] for user, body in zip(users, bodies, strict=True)]
    return bool(users) and all(any(" dynamic-slice(" in line for line in text) for text in texts)


def _sums_padded_shards(line: str, lines: list[str], parts: Computations) -> bool:
    """Return whether the operands are shards padded with zeros: an all-gather as written for a cube of 64 TPU chips."""
    operand = re.search(r" all-reduce(?:-start)?\(%([\w.-]+)", line)
    source = operand and next((other for other in lines if f"%{operand[1]} = " in other), "")
    if source and (element := ELEMENT.search(source)):
        source = next((other for other in lines if f"%{element[2]} = " in other), "")
    body = re.search(r"calls=%([\w.-]+)", source or "")
    return any(" dynamic-update-slice(" in other for other in (parts[body[1]] if body else [source or ""]))


def estimated_cycles(text: str) -> int:
    """Return the cycles that the compiler expects one execution to take. It does not know those of kernels."""
    found = ((re.search(r'"estimated_cycles":"(\d+)"', line), times) for _, line, times in executed(computations(text)))
    return sum(int(match[1]) * times for match, times in found if match)


# ---- Matrix products


def product_flops(text: str) -> int:
    """Return the floating-point operations of all matrix products on one device."""
    parts = computations(text)
    shapes: dict[str, tuple[int, ...]] = {}
    for line in (line for lines in parts.values() for line in lines):
        if named := re.search(r"%([\w.-]+) = \w+\[([\d,]*)\]", line):
            shapes[named[1]] = _extents(named[2])
    total = 0
    for _, line, times in executed(parts):
        if match := re.search(r"%([\w.-]+) = \S+ (dot|convolution)\(%([\w.-]+), %([\w.-]+)\)", line):
            result, kind, left, right = match.groups()
            count = _dot_flops if kind == "dot" else _convolution_flops
            total += times * count(line, shapes[result], shapes[left], shapes[right])
    return total


# Arrays in bf16 that a kernel of splash attention, or of torch_tpu's, reads and writes -> its products, all as large as
# that of queries and keys. The forward pass reads q, k, v and writes y. The backward pass reads the gradient of y, too,
# and has a kernel for the gradient of q (torch_tpu's also reads its first value) and one for those of k and v.
ATTENTION_PRODUCTS = {(3, 1): 2, (4, 1): 3, (5, 1): 3, (4, 2): 4}


def kernel_flops(text: str, visible: float) -> int:
    """Return the operations of the products inside attention kernels, whose texts the program does not contain.

    visible: share of all pairs of a query and a key that is computed; of blocks at the edge of a mask, the half.
    """
    total = 0.0
    for _, line, times in executed(computations(text)):
        if match := re.search(r"= (.*?) custom-call\(.*operand_layout_constraints=\{(.*?\})\}", line):
            results, operands = (
                [shape for dims in re.findall(r"bf16\[([\d,]*)\]", part) if len(shape := _extents(dims)) > 2]
                for part in match.groups()
            )
            if "tpu_custom_call" in line and (len(operands), len(results)) in ATTENTION_PRODUCTS:
                products = ATTENTION_PRODUCTS[len(operands), len(results)]
                total += times * products * 2 * math.prod(operands[0]) * operands[1][-2] * visible
    return int(total)


def _dot_flops(line: str, result: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> int:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
    summed = [left[int(dim)] for dim in contracted[1].split(",")] if contracted else []
    return 2 * math.prod(result) * math.prod(summed)


def _convolution_flops(line: str, result: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return the operations of a product that a TPU's compiler wrote as a convolution.

    Batch dimensions of a product become spatial ones. Of each spatial dimension only the pairs of a result and a place
    of the window count whose value is in the operand, not in its padding or dilation.
    """
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
    lhs_dilation, rhs_dilation = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    padding = int(window.get("pad", "0_0").split("_")[0])
    places = (at * stride + step * rhs_dilation - padding for at in range(results) for step in range(size))
    return sum(0 <= place <= (values - 1) * lhs_dilation and place % lhs_dilation == 0 for place in places)
