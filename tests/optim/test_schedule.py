"""The learning rate against fms-fsdp's closed form and its own promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION, configure
from pretraining.config.schedules import SCHEDULES, Curve, fms_cosine
from pretraining.config.training import TrainConfig
from pretraining.extensions.milestones import milestone_steps
from pretraining.optim.schedule import learning_rate

totals = st.integers(1, 10**7)
peaks = st.floats(1e-8, 10.0)


def config(num_steps: int, peak: float = 3e-4) -> TrainConfig:
    return TrainConfig(num_steps=num_steps, learning_rate=peak)


@pytest.mark.parametrize(("step", "rate"), [(1, 2.99925e-7), (1000, 2.25e-4), (2000, 2.983382e-4), (40_000, 3e-5)])
def test_fms_fsdps_own_values_at_40000_steps_are_met(step: int, rate: float) -> None:
    # Evaluated by hand from fms-fsdp's formula: warm-up of 2000 steps, cosine branch from about there on.
    assert fms_cosine(step - 1, Curve(3e-4, warmup=2000, total=40_000)) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("num_steps", range(1, 20))
def test_under_20_steps_there_is_no_warm_up_and_no_division_by_zero(num_steps: int) -> None:
    rates = [learning_rate(config(num_steps), step) for step in range(num_steps)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(3e-5)


@given(totals, peaks, st.data())
def test_no_update_is_wasted_and_none_exceeds_the_peak(total: int, peak: float, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, total - 1))
    assert peak / total / 1e4 < learning_rate(config(total, peak), step) <= peak


@given(totals, st.integers(0, 10**8))
def test_the_rate_stays_at_its_floor_after_the_last_step(total: int, extra: int) -> None:
    assert learning_rate(config(total), total + extra) == pytest.approx(3e-5)


@given(st.integers(20, 10**6), st.data())
def test_the_warm_up_rises_and_the_cosine_falls(total: int, data: st.DataObject) -> None:
    warmup = min(2000, total // 20)
    early = data.draw(st.integers(0, max(0, warmup // 2 - 1)))  # the cosine takes over shortly before the warm-up ends
    late = data.draw(st.integers(warmup, total - 1))
    curve = Curve(1.0, warmup=warmup, total=total)
    assert fms_cosine(early - 1, curve) < fms_cosine(early, curve)
    assert fms_cosine(late - 1, curve) >= fms_cosine(late, curve)


def test_the_cosine_is_half_way_at_the_middle() -> None:
    assert fms_cosine(4999, Curve(1.0, warmup=500, total=10_000)) == pytest.approx(0.55)
    assert fms_cosine(2499, Curve(1.0, warmup=500, total=10_000)) == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)))


# ---- The other schedules: values worked out by hand from each source's formula

COSINE = {
    "lr_schedule": "cosine",
    "learning_rate": 1.5e-5,
    "lr_warmup_steps": 2000,
    "num_steps": 30_000,
    "min_lr": 1e-6,
}
HELD = {"lr_schedule": "cosine", "learning_rate": 2e-4, "lr_warmup_steps": 500, "num_steps": 100_000, "min_lr": 2e-5}
SHORT = {"learning_rate": 1.0, "lr_warmup_steps": 10, "num_steps": 110}
VECTORS: list[tuple[dict[str, Any], dict[int, float]]] = [
    (
        {**COSINE, "min_lr": 1e-6},
        {0: 1.5e-5 / 2001, 1: 3e-5 / 2001, 2000: 1.5e-5, 16_000: 8e-6, 30_000: 1e-6, 40_000: 1e-6},
    ),
    ({**HELD, "lr_constant_steps": 50_000}, {0: 0.0, 1: 4e-7, 500: 2e-4, 25_250: 1.1e-4, 50_000: 2e-5, 100_000: 2e-5}),
    # NxDT's own megatron_gpt_config.yaml: one step after the warm-up the rate is at its floor
    ({**HELD, "lr_constant_steps": 99_499}, {0: 0.0, 1: 4e-7, 500: 2e-4, 501: 2e-5, 100_000: 2e-5}),
    (
        {**SHORT, "lr_schedule": "cosine", "lr_warmup_steps": 0, "lr_constant_steps": 109, "min_lr": 0.5},
        {0: 1.0, 1: 0.5},
    ),
    ({**SHORT, "lr_schedule": "constant"}, {0: 1 / 11, 9: 10 / 11, 10: 1.0, 110: 1.0}),
    ({**SHORT, "lr_schedule": "wsd", "lr_hold_steps": 60, "min_lr": 0.1}, {10: 1.0, 70: 1.0, 90: 0.55, 110: 0.1}),
]


@pytest.mark.parametrize(("flags", "rates"), VECTORS, ids=lambda value: value.get("lr_schedule", ""))
def test_a_schedule_has_the_values_of_its_formula(flags: dict[str, Any], rates: dict[int, float]) -> None:
    check(flags, rates)


def check(flags: dict[str, Any], rates: dict[int, float]) -> None:
    """Assert that the learning rates by 0-based update are those of the configuration."""
    checked = configure({**flags, "use_dummy_dataset": True})
    for step, rate in rates.items():
        assert learning_rate(checked, step) == pytest.approx(rate, rel=1e-12, abs=1e-15), step


def test_every_schedule_has_a_vector() -> None:
    assert {str(flags["lr_schedule"]) for flags, _ in VECTORS} | {"fms_cosine"} == set(SCHEDULES)


@given(st.sampled_from(sorted(CONFIGURATION.schedules())), st.integers(20, 10**6), st.floats(1e-8, 1.0), st.data())
def test_no_rate_exceeds_the_peak_or_is_negative(name: str, total: int, peak: float, data: st.DataObject) -> None:
    has_warmup = "lr_warmup_steps" in CONFIGURATION.schedules()[name].reads
    warmup = data.draw(st.integers(0, total - 1)) if has_warmup else None
    needed: dict[str, dict[str, Any]] = {
        "noam": {"lr_d_model": 64},
        "step": {"lr_gamma": 0.5, "lr_step_size": 7},
        "exponential_lr": {"lr_gamma": 1.0},
    }
    chosen = CONFIGURATION(
        lr_schedule=name, num_steps=total, learning_rate=peak, lr_warmup_steps=warmup, **needed.get(name, {})
    )
    for step in (*milestone_steps(chosen), data.draw(st.integers(0, 3 * total))):
        assert 0 <= learning_rate(chosen, step) <= peak * (1 + 1e-12)
