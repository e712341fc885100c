"""The table of the core's optimizers: what each takes, and what it is set to where nothing is said.

Part of the configuration, not of the optimizers, so that a setting which one does not have is reported with all other
mistakes before torch is imported. Defaults are torch.optim's; those of adamw, and the second decay, are the usual
ones of pretraining.
"""

from __future__ import annotations

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
