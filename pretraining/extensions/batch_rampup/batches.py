"""Global batches whose size changes, or that pass sequences over. Depends on neither torch nor devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from pretraining.config.batches import GlobalBatches

# Of the first sequence of a global batch: its sequences, and the sequence from which on there are more; None: never.
RowsAt = Callable[[int], tuple[int, int | None]]


class EqualBatches(NamedTuple):
    """Consecutive steps whose global batches have one size and follow each other in the order of the data."""

    step: int  # the first of them
    sequence: int  # the first one of that step
    rows: int  # sequences per global batch
    trained: int  # sequences of the steps before, without those passed over


class ChangingBatches(GlobalBatches):
    """Global batches that grow, and pass sequences over. See GlobalBatches for the methods."""

    def __init__(self, rows_at: RowsAt, skipped: Sequence[range] = (), consumed: int = 0) -> None:
        """skipped: sequences passed over, in ascending order. consumed: sequences of the run before step 0."""
        self.sizes = tuple(_sizes(rows_at, skipped, consumed))

    def sequences(self, step: int) -> range:
        size = self.sizes[bisect_right(self.sizes, step, key=attrgetter("step")) - 1]
        first = size.sequence + (step - size.step) * size.rows
        return range(first, first + size.rows)

    def trained(self, step: int) -> int:
        size = self.sizes[bisect_right(self.sizes, step, key=attrgetter("step")) - 1]
        return size.trained + (step - size.step) * size.rows

    def steps_before(self, sequence: int) -> int:
        index = bisect_right(self.sizes, sequence, key=attrgetter("sequence"))
        if not index:
            return 0
        size = self.sizes[index - 1]
        step = size.step + (sequence - size.sequence) // size.rows
        return min(step, self.sizes[index].step) if index < len(self.sizes) else step


def _sizes(rows_at: RowsAt, skipped: Sequence[range], consumed: int) -> Iterator[EqualBatches]:
    """Yield all global batches. One that would have a sequence to pass over begins behind it instead."""
    step, sequence, trained = 0, consumed, 0
    while True:
        size, grows_at = rows_at(sequence)
        skip = next((some for some in skipped if some.stop > sequence), None)
        if skip and sequence + size > skip.start:
            sequence = skip.stop
            continue
        yield EqualBatches(step, sequence, size, trained)
        ends = [-(-(grows_at - sequence) // size)] if grows_at else []
        ends += [(skip.start - sequence) // size] if skip else []
        if not ends:
            return
        step, sequence, trained = step + min(ends), sequence + min(ends) * size, trained + min(ends) * size
