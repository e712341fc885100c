"""Whether a loss stands out of the reports before it. Pure; the file of metrics is its memory across restarts."""

from __future__ import annotations

import statistics
from collections.abc import Collection

WINDOW = 32  # reports that a loss is compared with
ENOUGH = 8  # fewer say nothing: at the beginning of a run the loss falls in every report
DEVIATIONS = 6.0  # of a normal distribution; batches differ, and one in a billion of them this much
LEAST = 0.02  # of the median: where the loss hardly moves, its noise is no measure


def is_spike(loss: float, recent: Collection[float]) -> bool:
    """True if `loss` (nats) lies far above `recent`, the last WINDOW reports, oldest first.

    Far is DEVIATIONS standard deviations, estimated from the median absolute deviation (x 1.4826, Hampel 1974), which
    an earlier spike does not widen, and at least LEAST of the median.
    """
    if len(recent) < ENOUGH:
        return False
    middle = statistics.median(recent)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    return loss - middle > max(DEVIATIONS * spread, LEAST * middle)
