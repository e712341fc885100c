"""The sizes of global batches are a function of the sequences before them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION
from pretraining.config.batches import GlobalBatches, global_batches, tokens_of_run
from pretraining.config.grammar import BatchRamp

RAMPS = st.builds(
    lambda start, increment, count, samples: (BatchRamp(start, increment, samples), start + increment * count),
    *(st.integers(1, 40) for _ in range(3)),
    st.integers(1, 5000),
)


def megatron(ramp: BatchRamp, total: int, consumed: int) -> int:
    """Return the size of the next global batch as Megatron-LM defines it, without its rounding."""
    per_increment = Fraction(ramp.sequences) / ((total - ramp.start) // ramp.increment)
    return total if consumed > ramp.sequences else ramp.start + int(consumed / per_increment) * ramp.increment


@given(RAMPS, st.integers(0, 60))
def test_every_size_is_megatron_s_and_nothing_is_lost_between_steps(case: tuple[BatchRamp, int], steps: int) -> None:
    ramp, total = case
    batches, consumed = GlobalBatches(total, ramp), 0
    for step in range(steps):
        size = megatron(ramp, total, consumed)
        assert batches.sequences(step) == range(consumed, consumed + size)
        assert batches.steps_before(consumed) == batches.steps_before(consumed + size - 1) == step
        consumed += size
    assert GlobalBatches(total, ramp, consumed=consumed).sequences(3) == batches.sequences(
        steps + 3
    )  # of a run that continues


def test_the_tokens_of_a_run_are_those_of_its_global_batches() -> None:
    config = CONFIGURATION(global_batch_size=8, rampup_batch_size="2,2,30", seq_length=10, num_steps=12)
    sizes = [2] * 5 + [4] * 3 + [6] * 2 + [8] * 2
    assert [len(global_batches(config).sequences(step)) for step in range(12)] == sizes
    assert tokens_of_run(config) == sum(sizes) * 10


@pytest.mark.parametrize("start", [0, 7, 30])
def test_without_a_ramp_every_global_batch_has_the_same_size(start: int) -> None:
    assert GlobalBatches(8, consumed=start).sequences(5) == range(start + 40, start + 48)
    assert GlobalBatches(8, consumed=start).steps_before(start + 47) == 5


@given(
    st.one_of(RAMPS, st.integers(1, 9).map(lambda rows: (None, rows))),
    st.lists(st.integers(0, 400), max_size=6, unique=True).map(sorted),
    st.integers(1, 60),
)
def test_batches_begin_behind_what_is_passed_over_also_after_a_stop(
    case: tuple[BatchRamp | None, int], borders: list[int], steps: int
) -> None:
    (ramp, rows), skipped = case, [range(*pair) for pair in zip(borders[::2], borders[1::2], strict=False)]
    batches = GlobalBatches(rows, ramp, skipped)
    expected: list[range] = []
    position = 0
    while len(expected) < steps:
        batch = range(position, position + (megatron(ramp, rows, position) if ramp else rows))
        overlaps = [some for some in skipped if {*some} & {*batch}]
        expected += [] if overlaps else [batch]
        position = overlaps[0].stop if overlaps else batch.stop
    taken = [batches.sequences(step) for step in range(steps)]
    assert taken == expected
    assert batches.trained(steps) == sum(map(len, taken))
    for step, batch in enumerate(taken):
        assert batches.steps_before(batch.stop) == step + 1
    stopped = GlobalBatches(rows, ramp, skipped, consumed=batches.sequences(steps // 2).start)
    assert [stopped.sequences(step) for step in range(steps - steps // 2)] == taken[steps // 2 :]
