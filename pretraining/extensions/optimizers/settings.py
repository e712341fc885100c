"""The table of optimizers besides adam and adamw: see config/optimizers.py. Imports no torch.

Defaults are torch.optim's or the named source's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.optimizers import ADAM, Hyperparameters, parse_arguments
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem

_ONE_BIT = "DeepSpeed's compressed updates after freeze_step, but devices still exchange whole gradients"
_ADAFACTOR = {"beta1": None, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "scale_parameter": True}
_ADAFACTOR |= {"relative_step": False, "warmup_init": False, "min_step": 1e-2}
_NOVOGRAD = {"beta1": 0.95, "beta2": 0.98, "eps": 1e-8, "grad_averaging": False}
_NOVOGRAD |= {"luc": False, "luc_trust": 1e-3, "luc_eps": 1e-8}

OPTIMIZERS = {
    "sgd": Hyperparameters(1e-3, 0.0, {"momentum": 0.0, "dampening": 0.0, "nesterov": False}),
    "adafactor": Hyperparameters(1e-2, 0.0, _ADAFACTOR, "at torch.optim's learning rate"),
    "lion": Hyperparameters(1e-4, 0.0, {"beta1": 0.9, "beta2": 0.99}),
    "muon": Hyperparameters(
        3e-4,
        0.1,
        {**ADAM, "momentum": 0.95, "nesterov": True, "ns_steps": 5},
        "updates the matrices of the blocks and leaves the others to AdamW",
    ),
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
    """A configuration whose optimizer may be one of the table."""

    @classmethod
    def optimizers(cls) -> Mapping[str, Hyperparameters]:
        """See TrainConfig."""
        return {**super().optimizers(), **OPTIMIZERS}

    def update_rule(self, name: str) -> Any:
        """See TrainConfig."""
        from pretraining.extensions.optimizers.rules import rule_of

        return super().update_rule(name) or rule_of(self, name)

    def own_rate(self, step: int) -> float | None:
        """See TrainConfig: Adafactor's relative step (Shazeer and Stern 2018, section 7)."""
        arguments = self.hyperparameters.arguments
        if not arguments.get("relative_step"):
            return super().own_rate(step)
        largest = 1e-6 * (step + 1) if arguments["warmup_init"] else arguments["min_step"]
        return min(largest, 1 / math.sqrt(step + 1))


def check_relative_step(config: OptimizersConfig) -> Iterator[Problem]:
    """Adafactor's relative step is a learning rate of its own."""
    arguments = {**config.optimizers()[config.optimizer].arguments, **parse_arguments(config.optimizer_args)}
    if arguments.get("warmup_init") and not arguments.get("relative_step"):
        yield Problem("--optimizer_args=warmup_init=True", "needs relative_step=True; set both or none")
    if arguments.get("relative_step") and config.learning_rate is not None:
        remedy = "contradicts adafactor's relative_step=True, which computes its own; remove one of the two"
        yield problem(config, "learning_rate", remedy)


CHECKS = (check_relative_step,)
