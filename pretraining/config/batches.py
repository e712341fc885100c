"""Which sequences of the run each global batch has: pure arithmetic on the settings of the batch.

The size of a global batch is a function of the number of sequences consumed before it, so a run that continues needs
that number alone, and every rank, engine and report computes the same sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from pretraining.config.grammar import BatchRamp, parse_rampup
from pretraining.config.training import TrainConfig


class EqualBatches(NamedTuple):
    """Consecutive steps whose global batches have one size."""

    step: int  # the first of them
    sequence: int  # the first one of that step
    rows: int  # sequences per global batch


class GlobalBatches:
    """The global batches from a number of consumed sequences on; step 0 is the next one."""

    def __init__(self, rows: int, ramp: BatchRamp | None = None, consumed: int = 0) -> None:
        """rows: sequences of a global batch, with a ramp of the last and largest one."""
        self.sizes = tuple(_sizes(rows, ramp, consumed))

    def sequences(self, step: int) -> range:
        """Return the sequences of a step, counted from the beginning of the run."""
        size = self.sizes[bisect_right(self.sizes, step, key=attrgetter("step")) - 1]
        first = size.sequence + (step - size.step) * size.rows
        return range(first, first + size.rows)

    def steps_before(self, sequence: int) -> int:
        """Return the number of whole global batches before `sequence`, which is not before step 0."""
        size = self.sizes[bisect_right(self.sizes, sequence, key=attrgetter("sequence")) - 1]
        return size.step + (sequence - size.sequence) // size.rows


def global_batches(config: TrainConfig) -> GlobalBatches:
    """Return the global batches of the whole run; global_batch_size must be known."""
    assert config.global_batch_size
    return GlobalBatches(config.global_batch_size, parse_rampup(config.rampup_batch_size))


def tokens_of_run(config: TrainConfig) -> int:
    """Return the tokens of all num_steps global batches; global_batch_size must be known."""
    return global_batches(config).sequences(config.num_steps).start * config.seq_length


def describe_growth(config: TrainConfig) -> str:
    """Return how the global batches grow, as the end of a sentence about the last size; nothing if they do not."""
    first, *others = global_batches(config).sizes
    if not others:
        return ""
    return f"; {first.rows} sequences at first, these from step {others[-1].step + 1:,} on ({1 + len(others)} sizes)"


def _sizes(rows: int, ramp: BatchRamp | None, consumed: int) -> Iterator[EqualBatches]:
    """Megatron-LM's `RampupBatchsizeNumMicroBatches`: increments are spread evenly over the ramp's sequences.

    In whole numbers: Megatron divides floats, and where a size begins exactly at a step, rounding may delay it by one.
    """
    step, sequence = 0, consumed
    while ramp and sequence < ramp.sequences:
        increments = (rows - ramp.start) // ramp.increment
        done = sequence * increments // ramp.sequences
        size = EqualBatches(step, sequence, ramp.start + done * ramp.increment)
        yield size
        end = -(-(done + 1) * ramp.sequences // increments)  # the sequence from which on batches are larger
        step += -(-(end - sequence) // size.rows)
        sequence += (step - size.step) * size.rows
    yield EqualBatches(step, sequence, rows)
