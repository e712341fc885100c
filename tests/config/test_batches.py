"""The sizes of global batches are a function of the sequences before them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.batches import GlobalBatches, global_batches, tokens_of_run
from pretraining.config.grammar import BatchRamp
from pretraining.config.training import TrainConfig

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
    assert GlobalBatches(total, ramp, consumed).sequences(3) == batches.sequences(steps + 3)  # of a run that continues


def test_the_tokens_of_a_run_are_those_of_its_global_batches() -> None:
    config = TrainConfig(global_batch_size=8, rampup_batch_size="2,2,30", seq_length=10, num_steps=12)
    sizes = [2] * 5 + [4] * 3 + [6] * 2 + [8] * 2
    assert [len(global_batches(config).sequences(step)) for step in range(12)] == sizes
    assert tokens_of_run(config) == sum(sizes) * 10


@pytest.mark.parametrize("start", [0, 7, 30])
def test_without_a_ramp_every_global_batch_has_the_same_size(start: int) -> None:
    assert GlobalBatches(8, None, start).sequences(5) == range(start + 40, start + 48)
    assert GlobalBatches(8, None, start).steps_before(start + 47) == 5
