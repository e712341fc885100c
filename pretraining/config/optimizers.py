"""The optimizer table: what each takes, and what it is set to where nothing is said.

Part of the configuration, not of the optimizers, so that a setting which one does not have is reported with all other
mistakes before torch is imported. Defaults are torch.optim's or the named source's; those of adamw, and the
second decay of Adam's kind, are the usual ones of pretraining.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pretraining.config.training import TrainConfig


class Hyperparameters(NamedTuple):
    """What an optimizer is set to."""

    learning_rate: float  # of the schedule's peak
    weight_decay: float | None  # None: it has no such thing
    arguments: dict[str, Any]  # by the names of its own source; beta1, beta2 and eps have flags


_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
# NeMo's
_NOVOGRAD = {"beta1": 0.95, "beta2": 0.98, "eps": 1e-8, "grad_averaging": False}
_NOVOGRAD |= {"luc": False, "luc_trust": 1e-3, "luc_eps": 1e-8}
_ADAFACTOR = {"beta1": None, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "scale_parameter": True}
_ADAFACTOR |= {"relative_step": False, "warmup_init": False, "min_step": 1e-2}

OPTIMIZERS = {
    "adamw": Hyperparameters(3e-4, 0.1, _ADAM),
    "adamw_fp32": Hyperparameters(3e-4, 0.1, {**_ADAM, "eps": 1e-6}),  # NxD Core
    "adam": Hyperparameters(1e-3, 0.0, _ADAM),
    "adamax": Hyperparameters(2e-3, 0.0, {**_ADAM, "beta2": 0.999}),
    "adadelta": Hyperparameters(1.0, 0.0, {"rho": 0.9, "eps": 1e-6}),
    "adagrad": Hyperparameters(1e-2, 0.0, {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}),
    "rmsprop": Hyperparameters(1e-2, 0.0, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False}),
    "rprop": Hyperparameters(1e-2, None, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}),
    "sgd": Hyperparameters(1e-3, 0.0, {"momentum": 0.0, "dampening": 0.0, "nesterov": False}),
    "novograd": Hyperparameters(1e-3, 0.0, _NOVOGRAD),
    "adafactor": Hyperparameters(1e-2, 0.0, _ADAFACTOR),  # at torch.optim's learning rate
    "sm3": Hyperparameters(0.1, None, {"momentum": 0.0, "beta": 0.0, "eps": 1e-30}),  # GPT-NeoX
    "madgrad_wd": Hyperparameters(1e-2, 0.0, {"momentum": 0.9, "eps": 1e-6}),  # GPT-NeoX
    "lion": Hyperparameters(1e-4, 0.0, {"beta1": 0.9, "beta2": 0.99}),
    # DeepSpeed
    "onebit_adam": Hyperparameters(1e-3, 0.0, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "freeze_step": 100_000}),
    "muon": Hyperparameters(3e-4, 0.1, {**_ADAM, "momentum": 0.95, "nesterov": True, "ns_steps": 5}),
}
FLAGS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "optimizer_eps"}  # argument -> its own field


def hyperparameters(config: TrainConfig) -> Hyperparameters:
    """The defaults of `config`'s optimizer with everything that is given laid over them."""
    rate, decay, arguments = OPTIMIZERS[config.optimizer]
    flags = {name: getattr(config, field) for name, field in FLAGS.items() if getattr(config, field) is not None}
    return Hyperparameters(
        rate if config.learning_rate is None else config.learning_rate,
        decay if config.weight_decay is None else config.weight_decay,
        {**arguments, **flags, **parse_arguments(config.optimizer_args)},
    )


def parse_arguments(text: str) -> dict[str, Any]:
    """ "momentum=0.9,etas=(0.5,1.2)" or "{'momentum': 0.9}" by name. Raises ValueError for anything else."""
    try:
        if text.lstrip().startswith("{"):
            given = ast.literal_eval(text)
        else:
            call = ast.parse(f"f({text})", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError(text)
            given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, TypeError) as error:
        raise ValueError(text) from error
    if not all(isinstance(name, str) for name in given):
        raise ValueError(text)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def is_like(value: Any, default: Any) -> bool:
    """Whether `value` is of the kind of `default`: a switch, a whole number, a number (or none), or as many numbers."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, tuple):
        return isinstance(value, tuple) and len(value) == len(default) and all(map(is_like, value, default))
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if isinstance(default, int) else isinstance(value, int | float)
