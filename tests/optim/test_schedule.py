"""The learning rate against fms-fsdp's closed form and its own promises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.training import TrainConfig
from pretraining.optim.schedule import annealing, fms_cosine, learning_rate

totals = st.integers(1, 10**7)
peaks = st.floats(1e-8, 10.0)


def config(num_steps: int, stage: str = "initial", peak: float = 3e-4) -> TrainConfig:
    return TrainConfig(num_steps=num_steps, training_stage=stage, learning_rate=peak)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.0), (1, 2.99925e-7), (1000, 2.25e-4), (2000, 2.983382e-4), (40_000, 3e-5)]
)
def test_fms_fsdps_own_values_at_40000_steps_are_met(step: int, rate: float) -> None:
    # Evaluated by hand from fms-fsdp's formula: warm-up of 2000 steps, cosine branch from about there on.
    assert fms_cosine(step, 3e-4, 40_000) == pytest.approx(rate, rel=1e-6)


def test_update_k_uses_fms_fsdps_value_at_k_plus_1() -> None:
    for step in (0, 1, 999, 1999, 2000, 20_000, 39_999):
        assert learning_rate(config(40_000), step) == fms_cosine(step + 1, 3e-4, 40_000)


@pytest.mark.parametrize("num_steps", range(1, 20))
def test_under_20_steps_there_is_no_warm_up_and_no_division_by_zero(num_steps: int) -> None:
    assert fms_cosine(0, 3e-4, num_steps) == pytest.approx(3e-4)
    rates = [learning_rate(config(num_steps), step) for step in range(num_steps)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(3e-5)


@given(totals, peaks, st.data())
def test_no_update_is_wasted_and_none_exceeds_the_peak(total: int, peak: float, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, total - 1))
    for stage in ("initial", "annealing"):
        assert peak / total / 1e4 < learning_rate(config(total, stage, peak), step) <= peak


@given(totals, st.integers(0, 10**8))
def test_the_rate_stays_at_its_floor_after_the_last_step(total: int, extra: int) -> None:
    assert learning_rate(config(total), total + extra) == pytest.approx(3e-5)
    assert learning_rate(config(total, "annealing"), total + extra) > 0  # capturable AdamW divides by it


@given(st.integers(20, 10**6), st.data())
def test_the_warm_up_rises_and_the_cosine_falls(total: int, data: st.DataObject) -> None:
    warmup = min(2000, total // 20)
    early = data.draw(st.integers(0, max(0, warmup // 2 - 1)))  # the cosine takes over shortly before the warm-up ends
    late = data.draw(st.integers(warmup, total - 1))
    assert fms_cosine(early, 1.0, total) < fms_cosine(early + 1, 1.0, total)
    assert fms_cosine(late, 1.0, total) >= fms_cosine(late + 1, 1.0, total)


def test_the_cosine_is_half_way_at_the_middle() -> None:
    assert fms_cosine(5000, 1.0, 10_000) == pytest.approx(0.55)
    assert fms_cosine(2500, 1.0, 10_000) == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)))


@given(totals, peaks)
def test_annealing_starts_at_the_peak_and_its_last_update_is_not_zero(total: int, peak: float) -> None:
    annealed = config(total, "annealing", peak)
    assert learning_rate(annealed, 0) == peak
    assert learning_rate(annealed, total - 1) == pytest.approx(peak / total, rel=1e-6)
    assert annealing(total, peak, total) == 0.0
