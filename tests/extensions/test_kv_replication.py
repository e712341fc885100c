"""The copies of the key/value heads that are asked for; tests/parallel/test_xla.py trains with them."""

from __future__ import annotations

import pytest

from main_training import CONFIGURATION
from pretraining.config.variants import model_shape
from pretraining.parallel.mesh import kv_repeats


@pytest.mark.parametrize(("tensor", "asked", "repeats"), [(8, 0, 4), (8, 4, 4), (4, 4, 4), (4, 1, 1)])
def test_heads_have_the_copies_that_are_asked_for(tensor: int, asked: int, repeats: int) -> None:
    config = CONFIGURATION(num_kv_heads=2, tensor_parallel_size=tensor, kv_replication=asked)
    assert kv_repeats(config, model_shape(config)) == repeats
