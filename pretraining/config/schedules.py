"""The learning-rate schedules and the settings that each of them reads besides learning_rate and num_steps.

The formulas are in optim/schedule.py; a test compares the names.
"""

from __future__ import annotations

from typing import NamedTuple


class Schedule(NamedTuple):
    """The settings of one schedule."""

    reads: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()  # has no default for them


_SPAN = ("lr_warmup_steps", "lr_warmup_ratio", "lr_decay_steps")
_FLOOR = (*_SPAN, "min_lr")

SCHEDULES = {
    "fms_cosine": Schedule(("lr_decay_steps",)),
    "fms_annealing": Schedule(("lr_decay_steps",)),
    "constant": Schedule(_FLOOR),
    "linear_warmup_decay": Schedule(_SPAN),
    "cosine": Schedule((*_FLOOR, "lr_constant_steps")),
    "wsd": Schedule((*_FLOOR, "lr_hold_steps")),
    "warmup_hold": Schedule((*_FLOOR, "lr_hold_steps")),
    "square": Schedule(_FLOOR),
    "square_root": Schedule(_FLOOR),
    "noam": Schedule(_FLOOR, requires=("lr_d_model",)),
    "noam_hold": Schedule((*_FLOOR, "lr_hold_steps", "lr_decay_rate")),
    "warmup_annealing": Schedule(_FLOOR),
    "inverse_sqrt": Schedule(_FLOOR),
    "hybrid_cosine_inv_sqrt": Schedule((*_FLOOR, "lr_cooldown_steps")),
    "deepspeed_warmup_decay": Schedule(_SPAN),
    "poly": Schedule((*_FLOOR, "lr_power", "lr_cycle")),
    "poly_hold": Schedule((*_FLOOR, "lr_power", "lr_cycle", "lr_hold_steps")),
    "step": Schedule(requires=("lr_step_size", "lr_gamma")),
    "exponential_lr": Schedule(requires=("lr_gamma",)),
    "neox_linear": Schedule(_FLOOR),
    "neox_cosine": Schedule(_FLOOR),
    "neox_exponential": Schedule(_FLOOR),
    "neox_constant": Schedule(_FLOOR),
    "neox2022_constant": Schedule(_FLOOR),
    "neox2022_linear": Schedule(_FLOOR),
    "neox2022_cosine": Schedule(_FLOOR),
    "neox2022_exponential": Schedule(_FLOOR),
}
