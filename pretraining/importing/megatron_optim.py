"""The optimizer and the schedule of NeMo and NxD Training, `model.optim.*`. Formulas and defaults: NeMo 1.14."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.optimizers import OPTIMIZERS as DEFAULTS
from pretraining.importing.conversions import Conversion, implied, mapped, unchanged, unsupported
from pretraining.importing.foreign import ForeignConfig
from pretraining.importing.mappings import KeyMapping, ignore, must_be_off, only, to

# ---- optimizer

FLAT = "model.optim."
# Optimizer -> ours and, of the class that the source builds, the defaults of keys that are absent.
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {**_ADAM, "weight_decay": 0.01}),
    "fused_adam": ("adamw", {**_ADAM, "weight_decay": 0.0}),
    "distributed_fused_adam": ("adamw", {**_ADAM, "weight_decay": 0.0}),
    "adamw_fp32optstate": ("adamw_fp32", {**_ADAM, "eps": 1e-6, "weight_decay": 0.0}),
    "adam": ("adam", {**_ADAM, "weight_decay": 0.0}),
    "adamax": ("adamax", {**_ADAM, "weight_decay": 0.0}),
    "novograd": ("novograd", {"betas": [0.95, 0.98], "eps": 1e-8, "weight_decay": 0.0}),
    **{name: (name, {"weight_decay": 0.0}) for name in ("sgd", "adadelta", "adagrad", "rmsprop", "rprop", "adafactor")},
}


def _optimizer(value: Any, _: ForeignConfig) -> Conversion:
    name = str(value).lower()
    if name not in OPTIMIZERS:
        return unsupported(f"known are {', '.join(OPTIMIZERS)}")
    if name == "distributed_fused_adam":
        return implied("AdamW whose state is split", optimizer="adamw")
    ours = OPTIMIZERS[name][0]
    return (
        implied("Apex's fused Adam decays weights as AdamW does", optimizer=ours)
        if "fused" in name
        else mapped(optimizer=ours)
    )


def _of_class(name: str) -> Callable[[ForeignConfig], Any]:
    """The default of the class that model.optim.name builds; None where it has none of ours."""
    return lambda source: OPTIMIZERS.get(str(source.get(f"{FLAT}name")).lower(), ("", {}))[1].get(name)


def betas_of(ours: Callable[[ForeignConfig], str]) -> KeyMapping:
    """The two decays of Adam's kind; `ours` tells the optimizer."""

    def read(value: Any, source: ForeignConfig) -> Conversion:
        if not isinstance(value, list) or len(value) != 2:
            return unsupported("expected two numbers")
        if "beta2" not in DEFAULTS[ours(source)].arguments:
            return unsupported(f"optimizer={ours(source)} has no betas")
        return mapped(adam_beta1=value[0], adam_beta2=value[1])

    return KeyMapping(read, ("adam_beta1", "adam_beta2"), "two numbers; absent: the class's")


def _ours(source: ForeignConfig) -> str:
    return OPTIMIZERS.get(str(source.get(f"{FLAT}name")).lower(), ("adamw", {}))[0]


_ARGUMENTS = (
    *("momentum", "dampening", "nesterov", "rho", "alpha", "centered", "etas", "step_sizes", "lr_decay", "amsgrad"),
    *("initial_accumulator_value", "grad_averaging", "luc", "luc_trust", "luc_eps", "clip_threshold", "decay_rate"),
    *("scale_parameter", "relative_step", "warmup_init", "min_step", "beta1"),
)


def _arguments(_: Any, source: ForeignConfig) -> Conversion:
    """All of the optimizer's own arguments in one text: momentum=0.9,nesterov=True."""
    given = {name: source.get(FLAT + name) for name in _ARGUMENTS if source.get(FLAT + name) is not None}
    if given.pop("amsgrad", False):
        return unsupported("no optimizer here keeps the largest second moment")
    if not given:
        return unchanged("off")
    return implied("all of the optimizer's own arguments", optimizer_args=argument_text(given))


def argument_text(given: dict[str, Any]) -> str:
    """optimizer_args as a flag: name=value, comma-separated."""
    return ",".join(f"{name}={tuple(value) if isinstance(value, list) else value}" for name, value in given.items())


# ---- schedule

SCHED = "model.optim.sched."
SCHEDULES = {
    "linearannealingwithwarmup": "linear_warmup_decay",
    "cosineannealing": "cosine",
    "warmuppolicy": "constant",
    "warmupholdpolicy": "warmup_hold",
    "squareannealing": "square",
    "squarerootannealing": "square_root",
    "noamannealing": "noam",
    "noamholdannealing": "noam_hold",
    "warmupannealing": "warmup_annealing",
    "inversesquarerootannealing": "inverse_sqrt",
    "polynomialdecayannealing": "poly",
    "polynomialholddecayannealing": "poly_hold",
    "steplr": "step",
    "exponentiallr": "exponential_lr",
}


