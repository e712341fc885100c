"""A stream without data, for performance runs: counters that a model can learn."""

from __future__ import annotations

import numpy as np

from pretraining.data.hashing import key_of


def counter(seed: int, sequence: int, vocabulary: int, out: np.ndarray) -> None:
    """Fill `out` (int32) with a start drawn by (seed, sequence), counting up modulo `vocabulary`."""
    start = key_of(seed, sequence) % vocabulary
    out[:] = (np.arange(len(out), dtype=np.int64) + start) % vocabulary
