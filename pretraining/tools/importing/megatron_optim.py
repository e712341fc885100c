"""The optimizer and the schedule of NeMo and NxD Training, `model.optim.*`. Formulas and defaults: NeMo 1.14."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.tools.importing.conversions import (
    Conversion,
    differs,
    ignored,
    implied,
    mapped,
    unchanged,
    unsupported_value,
)
from pretraining.tools.importing.foreign import ForeignConfig, is_integer
from pretraining.tools.importing.mappings import KeyMapping, each, ignore, must_be_off, only, refuse, to
from pretraining.tools.importing.shared import betas, optimizer_arguments

# ---- optimizer

OPTIM = "model.optim."
# Optimizer -> ours and, of the class that the trainer builds, the defaults of absent keys.
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {**_ADAM, "weight_decay": 0.01}),
    "fused_adam": ("adamw", {**_ADAM, "weight_decay": 0.0}),
    "distributed_fused_adam": ("adamw", {**_ADAM, "weight_decay": 0.0}),
    "mcore_distributed_optim": ("adamw", {**_ADAM, "weight_decay": 0.01}),
    "adamw_fp32optstate": ("adamw_fp32", {**_ADAM, "eps": 1e-6, "weight_decay": 0.0}),
    "adam": ("adam", {**_ADAM, "weight_decay": 0.0}),
    "adamax": ("adamax", {**_ADAM, "weight_decay": 0.0}),
    "novograd": ("novograd", {"betas": [0.95, 0.98], "eps": 1e-8, "weight_decay": 0.0}),
    **{name: (name, {"weight_decay": 0.0}) for name in ("sgd", "adadelta", "adagrad", "rmsprop", "rprop", "adafactor")},
}


def _optimizer_of(source: ForeignConfig) -> tuple[str, dict[str, Any]]:
    """Return our optimizer and its class's defaults; AdamW for a name that is refused in its own row."""
    return OPTIMIZERS.get(str(source.get(f"{OPTIM}name")).lower(), ("adamw", {}))


def _optimizer(value: Any, _: ForeignConfig) -> Conversion:
    name = str(value).lower()
    if name not in OPTIMIZERS:
        return unsupported_value(f"known are {', '.join(OPTIMIZERS)}")
    ours = OPTIMIZERS[name][0]
    if name in ("distributed_fused_adam", "mcore_distributed_optim"):
        return implied("AdamW whose state is sharded", optimizer=ours)
    if name == "fused_adam":
        return implied("Apex's fused Adam decays weights as AdamW does", optimizer=ours)
    return mapped(optimizer=ours)


def _class_default(name: str) -> Callable[[ForeignConfig], Any]:
    """Return a function that finds the default of the class that model.optim.name builds, None if it has none."""
    return lambda source: _optimizer_of(source)[1].get(name)


_ARGUMENTS = (
    "momentum dampening nesterov rho alpha centered etas step_sizes lr_decay amsgrad initial_accumulator_value "
    "grad_averaging luc luc_trust luc_eps clip_threshold decay_rate scale_parameter relative_step warmup_init min_step "
    "beta1"
)


def _arguments(_: Any, source: ForeignConfig) -> Conversion:
    given = {name: source.get(OPTIM + name) for name in _ARGUMENTS.split() if source.get(OPTIM + name) is not None}
    if given.pop("amsgrad", False):
        return unsupported_value("no optimizer here keeps the largest second moment")
    return optimizer_arguments(given) if given else unchanged("off")


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
        return unsupported_value("rprop is an optimizer: NeMo cannot resolve it as a schedule either")
    if name not in SCHEDULES:
        return unsupported_value("known are the schedules of NeMo that follow the step, such as CosineAnnealing")
    return mapped(lr_schedule=SCHEDULES[name])


def _section(value: Any, _: ForeignConfig) -> Conversion:
    if value != {}:
        return unsupported_value("expected a section; give model.optim.sched.name")
    return unchanged("the rate is constant")