def _schedule(value: Any, _: ForeignConfig) -> Conversion:
    name = str(value).lower()
    if name == "rprop":
        return unsupported("rprop is an optimizer: NeMo cannot resolve it as a schedule either")
    if name not in SCHEDULES:
        return unsupported("known are the schedules of NeMo that follow the step, such as CosineAnnealing")
    return mapped(lr_schedule=SCHEDULES[name])


def _count(field: str) -> KeyMapping:
    """Steps of a phase; 0 is none."""

    def read(value: Any, _: ForeignConfig) -> Conversion:
        return unchanged("0: none") if value == 0 and not isinstance(value, bool) else mapped(**{field: value})

    return KeyMapping(read, (field,), "0: none")


def _share(field: str) -> KeyMapping:
    """A phase as a share of max_steps, in whole steps, rounded down as NeMo does."""

    def read(value: Any, source: ForeignConfig) -> Conversion:
        total = source.integer("trainer.max_steps", -1)
        if not isinstance(value, int | float) or not 0 <= value < 1 or total < 1:
            return unsupported("expected a share from 0 to 1 of a known max_steps")
        return implied(f"of max_steps={total}", **{field: int(value * total)})

    return KeyMapping(read, (field,), "times max_steps")


def _schedule_steps(value: Any, source: ForeignConfig) -> Conversion:
    steps = source.get("trainer.max_steps", -1)
    if steps in (-1, value):
        return mapped(lr_decay_steps=value)
    return implied(f"trainer.max_steps={steps} counts: it overrides this when training starts")


OPTIM = {
    "model.optim.name": KeyMapping(_optimizer, ("optimizer",), ", ".join(OPTIMIZERS)),
    "model.optim.lr": to("learning_rate"),
    "model.optim.weight_decay": to("weight_decay"),
    "model.optim.betas": betas_of(_ours),
    "model.optim.eps": to("optimizer_eps"),
    "model.optim.capturable": ignore("for CUDA graphs"),
    **{
        FLAT + name: ignore("how the state is split and moved")
        for name in ("bucket_cap_mb", "overlap_grad_sync", "overlap_param_sync", "contiguous_grad_buffer")
    },
    **{FLAT + name: KeyMapping(_arguments, ("optimizer_args",), "one of optimizer_args") for name in _ARGUMENTS},
    "model.optim.sched": KeyMapping(
        lambda _, __: unchanged("no schedule: the rate is constant"), (), "its keys; null: constant"
    ),
    "model.optim.sched.name": KeyMapping(_schedule, ("lr_schedule",), "absent: constant"),
    "model.optim.sched.max_steps": KeyMapping(_schedule_steps, ("lr_decay_steps",), "trainer.max_steps counts"),
    "model.optim.sched.warmup_steps": _count("lr_warmup_steps"),
    "model.optim.sched.warmup_ratio": to("lr_warmup_ratio"),
    "model.optim.sched.hold_steps": _count("lr_hold_steps"),
    "model.optim.sched.hold_ratio": _share("lr_hold_steps"),
    "model.optim.sched.constant_steps": _count("lr_constant_steps"),
    "model.optim.sched.constant_ratio": _share("lr_constant_steps"),
    "model.optim.sched.min_lr": _count("min_lr")._replace(description="lowest rate"),
    "model.optim.sched.d_model": to("lr_d_model"),
    "model.optim.sched.decay_rate": to("lr_decay_rate"),
    "model.optim.sched.power": to("lr_power"),
    "model.optim.sched.cycle": to("lr_cycle"),
    "model.optim.sched.step_size": to("lr_step_size"),
    "model.optim.sched.gamma": to("lr_gamma"),
    "model.optim.sched.last_epoch": only((-1,), "the step is the checkpoint's"),
    **{
        SCHED + name: must_be_off("the schedule follows the step alone")
        for name in ("reduce_on_plateau", "iters_per_batch", "t_max_epochs", "t_accumulate_grad_batches")
    },
    "model.optim.sched.monitor": ignore("the schedule follows the step alone"),
}

ABSENT = {
    **{FLAT + name: _of_class(name) for name in ("betas", "eps", "weight_decay")},
    "model.optim.sched.name": "WarmupPolicy",  # no schedule: the rate is constant
    "model.optim.sched.min_lr": lambda source: (
        1e-5 if str(source.get("model.optim.sched.name")).lower() == "squareannealing" else None
    ),
}


def schedule_is_indented(source: ForeignConfig) -> Iterator[Problem]:
    """A sched without keys of its own, whose keys stand beside it: NxD Training's documentation shows it so."""
    stray = [key for key in OPTIM if key.startswith(SCHED) and key.replace(SCHED, FLAT) in source.values]
    stray = [key.replace(SCHED, FLAT) for key in stray if not key.endswith(".name")]
    if "model.optim.sched" in source.values and stray:
        yield Problem("model.optim.sched=None", f"has no keys; indent {', '.join(stray)} under it, and its name")
