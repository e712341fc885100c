"""The learning rate against fms-fsdp's closed form and its own promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import configure
from pretraining.config.errors import ConfigError
from pretraining.config.schedules import SCHEDULES as READ
from pretraining.config.training import TrainConfig
from pretraining.optim.schedule import SCHEDULES, Schedule, fms_annealing, fms_cosine, learning_rate, milestone_steps

totals = st.integers(1, 10**7)
peaks = st.floats(1e-8, 10.0)


def config(num_steps: int, stage: Any = "initial", peak: float = 3e-4) -> TrainConfig:
    return TrainConfig(num_steps=num_steps, training_stage=stage, learning_rate=peak)


@pytest.mark.parametrize(("step", "rate"), [(1, 2.99925e-7), (1000, 2.25e-4), (2000, 2.983382e-4), (40_000, 3e-5)])
def test_fms_fsdps_own_values_at_40000_steps_are_met(step: int, rate: float) -> None:
    # Evaluated by hand from fms-fsdp's formula: warm-up of 2000 steps, cosine branch from about there on.
    assert fms_cosine(step - 1, Schedule(3e-4, total=40_000)) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("num_steps", range(1, 20))
def test_under_20_steps_there_is_no_warm_up_and_no_division_by_zero(num_steps: int) -> None:
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
    assert learning_rate(config(total, "annealing"), total + extra) == 0


@given(st.integers(20, 10**6), st.data())
def test_the_warm_up_rises_and_the_cosine_falls(total: int, data: st.DataObject) -> None:
    warmup = min(2000, total // 20)
    early = data.draw(st.integers(0, max(0, warmup // 2 - 1)))  # the cosine takes over shortly before the warm-up ends
    late = data.draw(st.integers(warmup, total - 1))
    assert fms_cosine(early - 1, Schedule(1.0, total=total)) < fms_cosine(early, Schedule(1.0, total=total))
    assert fms_cosine(late - 1, Schedule(1.0, total=total)) >= fms_cosine(late, Schedule(1.0, total=total))


def test_the_cosine_is_half_way_at_the_middle() -> None:
    assert fms_cosine(4999, Schedule(1.0, total=10_000)) == pytest.approx(0.55)
    assert fms_cosine(2499, Schedule(1.0, total=10_000)) == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)))


@given(totals, peaks)
def test_annealing_starts_at_the_peak_and_its_last_update_is_not_zero(total: int, peak: float) -> None:
    annealed = config(total, "annealing", peak)
    assert learning_rate(annealed, 0) == peak
    assert learning_rate(annealed, total - 1) == pytest.approx(peak / total, rel=1e-6)
    assert fms_annealing(total, Schedule(peak, total=total)) == 0.0


# ---- The other schedules: values worked out by hand from each source's formula

LINEAR = {"lr_schedule": "linear_warmup_decay", "learning_rate": 1.5e-4, "lr_warmup_steps": 100, "num_steps": 10_000}
COSINE = {
    "lr_schedule": "cosine",
    "learning_rate": 1.5e-5,
    "lr_warmup_steps": 2000,
    "num_steps": 30_000,
    "min_lr": 1e-6,
}
HELD = {"lr_schedule": "cosine", "learning_rate": 2e-4, "lr_warmup_steps": 500, "num_steps": 100_000, "min_lr": 2e-5}
NEOX = {"lr_schedule": "neox_cosine", "learning_rate": 6e-4, "lr_warmup_ratio": 0.01, "num_steps": 143_000}
NEOX_2022 = {"lr_schedule": "neox2022_cosine", "learning_rate": 6e-4, "lr_warmup_ratio": 0.01, "num_steps": 320_000}
SHORT = {"learning_rate": 1.0, "lr_warmup_steps": 10, "num_steps": 110}
# Of 100 steps; at the quarter the rate is 0.6 and falls by 0.8 pi / 100 a step
HYBRID: dict[str, Any] = {"learning_rate": 1.0, "min_lr": 0.2, "lr_warmup_steps": 10, "num_steps": 80}
HYBRID |= {"lr_schedule": "hybrid_cosine_inv_sqrt", "lr_decay_steps": 100}
ROOT = math.sqrt((60 - 25 + 0.6 * 100 / (1.6 * math.pi)) / (0.6 * 100 / (1.6 * math.pi)))
VECTORS: list[tuple[dict[str, Any], dict[int, float]]] = [
    (LINEAR, {0: 0.0, 1: 1.5e-6, 100: 1.5e-4, 101: 1.5e-4 * 9899 / 9900, 5050: 7.5e-5, 9999: 1.5e-4 / 9900}),
    (
        {**COSINE, "min_lr": 1e-6},
        {0: 1.5e-5 / 2001, 1: 3e-5 / 2001, 2000: 1.5e-5, 16_000: 8e-6, 30_000: 1e-6, 40_000: 1e-6},
    ),
    (
        {**HELD, "lr_constant_steps": 50_000},
        {0: 0.0, 1: 4e-7, 500: 2e-4, 25_250: 1.1e-4, 50_000: 2e-5, 100_000: 2e-5},
    ),
    # NxDT's own megatron_gpt_config.yaml: one step after the warm-up the rate is at its floor
    ({**HELD, "lr_constant_steps": 80_000_000}, {0: 0.0, 1: 4e-7, 500: 2e-4, 501: 2e-5, 100_000: 2e-5}),
    ({**SHORT, "lr_schedule": "cosine", "lr_warmup_steps": 0, "lr_constant_steps": 110, "min_lr": 0.5}, {0: 0.5}),
    (
        {**NEOX, "min_lr": 6e-5},
        {
            0: 6e-4 / 1430,
            1: 6e-4 / 1430,
            1430: 6e-4,
            71_500: 6e-5 + 2.7e-4 * (1 + math.cos(math.pi * 70_070 / 141_570)),
            143_000: 6e-5,
            200_000: 6e-5,
        },
    ),
    (
        NEOX_2022,
        {
            0: 0.0,
            1: 1.875e-7,
            3200: 6e-4,
            160_000: 3e-4 * (1 + math.cos(0.49 * math.pi)),
            316_800: 3e-4 * (1 + math.cos(0.98 * math.pi)),
            320_000: 3e-4 * (1 + math.cos(0.98 * math.pi)),
        },
    ),
    ({**SHORT, "lr_schedule": "constant"}, {0: 1 / 11, 9: 10 / 11, 10: 1.0, 110: 1.0}),
    ({**SHORT, "lr_schedule": "warmup_hold", "lr_hold_steps": 20, "min_lr": 0.1}, {10: 1.0, 110: 1.0, 111: 0.1}),
    ({**SHORT, "lr_schedule": "square", "min_lr": 1e-5}, {0: 1 / 11, 10: 1.0, 60: 0.25, 110: 1e-5, 500: 1e-5}),
    ({**SHORT, "lr_schedule": "square_root"}, {10: 1.0, 11: math.sqrt(99 / 110), 55: math.sqrt(0.5), 110: 0.0}),
    ({**SHORT, "lr_schedule": "warmup_annealing", "min_lr": 0.2}, {10: 1.0, 60: 0.6, 110: 0.2, 200: 0.2}),
    ({**SHORT, "lr_schedule": "inverse_sqrt"}, {10: 1.0, 43: 0.5, 98: 1 / 3}),
    (
        {**HYBRID, "lr_cooldown_steps": 20},
        {0: 0.0, 5: 0.5, 10: 0.2 + 0.4 * (1 + math.cos(0.2 * math.pi)), 25: 0.6, 60: 0.6 / ROOT, 70: 0.3 / ROOT},
    ),
    ({**HYBRID, "num_steps": 900, "lr_warmup_steps": 0}, {0: 1.0, 25: 0.6, 60: 0.6 / ROOT}),
    ({**SHORT, "lr_schedule": "noam", "lr_d_model": 64}, {0: 10**-1.5 / 8, 10: 10**-0.5 / 8, 40: 40**-0.5 / 8}),
    ({**SHORT, "lr_schedule": "noam_hold", "lr_hold_steps": 20}, {10: 1.0, 29: 1.0, 60: 0.5, 110: (10 / 90) ** 0.5}),
    (
        {**SHORT, "lr_schedule": "deepspeed_warmup_decay"},
        {0: 0.0, 1: 0.0, 4: math.log10(4), 10: 1.0, 11: 1.0, 61: 0.5, 110: 0.01, 111: 0.0},
    ),
    ({**SHORT, "lr_schedule": "poly", "lr_power": 3.0, "min_lr": 0.2}, {10: 1.0, 60: 0.3, 110: 0.2, 300: 0.2}),
    ({**SHORT, "lr_schedule": "poly_hold", "lr_hold_steps": 20}, {10: 1.0, 30: 1.0, 70: 0.5, 110: 0.0}),
    ({**SHORT, "lr_schedule": "wsd", "lr_hold_steps": 60, "min_lr": 0.1}, {10: 1.0, 70: 1.0, 90: 0.55, 110: 0.1}),
    ({**SHORT, "lr_schedule": "neox_linear"}, {0: 0.1, 1: 0.1, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
    ({**SHORT, "lr_schedule": "neox_linear", "min_lr": 0.6}, {10: 1.0, 60: 0.6, 110: 0.6}),
    # a fifth of a step of warm-up, which GPT-NeoX would begin with five times the peak
    (
        {"lr_schedule": "neox_linear", "learning_rate": 1.0, "lr_warmup_ratio": 0.01, "num_steps": 20},
        {0: 1.0, 10: 10 / 19.8},
    ),
    ({**SHORT, "lr_schedule": "neox_exponential"}, {10: 1.0, 110: math.exp(-0.693)}),
    ({**SHORT, "lr_schedule": "neox2022_linear"}, {0: 0.0, 5: 0.5, 10: 1.0, 65: 0.5, 100: 20 / 110, 110: 20 / 110}),
    # megatron/learning_rates.py: constant is the peak for good after max(1, step) / warmup (in 2022 step / warmup)
    ({**SHORT, "lr_schedule": "neox_constant"}, {0: 0.1, 5: 0.5, 10: 1.0, 65: 1.0, 109: 1.0, 200: 1.0}),
    ({**SHORT, "lr_schedule": "neox2022_constant"}, {0: 0.0, 5: 0.5, 10: 1.0, 65: 1.0, 109: 1.0, 200: 1.0}),
    ({**SHORT, "lr_schedule": "neox2022_exponential"}, {65: math.exp(-0.693 / 2), 110: math.exp(-0.693 * 90 / 110)}),
    (
        {"lr_schedule": "step", "learning_rate": 1.0, "lr_gamma": 0.5, "lr_step_size": 30, "num_steps": 100},
        {0: 1.0, 29: 1.0, 30: 0.5, 99: 0.125},
    ),
    (
        {"lr_schedule": "exponential_lr", "learning_rate": 1.0, "lr_gamma": 0.99, "num_steps": 100},
        {0: 1.0, 1: 0.99, 50: 0.99**50},
    ),
]


@pytest.mark.parametrize(("flags", "rates"), VECTORS, ids=lambda value: value.get("lr_schedule", ""))
def test_a_schedule_has_the_values_of_its_formula(flags: dict[str, Any], rates: dict[int, float]) -> None:
    checked = configure({**flags, "use_dummy_dataset": True})
    for step, rate in rates.items():
        assert learning_rate(checked, step) == pytest.approx(rate, rel=1e-12, abs=1e-15), step


def test_stable_lm_s_cosine_goes_over_into_its_inverse_square_root_without_a_jump_or_a_bend() -> None:
    checked = configure({**HYBRID, "lr_decay_steps": 10**6, "num_steps": 10**6, "use_dummy_dataset": True})
    before, there, after = (learning_rate(checked, 250_000 + step) for step in (-10, 0, 10))
    assert there == pytest.approx(0.6)
    assert after - there == pytest.approx(there - before, rel=1e-4) == pytest.approx(-0.8 * math.pi * 1e-5, rel=1e-4)


def test_every_schedule_can_be_chosen_and_has_a_vector() -> None:
    assert set(READ) == set(SCHEDULES)
    assert {str(flags["lr_schedule"]) for flags, _ in VECTORS} | {"fms_cosine", "fms_annealing"} == set(SCHEDULES)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(20, 10**6), st.floats(1e-8, 1.0), st.data())
def test_no_rate_exceeds_the_peak_or_is_negative(name: str, total: int, peak: float, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total - 1)) if "lr_warmup_steps" in READ[name].reads else None
    needed: dict[str, dict[str, Any]] = {
        "noam": {"lr_d_model": 64},
        "step": {"lr_gamma": 0.5, "lr_step_size": 7},
        "exponential_lr": {"lr_gamma": 1.0},
    }
    chosen = TrainConfig(
        lr_schedule=name, num_steps=total, learning_rate=peak, lr_warmup_steps=warmup, **needed.get(name, {})
    )
    for step in (*milestone_steps(chosen), data.draw(st.integers(0, 3 * total))):
        assert 0 <= learning_rate(chosen, step) <= peak * (1 + 1e-12)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (
            {"lr_schedule": "cosine", "lr_warmup_steps": 5, "lr_warmup_ratio": 0.1},
            ("lr_warmup_steps", "lr_warmup_ratio"),
        ),
        ({"lr_schedule": "cosine", "min_lr": 1.0}, ("min_lr", "learning_rate")),
        ({"lr_schedule": "cosine", "lr_warmup_steps": 100}, ("lr_warmup_steps", "num_steps")),
        ({"lr_schedule": "noam"}, ("lr_schedule", "lr_d_model")),
        ({"lr_schedule": "step", "lr_gamma": 0.5}, ("lr_schedule", "lr_step_size")),
        ({"lr_gamma": 0.5}, ("lr_gamma", "lr_schedule=fms_cosine", "exponential_lr")),
        ({"lr_schedule": "cosine", "training_stage": "annealing"}, ("lr_schedule", "training_stage")),
    ],
)
def test_contradictory_settings_name_both_fields(flags: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        configure({"use_dummy_dataset": True, "num_steps": 100, "learning_rate": 1e-3, **flags})
    assert all(name in str(caught.value) for name in names), str(caught.value)


def test_fms_fsdps_annealing_stage_is_the_schedule_of_that_name() -> None:
    assert config(100, "annealing").lr_schedule == "fms_annealing"
