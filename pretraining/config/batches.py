"""Which sequences of the run each global batch has: pure arithmetic on the settings of the batch.

What a global batch has is a function of the number of sequences consumed before it, so a run that continues needs that
number alone, and every rank, engine and report computes the same.
"""

from __future__ import annotations


class GlobalBatches:
    """Global batches of one size; step 0 is the next one. An extension has others."""

    def __init__(self, rows: int, consumed: int = 0) -> None:
        """rows: sequences of each. consumed: sequences of the run before step 0."""
        self._rows, self._consumed = rows, consumed

    def sequences(self, step: int) -> range:
        """Return the sequences of a step, counted from the beginning of the run."""
        first = self._consumed + step * self._rows
        return range(first, first + self._rows)

    def trained(self, step: int) -> int:
        """Return the number of sequences in the steps before `step`."""
        return step * self._rows

    def steps_before(self, sequence: int) -> int:
        """Return the number of whole global batches before `sequence`."""
        return max(0, (sequence - self._consumed) // self._rows)
