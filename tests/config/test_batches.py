"""The sequences of global batches are a function of the sequences before them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION
from pretraining.config.batches import GlobalBatches, RowsAt, global_batches, tokens_of_run


def growing(sizes: list[int], border: int) -> RowsAt:
    """Return batches that have the next of `sizes` after every `border` sequences."""

    def rows_at(sequence: int) -> tuple[int, int | None]:
        index = min(sequence // border, len(sizes) - 1)
        return sizes[index], None if index == len(sizes) - 1 else (index + 1) * border

    return rows_at


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted)


@pytest.mark.parametrize("start", [0, 7, 30])
def test_every_global_batch_has_the_same_size_where_nothing_changes_it(start: int) -> None:
    batches = GlobalBatches(growing([8], 1), consumed=start)
    assert batches.sequences(5) == range(start + 40, start + 48)
    assert batches.steps_before(start + 47) == 5


def test_the_tokens_of_a_run_are_those_of_its_global_batches() -> None:
    config = CONFIGURATION(global_batch_size=8, skip_samples="8-11", seq_length=10, num_steps=12)
    assert [len(global_batches(config).sequences(step)) for step in range(12)] == [8] * 12
    assert tokens_of_run(config) == 12 * 8 * 10


@given(
    st.builds(growing, SIZES, st.integers(1, 300)),
    st.lists(st.integers(0, 400), max_size=6, unique=True).map(sorted),
    st.integers(1, 60),
)
def test_batches_begin_behind_what_is_passed_over_also_after_a_stop(
    rows_at: RowsAt, borders: list[int], steps: int
) -> None:
    skipped = [range(*pair) for pair in zip(borders[::2], borders[1::2], strict=False)]
    batches = GlobalBatches(rows_at, skipped)
    expected: list[range] = []
    position = 0
    while len(expected) < steps:
        batch = range(position, position + rows_at(position)[0])
        overlaps = [some for some in skipped if {*some} & {*batch}]
        expected += [] if overlaps else [batch]
        position = overlaps[0].stop if overlaps else batch.stop
    taken = [batches.sequences(step) for step in range(steps)]
    assert taken == expected
    assert batches.trained(steps) == sum(map(len, taken))
    for step, batch in enumerate(taken):
        assert batches.steps_before(batch.stop) == step + 1
    stopped = GlobalBatches(rows_at, skipped, consumed=batches.sequences(steps // 2).start)
    assert [stopped.sequences(step) for step in range(steps - steps // 2)] == taken[steps // 2 :]
