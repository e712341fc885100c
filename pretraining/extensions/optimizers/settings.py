"""The table of uncommon optimizers: see config/optimizers.py. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pretraining.config.optimizers import ADAM, Hyperparameters
from pretraining.config.training import TrainConfig

_ONE_BIT = "DeepSpeed's compressed updates after freeze_step, but devices still exchange whole gradients"
_NOVOGRAD = {"beta1": 0.95, "beta2": 0.98, "eps": 1e-8, "grad_averaging": False}
_NOVOGRAD |= {"luc": False, "luc_trust": 1e-3, "luc_eps": 1e-8}

OPTIMIZERS = {
    "adamw_fp32": Hyperparameters(
        3e-4, 0.1, {**ADAM, "eps": 1e-6}, "NxD Core's, whose state is fp32", has_fp32_state=True
    ),
    "adamax": Hyperparameters(2e-3, 0.0, {**ADAM, "beta2": 0.999}),
    "adadelta": Hyperparameters(1.0, 0.0, {"rho": 0.9, "eps": 1e-6}),
    "adagrad": Hyperparameters(1e-2, 0.0, {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}),
    "rmsprop": Hyperparameters(1e-2, 0.0, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False}),
    "rprop": Hyperparameters(1e-2, None, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}),
    "novograd": Hyperparameters(1e-3, 0.0, _NOVOGRAD, "NeMo's"),
    "sm3": Hyperparameters(0.1, None, {"momentum": 0.0, "beta": 0.0, "eps": 1e-30}, "GPT-NeoX's"),
    "madgrad_wd": Hyperparameters(1e-2, 0.0, {"momentum": 0.9, "eps": 1e-6}, "GPT-NeoX's"),
    "onebit_adam": Hyperparameters(
        1e-3, 0.0, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "freeze_step": 100_000}, _ONE_BIT
    ),
}


@dataclass(frozen=True)
class OptimizersConfig(TrainConfig):
    """A configuration whose optimizer may be an uncommon one."""

    @classmethod
    def optimizers(cls) -> Mapping[str, Hyperparameters]:
        """See TrainConfig."""
        return {**super().optimizers(), **OPTIMIZERS}

    def update_rules(self) -> Mapping[str, Callable[..., Any]]:
        """See TrainConfig."""
        from pretraining.extensions.optimizers.rules import UPDATE_RULES, Rprop

        first_step = self.hyperparameters.learning_rate
        return {**super().update_rules(), **UPDATE_RULES, "rprop": partial(Rprop, first_step=first_step)}
