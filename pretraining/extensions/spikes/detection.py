"""Detection of loss spikes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection

# Reports that a loss is compared with; with fewer there is no spike. The spread of 8 reports is by chance, once in some
# thousand times, so small that the ordinary noise of batches looks like a spike.
WINDOW = 32
DEVIATIONS = 8.0  # of the spread: no false alarm in 800 thousand reports of noise
LEAST = 0.02  # of the median: where the loss hardly changes, its spread is too small a measure


def is_spike(loss: float, recent: Collection[float]) -> bool:
    """Return whether `loss` (nats) is far above `recent`, the last WINDOW reports, oldest first.

    Far is DEVIATIONS times the spread, and at least LEAST of the median. The spread is the median absolute deviation
    x 1.4826 (Hampel 1974), which an earlier spike does not increase, and at least half the standard deviation, which
    does not become small by chance when only half of the reports are close together.
    """
    if len(recent) < WINDOW:
        return False
    middle = statistics.median(recent)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    spread = max(spread, statistics.stdev(recent) / 2)
    return loss - middle > max(DEVIATIONS * spread, LEAST * middle)
