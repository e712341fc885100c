"""Which sequences of the run each global batch has: pure arithmetic on the settings of the batch.

The size of a global batch is a function of the number of sequences consumed before it, so a run that continues needs
that number alone, and every rank, engine and report computes the same sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from pretraining.config.grammar import parse_ranges
from pretraining.config.training import TrainConfig

RowsAt = Callable[[int], tuple[int, int | None]]  # of the first sequence of a global batch: see TrainConfig.rows_at


class EqualBatches(NamedTuple):
    """Consecutive steps whose global batches have one size and follow each other in the order of the data."""

    step: int  # the first of them
    sequence: int  # the first one of that step
    rows: int  # sequences per global batch
    trained: int  # sequences of the steps before, without those passed over


class GlobalBatches:
    """The global batches from a number of consumed sequences on; step 0 is the next one."""

    def __init__(self, rows_at: RowsAt, skipped: Sequence[range] = (), consumed: int = 0) -> None:
        """skipped: sequences passed over, in ascending order."""
        self.sizes = tuple(_sizes(rows_at, skipped, consumed))

    def sequences(self, step: int) -> range:
        """Return the sequences of a step, counted from the beginning of the run."""
        size = self.sizes[bisect_right(self.sizes, step, key=attrgetter("step")) - 1]
        first = size.sequence + (step - size.step) * size.rows
        return range(first, first + size.rows)

    def trained(self, step: int) -> int:
        """Return the number of sequences in the steps before `step`."""
        size = self.sizes[bisect_right(self.sizes, step, key=attrgetter("step")) - 1]
        return size.trained + (step - size.step) * size.rows

    def steps_before(self, sequence: int) -> int:
        """Return the number of whole global batches before `sequence`."""
        index = bisect_right(self.sizes, sequence, key=attrgetter("sequence"))
        if not index:
            return 0
        size = self.sizes[index - 1]
        step = size.step + (sequence - size.sequence) // size.rows
        return min(step, self.sizes[index].step) if index < len(self.sizes) else step


def global_batches(config: TrainConfig) -> GlobalBatches:
    """Return the global batches of the whole run; global_batch_size must be known."""
    assert config.global_batch_size
    return GlobalBatches(partial(config.rows_at, config.global_batch_size), parse_ranges(config.skip_samples))


def tokens_of_run(config: TrainConfig) -> int:
    """Return the tokens of all num_steps global batches; global_batch_size must be known."""
    return global_batches(config).trained(config.num_steps) * config.seq_length


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
