"""Other configurations at every run, which no table of cases has: see random_cases.py."""

from __future__ import annotations

import random

import pytest

from tests.parallel.random_cases import main
from tests.selection import complete, needs_xla


@complete
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["torch", pytest.param("xla", marks=needs_xla)])
def test_random_configurations_have_the_losses_of_one_process(engine: str) -> None:
    devices, number, seed = 4, 4, random.SystemRandom().randrange(2**32)
    print(f"python -m tests.parallel.random_cases {engine} {devices} {number} {seed}")
    assert main(engine, devices, number, seed) == 0
