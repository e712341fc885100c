"""The sequences of global batches are a function of the sequences before them."""

from __future__ import annotations

import pytest

from pretraining.config.batches import GlobalBatches
from pretraining.config.training import TrainConfig


@pytest.mark.parametrize("start", [0, 7, 30])
def test_every_global_batch_has_the_same_size_where_nothing_changes_it(start: int) -> None:
    batches = GlobalBatches(8, start)
    assert batches.sequences(5) == range(start + 40, start + 48)
    assert batches.trained(5) == 40
    assert batches.steps_before(start + 47) == 5
    assert batches.steps_before(0) == 0


def test_the_sequences_of_a_run_are_those_of_its_global_batches() -> None:
    assert TrainConfig(global_batch_size=8, num_steps=12).sequences_of_run == 12 * 8
