"""Numbers as text, in a fixed width where they stand in columns. Pure functions."""

from __future__ import annotations

import math


def format_number(value: float | None, width: int, digits: int) -> str:
    """Return a number in a fixed width; "nan" for one that is not finite (null in metrics.jsonl)."""
    if value is None or not math.isfinite(value):
        return f"{'nan':>{width}}"
    return f"{value:>{width}.{digits}f}"


def percent(share: float | None) -> str:
    """Return "38.2%", or "n/a" where the share is unknown."""
    return "n/a" if share is None else f"{share:.1%}"


def duration(seconds: float) -> str:
    """Return "42s", "12m05s", "3h07m" or "2d04h": two units at most."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    if minutes:
        return f"{minutes}m{total % 60:02}s"
    return f"{total}s"
