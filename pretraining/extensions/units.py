"""Numbers with a unit as text. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

FLOP_UNITS = ("KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP")


def size(count: float) -> str:
    """Return bytes as "1.50 GiB", in binary units."""
    return f"{count:.0f} B" if count < 1024 else _largest(count, 1024, ("KiB", "MiB", "GiB", "TiB"))


def amount(count: float) -> str:
    """Return a count as "6.74 B" (10^9), "124.30 M" or "4,096"."""
    return f"{count:,.0f}" if count < 1e6 else _largest(count / 1e3, 1e3, ("M", "B", "T"))


def describe_micro_batches(count: int, rows: int) -> str:
    """Return "1 micro-batch of 2 per rank", or "4 micro-batches of 2 per rank"."""
    return f"{count} micro-batch{'es' if count > 1 else ''} of {rows} per rank"


def flop(count: float) -> str:
    """Return floating-point operations as "46.87 GFLOP"."""
    return f"{count:.0f} FLOP" if count < 1e3 else _largest(count, 1e3, FLOP_UNITS)


def _largest(count: float, step: float, units: Sequence[str]) -> str:
    """Return `count` in the largest unit that leaves at least 1; the first unit is `step`."""
    power = min(int(math.log(count) / math.log(step) + 1e-12), len(units))
    return f"{count / step**power:,.2f} {units[power - 1]}"
