"""The rates of further schedules: values worked out by hand from each source's formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given

from main_training import CONFIGURATION, configure
from pretraining.config.schedules import Curve
from pretraining.extensions.schedules.formulas import fms_annealing
from pretraining.extensions.schedules.settings import SCHEDULES
from pretraining.optim.schedule import learning_rate
from tests.optim.test_schedule import SHORT, check, peaks, totals

LINEAR = {"lr_schedule": "linear_warmup_decay", "learning_rate": 1.5e-4, "lr_warmup_steps": 100, "num_steps": 10_000}
NEOX = {"lr_schedule": "neox_cosine", "learning_rate": 6e-4, "lr_warmup_ratio": 0.01, "num_steps": 143_000}
NEOX_2022 = {"lr_schedule": "neox2022_cosine", "learning_rate": 6e-4, "lr_warmup_ratio": 0.01, "num_steps": 320_000}
AT_ONCE: dict[str, Any] = {"learning_rate": 1.0, "num_steps": 100}  # without a warm-up
CYCLES: dict[str, Any] = {**AT_ONCE, "lr_schedule": "poly", "lr_decay_steps": 40, "lr_cycle": True}
# Of 100 steps; at the quarter the rate is 0.6 and falls by 0.8 pi / 100 a step
HYBRID: dict[str, Any] = {"learning_rate": 1.0, "min_lr": 0.2, "lr_warmup_steps": 10, "num_steps": 80}
HYBRID |= {"lr_schedule": "hybrid_cosine_inv_sqrt", "lr_decay_steps": 100}
ROOT = math.sqrt((60 - 25 + 0.6 * 100 / (1.6 * math.pi)) / (0.6 * 100 / (1.6 * math.pi)))
VECTORS: list[tuple[dict[str, Any], dict[int, float]]] = [
    (LINEAR, {0: 0.0, 1: 1.5e-6, 100: 1.5e-4, 101: 1.5e-4 * 9899 / 9900, 5050: 7.5e-5, 9999: 1.5e-4 / 9900}),
    ({**SHORT, "lr_schedule": "inverse_sqrt"}, {10: 1.0, 43: 0.5, 98: 1 / 3}),
    ({**SHORT, "lr_schedule": "poly", "lr_power": 3.0, "min_lr": 0.2}, {10: 1.0, 60: 0.3, 110: 0.2, 300: 0.2}),
    ({**NEOX, "min_lr": 6e-5}, {0: 6e-4 / 1430, 1: 6e-4 / 1430, 1430: 6e-4, 143_000: 6e-5, 200_000: 6e-5}),
    ({**NEOX, "min_lr": 6e-5}, {71_500: 6e-5 + 2.7e-4 * (1 + math.cos(math.pi * 70_070 / 141_570))}),
    (NEOX_2022, {0: 0.0, 1: 1.875e-7, 3200: 6e-4, 160_000: 3e-4 * (1 + math.cos(0.49 * math.pi))}),
    (NEOX_2022, dict.fromkeys((316_800, 320_000), 3e-4 * (1 + math.cos(0.98 * math.pi)))),
    ({**SHORT, "lr_schedule": "warmup_hold", "lr_hold_steps": 20, "min_lr": 0.1}, {10: 1.0, 110: 1.0, 111: 0.1}),
    ({**SHORT, "lr_schedule": "square", "min_lr": 1e-5}, {0: 1 / 11, 10: 1.0, 60: 0.25, 110: 1e-5, 500: 1e-5}),
    ({**SHORT, "lr_schedule": "square_root"}, {10: 1.0, 11: math.sqrt(99 / 110), 55: math.sqrt(0.5), 110: 0.0}),
    ({**SHORT, "lr_schedule": "warmup_annealing", "min_lr": 0.2}, {10: 1.0, 60: 0.6, 110: 0.2, 200: 0.2}),
    (
        {**HYBRID, "lr_cooldown_steps": 20},
        {0: 0.0, 5: 0.5, 10: 0.2 + 0.4 * (1 + math.cos(0.2 * math.pi)), 25: 0.6, 60: 0.6 / ROOT, 70: 0.3 / ROOT},
    ),
    ({**HYBRID, "num_steps": 900, "lr_warmup_steps": 0}, {0: 1.0, 25: 0.6, 60: 0.6 / ROOT}),
    ({**SHORT, "lr_schedule": "noam", "lr_d_model": 64}, {0: 10**-1.5 / 8, 10: 10**-0.5 / 8, 40: 40**-0.5 / 8}),
    # NeMo counts at least 1, so that without a warm-up the first update has the floor, too
    ({**AT_ONCE, "lr_schedule": "noam", "min_lr": 0.2, "lr_d_model": 64, "num_steps": 9}, {0: 0.2, 1: 0.2, 9: 0.2}),
    ({**SHORT, "lr_schedule": "noam_hold", "lr_hold_steps": 20}, {10: 1.0, 29: 1.0, 60: 0.5, 110: (10 / 90) ** 0.5}),
    (
        {**SHORT, "lr_schedule": "deepspeed_warmup_decay"},
        {0: 0.0, 1: 0.0, 4: math.log10(4), 10: 1.0, 11: 1.0, 61: 0.5, 110: 0.01, 111: 0.0},
    ),
    # after 40 steps again, over 80 of which 40 are past, then over 120
    ({**CYCLES, "num_steps": 120}, {0: 1.0, 20: 0.5, 40: 0.0, 41: 39 / 80, 60: 0.25, 80: 0.0, 90: 0.25, 120: 0.0}),
    ({**SHORT, "lr_schedule": "poly_hold", "lr_hold_steps": 20}, {10: 1.0, 30: 1.0, 70: 0.5, 110: 0.0}),
    ({**SHORT, "lr_schedule": "neox_linear"}, {0: 0.1, 1: 0.1, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
    ({**SHORT, "lr_schedule": "neox_linear", "min_lr": 0.6}, {10: 1.0, 60: 0.6, 110: 0.6}),
    # a fifth of a step of warm-up, which GPT-NeoX would begin with five times the peak
    ({**AT_ONCE, "lr_schedule": "neox_linear", "lr_warmup_ratio": 0.01, "num_steps": 20}, {0: 1.0, 10: 10 / 19.8}),
    ({**SHORT, "lr_schedule": "neox_exponential"}, {10: 1.0, 110: math.exp(-0.693)}),
    ({**SHORT, "lr_schedule": "neox2022_linear"}, {0: 0.0, 5: 0.5, 10: 1.0, 65: 0.5, 100: 20 / 110, 110: 20 / 110}),
    # megatron/learning_rates.py: constant is the peak for good after max(1, step) / warmup (in 2022 step / warmup)
    ({**SHORT, "lr_schedule": "neox_constant"}, {0: 0.1, 5: 0.5, 10: 1.0, 65: 1.0, 109: 1.0, 200: 1.0}),
    ({**SHORT, "lr_schedule": "neox2022_constant"}, {0: 0.0, 5: 0.5, 10: 1.0, 65: 1.0, 109: 1.0, 200: 1.0}),
    ({**SHORT, "lr_schedule": "neox2022_exponential"}, {65: math.exp(-0.693 / 2), 110: math.exp(-0.693 * 90 / 110)}),
    ({**AT_ONCE, "lr_schedule": "step", "lr_gamma": 0.5, "lr_step_size": 30}, {0: 1.0, 29: 1.0, 30: 0.5, 99: 0.125}),
    ({**AT_ONCE, "lr_schedule": "exponential_lr", "lr_gamma": 0.99}, {0: 1.0, 1: 0.99, 50: 0.99**50}),
]


@pytest.mark.parametrize(("flags", "rates"), VECTORS, ids=lambda value: value.get("lr_schedule", ""))
def test_a_schedule_has_the_values_of_its_formula(flags: dict[str, Any], rates: dict[int, float]) -> None:
    check(flags, rates)


def test_every_schedule_has_a_vector() -> None:
    assert {flags["lr_schedule"] for flags, _ in VECTORS} | {"fms_annealing"} == set(SCHEDULES)


def test_stable_lm_s_cosine_goes_over_into_its_inverse_square_root_without_a_jump_or_a_bend() -> None:
    checked = configure({**HYBRID, "lr_decay_steps": 10**6, "num_steps": 10**6, "use_dummy_dataset": True})
    before, there, after = (learning_rate(checked, 250_000 + step) for step in (-10, 0, 10))
    assert there == pytest.approx(0.6)
    assert after - there == pytest.approx(there - before, rel=1e-4) == pytest.approx(-0.8 * math.pi * 1e-5, rel=1e-4)


@given(totals, peaks)
def test_annealing_starts_at_the_peak_and_its_last_update_is_not_zero(total: int, peak: float) -> None:
    annealed = CONFIGURATION(num_steps=total, training_stage="annealing", learning_rate=peak)
    assert annealed.lr_schedule == "fms_annealing"
    assert learning_rate(annealed, 0) == peak
    assert learning_rate(annealed, total - 1) == pytest.approx(peak / total, rel=1e-6)
    assert fms_annealing(total, Curve(peak, total=total)) == 0.0
