"""The table of the core's optimizers: what each takes, and what it is set to where nothing is said.

Part of the configuration, not of the optimizers, so that a setting which one does not have is reported with all other
mistakes before torch is imported. Defaults are torch.optim's; those of adamw, and the second decay, are the usual
ones of pretraining.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple


class Hyperparameters(NamedTuple):
    """What an optimizer is set to."""

    learning_rate: float  # of the schedule's peak
    weight_decay: float | None  # None: it has no such thing
    arguments: dict[str, Any]  # by the names of its own source; beta1, beta2 and eps have flags
    note: str = ""  # for docs/settings.md
    has_fp32_state: bool = False  # whatever the dtype of the parameters


ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
OPTIMIZERS = {
    "adamw": Hyperparameters(3e-4, 0.1, ADAM),
    "adam": Hyperparameters(1e-3, 0.0, ADAM, "adds the decay to the gradient"),
}
FLAGS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "optimizer_eps"}  # argument -> its own field


def parse_arguments(text: str) -> dict[str, Any]:
    """ "momentum=0.9,etas=(0.5,1.2)" or "{'momentum': 0.9}" by name. Raises ValueError for anything else."""
    try:
        if text.lstrip().startswith("{"):
            arguments = ast.literal_eval(text)
        else:
            call = ast.parse(f"f({text})", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError(text)
            arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, TypeError) as error:
        raise ValueError(text) from error
    if not all(isinstance(name, str) for name in arguments):
        raise ValueError(text)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}


def is_like(value: Any, default: Any) -> bool:
    """Whether `value` is of the kind of `default`: a switch, a whole number, a number (or none), or as many numbers."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, tuple):
        return isinstance(value, tuple) and len(value) == len(default) and all(map(is_like, value, default))
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if isinstance(default, int) else isinstance(value, int | float)