def _unless_zero(field: str) -> KeyMapping:
    """A number of steps, or a rate, of which 0 is none."""

    def convert(value: Any, _: ForeignConfig) -> Conversion:
        return unchanged("0: none") if value == 0 and not isinstance(value, bool) else mapped(**{field: value})

    return KeyMapping(convert, (field,), "0: none")


def _share(field: str) -> KeyMapping:
    """A phase as a share of max_steps, in whole steps, rounded down as NeMo does."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        total = source.steps("trainer.max_steps", -1)
        if not isinstance(value, int | float) or not 0 <= value < 1 or total < 1:
            return unsupported_value("expected a share from 0 to 1 of a known max_steps")
        return implied(f"of max_steps={total}", **{field: int(value * total)})

    return KeyMapping(convert, (field,), "times max_steps")


def _warmup(value: Any, source: ForeignConfig) -> Conversion:
    """A run may end in its warm-up; ours is part of the schedule."""
    steps = source.steps("trainer.max_steps", -1)
    is_given = source.has_flag("lr_warmup_steps", "lr_warmup_ratio")
    if not is_given and is_integer(value) and value >= steps > 0 and source.get(f"{SCHED}max_steps") is None:
        return implied(f"max_steps={steps} ends in it", lr_warmup_steps=value, lr_decay_steps=value + 1)
    return _unless_zero("lr_warmup_steps").convert(value, source)


def _constant(value: Any, source: ForeignConfig) -> Conversion:
    """Steps at min_lr at the end, which in files that were shortened are more than there are after the warm-up."""
    conversion = _unless_zero("lr_constant_steps").convert(value, source)
    steps = source.steps("trainer.max_steps", -1)
    is_given = source.has_flag("lr_warmup_steps", "lr_warmup_ratio")
    warmup = source.integer_flag("lr_warmup_steps") if is_given else source.integer(f"{SCHED}warmup_steps", 0)
    if not conversion.values or not is_integer(value) or steps < 1 or value < steps - warmup:
        return conversion
    falls = "leaves no cosine: the rate falls to min_lr after the warm-up, as in NeMo"
    if warmup < 1 or steps - warmup < 2:
        return unsupported_value(f"{falls}; give --lr_constant_steps=0, or more steps", lr_constant_steps=value)
    return implied(falls, lr_constant_steps=steps - warmup - 1)  # of a cosine of one step, whose rate is the peak


def _schedule_steps(value: Any, source: ForeignConfig) -> Conversion:
    steps = source.steps("trainer.max_steps", -1)
    if value in (steps, source.get("trainer.max_steps", -1)):
        return unchanged("as trainer.max_steps")
    if steps == -1:
        return mapped(lr_decay_steps=value)
    return implied(f"trainer.max_steps={steps} counts: it overrides this when training starts")


def _dtype(value: Any, source: ForeignConfig) -> Conversion:
    """Of the state of Apex's DistributedFusedAdam; megatron-core's optimizer has no such argument."""
    if str(source.get(f"{OPTIM}name")).lower() != "distributed_fused_adam" or str(value) in ("fp32", "float32", "32"):
        return ignored("the optimizer's state is in fp32")
    return unsupported_value("the optimizer's state is in fp32 with parameters in fp32")


def _reduction(value: Any, source: ForeignConfig) -> Conversion:
    """Of the sums of gradients: an argument of Apex's DistributedFusedAdam, too (NeMo's distributed_adam.py)."""
    if str(source.get(f"{OPTIM}name")).lower() != "distributed_fused_adam":
        return ignored("distributed_fused_adam alone reads it")
    if str(value) in ("fp32", "float32", "32"):
        return mapped(reduce_dtype="fp32")
    if str(value) not in ("bf16", "bfloat16"):
        return unsupported_value("gradients are summed in fp32 or bf16")
    note = "NeMo sums the gradients of its embeddings and of its head in fp32 all the same, this recipe in bf16"
    return differs(note, reduce_dtype="bf16")


MAPPINGS = {
    f"{OPTIM}name": KeyMapping(_optimizer, ("optimizer",), ", ".join(OPTIMIZERS)),
    f"{OPTIM}lr": to("learning_rate"),
    f"{OPTIM}weight_decay": to("weight_decay"),
    f"{OPTIM}betas": betas(lambda source: _optimizer_of(source)[0]),
    f"{OPTIM}eps": to("optimizer_eps"),
    f"{OPTIM}capturable": ignore("for CUDA graphs"),
    f"{OPTIM}correct_bias": only((True,), "the moments of Adam are corrected"),
    f"{OPTIM}maximize": must_be_off("the loss is minimized"),
    **each("foreach fused differentiable", ignore("a kernel's choice"), OPTIM),
    **each("args args.* _target_", refuse("write the optimizer's name and its arguments below model.optim"), OPTIM),
    f"{OPTIM}dtype": KeyMapping(_dtype, (), "fp32 with distributed_fused_adam, which alone reads it"),
    f"{OPTIM}grad_sync_dtype": KeyMapping(_reduction, ("reduce_dtype",), "with distributed_fused_adam"),
    **each(
        "bucket_cap_mb overlap_grad_sync overlap_param_sync contiguous_grad_buffer contiguous_param_buffer "
        "param_sync_dtype overlap_param_gather overlap_grad_reduce",
        ignore("how the state is sharded and moved"),
        OPTIM,
    ),
    **each(_ARGUMENTS, KeyMapping(_arguments, ("optimizer_args",), "one of optimizer_args"), OPTIM),
    f"{OPTIM}sched": KeyMapping(_section, (), "its keys; null: constant"),
    f"{SCHED}name": KeyMapping(_schedule, ("lr_schedule",), "absent: constant"),
    f"{SCHED}max_steps": KeyMapping(_schedule_steps, ("lr_decay_steps",), "trainer.max_steps counts"),
    f"{SCHED}warmup_steps": KeyMapping(_warmup, ("lr_warmup_steps", "lr_decay_steps"), "0: none"),
    f"{SCHED}warmup_ratio": to("lr_warmup_ratio"),
    f"{SCHED}hold_steps": _unless_zero("lr_hold_steps"),
    f"{SCHED}hold_ratio": _share("lr_hold_steps"),
    f"{SCHED}constant_steps": KeyMapping(_constant, ("lr_constant_steps",), "0: none"),
    f"{SCHED}constant_ratio": _share("lr_constant_steps"),
    f"{SCHED}min_lr": _unless_zero("min_lr"),
    f"{SCHED}d_model": to("lr_d_model"),
    f"{SCHED}decay_rate": to("lr_decay_rate"),
    f"{SCHED}power": to("lr_power"),
    f"{SCHED}cycle": to("lr_cycle"),
    f"{SCHED}step_size": to("lr_step_size"),
    f"{SCHED}gamma": to("lr_gamma"),
    f"{SCHED}last_epoch": only((-1,), "the step is the checkpoint's"),
    **each(
        "reduce_on_plateau iters_per_batch t_max_epochs t_accumulate_grad_batches",
        must_be_off("the schedule follows the step alone"),
        SCHED,
    ),
    f"{SCHED}monitor": ignore("the schedule follows the step alone"),
}


def _of_schedule(name: str, value: float) -> Callable[[ForeignConfig], float | None]:
    """Return a default that one schedule has."""
    return lambda source: value if str(source.get(f"{SCHED}name")).lower() == name else None


DEFAULTS = {
    **{OPTIM + name: _class_default(name) for name in ("betas", "eps", "weight_decay")},
    f"{SCHED}name": "WarmupPolicy",  # no schedule: the rate is constant
    f"{SCHED}min_lr": _of_schedule("squareannealing", 1e-5),
    f"{SCHED}gamma": _of_schedule("steplr", 0.1),
}


def schedule_is_indented(source: ForeignConfig) -> Iterator[Problem]:
    """Check for a `sched` without keys of its own whose keys are next to it, as in NxD Training's documentation."""
    keys = [key.replace(SCHED, OPTIM) for key in MAPPINGS if key.startswith(SCHED) and key != f"{SCHED}name"]
    stray = [key for key in keys if key in source.values]
    if f"{OPTIM}sched" in source.values and stray:
        yield Problem(f"{OPTIM}sched=None", f"has no keys; indent {', '.join(stray)} under it, and its name")
