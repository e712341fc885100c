"""Whether a loss stands out of the reports before it. Pure; the file of metrics is its memory across restarts."""

from __future__ import annotations

import statistics
from collections.abc import Collection

# Reports that a loss is compared with; before there are as many nothing is told. Of 8, the spread is by chance so small
# once in some thousand times that the ordinary noise of batches looks like a spike.
WINDOW = 32
DEVIATIONS = 8.0  # of the spread: of 800 thousand reports of pure noise, none
LEAST = 0.02  # of the median: where the loss hardly moves, its noise is no measure


def is_spike(loss: float, recent: Collection[float]) -> bool:
    """True if `loss` (nats) lies far above `recent`, the last WINDOW reports, oldest first.

    Far is DEVIATIONS times the spread, and at least LEAST of the median. The spread is the median absolute deviation
    x 1.4826 (Hampel 1974), which an earlier spike does not widen, but at least half the standard deviation, which an
    accident of the middle half of the reports does not narrow.
    """
    if len(recent) < WINDOW:
        return False
    middle = statistics.median(recent)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    spread = max(spread, statistics.stdev(recent) / 2)
    return loss - middle > max(DEVIATIONS * spread, LEAST * middle)
