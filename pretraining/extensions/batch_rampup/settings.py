"""The settings of global batches that grow or pass sequences over. Depends on neither torch nor devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Annotated, NamedTuple

from pretraining.config.declaration import LARGEST, Grammar, Needs, Resume
from pretraining.config.errors import Problem
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.config.validate import divisors, either, multiples_around, problem
from pretraining.extensions.batch_rampup.batches import ChangingBatches


class BatchRamp(NamedTuple):
    """How the global batch grows to global_batch_size."""

    start: int  # sequences of the first global batch
    increment: int
    sequences: int  # of the run, over which the increments are spread evenly

    def rows_at(self, largest: int, sequence: int) -> tuple[int, int | None]:
        """See batches.RowsAt.

        Megatron-LM's `RampupBatchsizeNumMicroBatches`: increments are spread evenly over the ramp's sequences. In whole
        numbers: Megatron divides floats, and where a size begins exactly at a step, rounding may delay it by one.
        """
        if sequence >= self.sequences:
            return largest, None
        increments = (largest - self.start) // self.increment
        done = sequence * increments // self.sequences
        return self.start + done * self.increment, -(-(done + 1) * self.sequences // increments)


def parse_rampup(text: str) -> BatchRamp | None:
    """Return the ramp of a text such as "16,16,1000"; None for a blank text. Raises ValueError."""
    numbers = [int(item) for item in comma_separated(text)]
    if numbers and (len(numbers) != 3 or min(numbers) < 1):
        raise ValueError(f"expected three whole numbers from 1, got {text}")
    return BatchRamp(*numbers) if numbers else None


def parse_ranges(text: str) -> list[range]:
    """Return the ranges of a text such as "20-29,0-9", ends included, in ascending order. Raises ValueError."""
    ends = [tuple(map(int, item.split("-"))) for item in comma_separated(text)]
    if any(len(pair) != 2 for pair in ends):
        raise ValueError(f"expected FIRST-LAST, got {text}")
    ranges = [range(first, last + 1) for first, last in ends]
    if not all(0 <= some.start < some.stop <= LARGEST[int] for some in ranges):
        raise ValueError(f"expected FIRST-LAST from 0 to 10^15, got {text}")
    return sorted(ranges, key=attrgetter("start"))


RAMPUP = Grammar(parse_rampup, "start,increment,samples: three whole numbers from 1, such as 16,16,100000")
RANGES = Grammar(parse_ranges, "ranges FIRST-LAST from 0 to 10^15, comma-separated, such as 512000-575999")


@dataclass(frozen=True)
class BatchRampupConfig(TrainConfig):
    """A configuration whose global batch may grow, and pass sequences over."""

    # ---- Batch and length
    rampup_batch_size: Annotated[str, RAMPUP, Needs("global_batch_size")] = ""
    """Megatron's start,increment,samples: the global batch has `start` sequences at first and grows by `increment` up
    to global_batch_size, evenly over the first `samples` sequences of the run. Every size is a multiple of batch_size x
    ranks. Learning rate and intervals still follow the step. Empty: all global batches have one size."""

    # ---- Data
    skip_samples: Annotated[str, RANGES, Resume.NOTE] = ""
    """Sequences of the training data that are passed over, FIRST-LAST and comma-separated, as samples_seen of
    metrics.jsonl counts them; they count there. A global batch that would have one of them begins after it. See
    "Loss spikes". Empty: none."""

    def global_batches(self, rows: int, consumed: int = 0) -> ChangingBatches:
        """See TrainConfig."""
        ramp = parse_rampup(self.rampup_batch_size)
        rows_at = partial(ramp.rows_at, rows) if ramp else lambda _: (rows, None)
        return ChangingBatches(rows_at, parse_ranges(self.skip_samples), consumed)

    def batch_problems(self, largest: int, factor: int) -> Iterator[Problem]:
        """See TrainConfig."""
        yield from super().batch_problems(largest, factor)
        ramp = parse_rampup(self.rampup_batch_size)
        if ramp is None:
            return
        multiple = f"a multiple of {factor} sequences (batch_size={self.batch_size} on every rank, stages included)"
        growth = largest - ramp.start
        if growth <= 0:
            remedy = f"starts with {ramp.start} sequences, which is not below global_batch_size={largest}"
        elif ramp.start % factor:
            remedy = f"starts with {ramp.start}, which is not {multiple}; use {multiples_around(ramp.start, factor)}"
        elif growth % ramp.increment or ramp.increment % factor:
            valid = either(number * factor for number in divisors(growth // factor))
            remedy = f"grows by {ramp.increment}, which must be {multiple} and divide {largest} - {ramp.start}"
            remedy += f"; use {valid}"
        else:
            return
        yield problem(self, "rampup_batch_size", remedy)

    @property
    def batch_changes(self) -> str:
        """See TrainConfig."""
        assert self.global_batch_size is not None
        sizes = self.global_batches(self.global_batch_size).sizes
        first, last = sizes[0].rows, next(size for size in sizes if size.rows == self.global_batch_size)
        if first == last.rows:
            return super().batch_changes
        count = len({size.rows for size in sizes})
        growth = f"; {first} sequences at first, these from step {last.step + 1:,} on ({count} sizes)"
        return super().batch_changes + growth
