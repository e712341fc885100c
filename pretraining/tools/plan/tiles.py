"""Padding of tensors in the memory of a TPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

from pretraining.tools.plan.devices import PlanKind


def bytes_in_memory(kind: PlanKind, extents: Sequence[int], width: int) -> int:
    """Return the bytes that a tensor of values `width` bytes wide occupies in the memory of a device.

    A TPU stores the two innermost dimensions in tiles of up to 8 x 128 values, and its compiler orders the dimensions
    so that the padding is least; two rows of bf16 share one row of a tile, and a vector is padded to a multiple of 512
    bytes to 1024 values. Read from the layouts of libtpu 0.0.21 for v5e, v5p and v6e, fp32 and bf16
    (tests/tools/plan/test_compiled.py).
    """
    if not kind.topology_axes:
        return math.prod(extents) * width
    if len(extents) == 1:
        multiple = min(1024, max(512 // width, _power_of_two(extents[0])))
        return _padded(extents[0], multiple) * width
    values = math.prod(extents)
    return width * min(
        values // (rows * columns) * _padded(rows, min(8, max(4 // width, _power_of_two(rows)))) * _padded(columns, 128)
        for rows, columns in permutations(extents, 2)
    )


def _padded(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def _power_of_two(extent: int) -> int:
    return 1 << (extent - 1).bit_length()
