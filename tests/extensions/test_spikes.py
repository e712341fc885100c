"""A loss spike is flagged, and the noise of an ordinary run is not."""

from __future__ import annotations

import math
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pretraining.extensions.spikes")

from pretraining.extensions.spikes.detection import WINDOW, is_spike
from pretraining.extensions.spikes.watch import Spikes
from pretraining.monitor.metrics import FILE_NAME, Metrics


def falling(seed: int, reports: int, noise: float) -> list[float]:
    """A loss that falls from 8.7 to about 3 nats, with the noise of batches."""
    draw = random.Random(seed)
    return [3 + 5.7 * math.exp(-step / 60) + draw.gauss(0, noise) for step in range(reports)]


@settings(max_examples=25)  # of 268 losses each
@given(st.integers(0, 10**6), st.floats(0, 0.2))
def test_the_noise_of_batches_is_no_spike(seed: int, noise: float) -> None:
    losses = falling(seed, 300, noise)
    assert not any(is_spike(loss, losses[max(0, i - WINDOW) : i]) for i, loss in enumerate(losses))


@given(st.integers(0, 10**6), st.integers(200, 299), st.floats(2, 5))
def test_a_jump_is_flagged_even_after_another_one(seed: int, place: int, height: float) -> None:
    losses = falling(seed, 300, 0.1)
    losses[place - 3] += height
    assert is_spike(losses[place] + height, losses[place - WINDOW : place])


@given(st.lists(st.floats(0, 20), max_size=WINDOW - 1))
def test_the_first_reports_are_no_spikes(recent: list[float]) -> None:
    assert not is_spike(100.0, recent)


LOSSES = st.lists(st.floats(2, 3) | st.sampled_from([9.0, math.inf, math.nan]), min_size=WINDOW, max_size=WINDOW + 20)


@settings(max_examples=30)
@given(LOSSES)
def test_losses_that_are_not_finite_do_not_count_and_a_restart_flags_the_same_spikes(losses: list[float]) -> None:
    with TemporaryDirectory() as folder:
        metrics = Metrics(Path(folder) / FILE_NAME)
        run: Any = SimpleNamespace(config=SimpleNamespace(run_folder=Path(folder)), metrics=metrics)
        uninterrupted = Spikes(run)
        for step, loss in enumerate(losses):
            finite = list(filter(math.isfinite, losses[:step]))
            expected = {"loss_spike": is_spike(loss, finite[-WINDOW:])}
            assert uninterrupted.figures({"loss": loss}) == Spikes(run).figures({"loss": loss}) == expected
            metrics.write({"step": step, "loss": loss})
        metrics.close()
