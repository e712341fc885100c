"""The settings of further learning rate schedules, and the table of these: see config/schedules.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pretraining.config.declaration import Above, AtLeast, Resume
from pretraining.config.errors import ConfigError, Problem
from pretraining.config.schedules import FLOOR, SPAN, Schedule, constant
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.extensions.schedules import formulas
from pretraining.optim.checks import check_schedule_lengths

# GPT-NeoX does not round a share of the total, and Stable LM was trained with it.
_NEOX = {
    "neox_linear": formulas.neox_schedule(formulas.line),
    "neox_cosine": formulas.neox_schedule(formulas.half_cosine),
    "neox_exponential": formulas.neox_schedule(formulas.halving),
    "neox_constant": formulas.neox_schedule(formulas.flat),
    "neox2022_constant": formulas.neox2022_schedule(formulas.flat),
    "neox2022_linear": formulas.neox2022_schedule(formulas.line),
    "neox2022_cosine": formulas.neox2022_schedule(formulas.half_cosine),
    "neox2022_exponential": formulas.neox2022_schedule(formulas.halving),
}
_HYBRID = Schedule(formulas.hybrid_cosine_inv_sqrt, (*FLOOR, "lr_cooldown_steps"), rounds_warmup=False)
SCHEDULES = {
    "fms_annealing": Schedule(formulas.fms_annealing, ("lr_decay_steps",)),
    "linear_warmup_decay": Schedule(formulas.linear_warmup_decay, SPAN),
    "inverse_sqrt": Schedule(formulas.inverse_sqrt, FLOOR),
    "poly": Schedule(formulas.poly, (*FLOOR, "lr_power", "lr_cycle")),
    "warmup_hold": Schedule(constant, (*FLOOR, "lr_hold_steps")),
    "square": Schedule(formulas.square, FLOOR),
    "square_root": Schedule(formulas.square_root, FLOOR),
    "noam": Schedule(formulas.noam, FLOOR, requires=("lr_d_model",)),
    "noam_hold": Schedule(formulas.noam_hold, (*FLOOR, "lr_hold_steps", "lr_decay_rate")),
    "warmup_annealing": Schedule(formulas.warmup_annealing, FLOOR),
    "hybrid_cosine_inv_sqrt": _HYBRID,
    "deepspeed_warmup_decay": Schedule(formulas.deepspeed_warmup_decay, SPAN),
    "poly_hold": Schedule(formulas.poly_hold, (*FLOOR, "lr_power", "lr_cycle", "lr_hold_steps")),
    "step": Schedule(formulas.step_decay, requires=("lr_step_size", "lr_gamma")),
    "exponential_lr": Schedule(formulas.exponential_lr, requires=("lr_gamma",)),
    **{name: Schedule(rate, FLOOR, rounds_warmup=False) for name, rate in _NEOX.items()},
}


@dataclass(frozen=True)
class SchedulesConfig(TrainConfig):
    """A configuration whose schedule may be one of the table."""

    # ---- Optimizer and schedule
    training_stage: Annotated[Literal["initial", "annealing"], Resume.RATE] = "initial"
    """fms-fsdp's name of two schedules: "initial" is lr_schedule, "annealing" is lr_schedule=fms_annealing."""
    lr_power: Annotated[float, Above(0), Resume.RATE] = 1.0
    """Schedules of polynomials: exponent of the fraction of the steps that is left."""
    lr_cycle: Annotated[bool, Resume.RATE] = False
    """Schedules of polynomials: start again after lr_decay_steps, from a lower rate with a longer decay each time."""
    lr_cooldown_steps: Annotated[int, AtLeast(0), Resume.RATE] = 0
    """hybrid_cosine_inv_sqrt: last optimizer steps of num_steps, in which the rate falls in a straight line to 0."""
    lr_gamma: Annotated[float | None, Above(0, at_most=1), Resume.RATE] = None
    """step, exponential_lr: factor that the rate is multiplied by; required there."""
    lr_step_size: Annotated[int | None, AtLeast(1), Resume.RATE] = None
    """step: optimizer steps between two multiplications by lr_gamma; required there."""
    lr_decay_rate: Annotated[float, Above(0), Resume.RATE] = 0.5
    """noam_hold: exponent of the decay."""
    lr_d_model: Annotated[int | None, AtLeast(1), Resume.RATE] = None
    """noam: width d of the factor 1 / sqrt(d); required there."""

    def __post_init__(self) -> None:
        """See TrainConfig."""
        super().__post_init__()
        if self.training_stage == "annealing" and self.lr_schedule == "fms_cosine":
            vars(self).update(lr_schedule="fms_annealing")

    @classmethod
    def schedules(cls) -> Mapping[str, Schedule]:
        """See TrainConfig."""
        return {**super().schedules(), **SCHEDULES}


def check_cooldown(config: SchedulesConfig) -> Iterator[Problem]:
    """The cool-down begins after the warm-up."""
    total = config.lr_decay_steps or config.num_steps
    warmup = config.lr_warmup_steps or int((config.lr_warmup_ratio or 0) * total)
    if config.lr_cooldown_steps and config.lr_cooldown_steps > config.num_steps - warmup:
        remedy = f"is longer than num_steps={config.num_steps} without the warm-up of {warmup} steps"
        yield problem(config, "lr_cooldown_steps", remedy)


def check_stage(config: SchedulesConfig) -> Iterator[Problem]:
    """The two names of a schedule agree."""
    if config.training_stage == "annealing" and config.lr_schedule != "fms_annealing":
        remedy = "contradicts --training_stage=annealing, which selects fms_annealing; remove one of the two"
        yield problem(config, "lr_schedule", remedy)


def check_epochs(config: SchedulesConfig, *_: object) -> None:
    """Raise ConfigError if the schedule does not fit into the steps that num_epochs has left of num_steps."""
    if problems := [*check_schedule_lengths(config), *check_cooldown(config)]:
        reason = f"which are those of num_epochs={config.num_epochs}; lower it, or raise num_epochs or lr_decay_steps"
        raise ConfigError([Problem(subject, f"{remedy}, {reason}") for subject, remedy, _ in problems])


CHECKS = (check_cooldown, check_stage)
