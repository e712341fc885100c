"""The table of optimizers besides adam and adamw: see config/optimizers.py. Imports no torch.

Defaults are torch.optim's or the named source's.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import Grammar, Resume, settings_of
from pretraining.config.errors import Problem
from pretraining.config.optimizers import ADAM, FLAGS, Hyperparameters
from pretraining.config.training import TrainConfig
from pretraining.config.validate import LEAVE_OUT, problem
from pretraining.extensions.projections import PROJECTIONS

# Argument -> the one without which it does nothing. Its default is accepted: configurations of others list everything.
_NEEDS = {"dampening": "momentum", "nesterov": "momentum", "luc_trust": "luc", "luc_eps": "luc"}
_NEEDS |= {"warmup_init": "relative_step", "min_step": "relative_step"}
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


def arguments_in_effect(text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer: its `defaults`, replaced by those of `text` that have an effect."""
    arguments = {**defaults, **parse_arguments(text)}
    return arguments | {name: defaults.get(name) for name, other in _NEEDS.items() if not arguments.get(other)}


ARGUMENTS = Grammar(parse_arguments, "name=value, comma-separated, such as momentum=0.9,nesterov=True")


@dataclass(frozen=True)
class OptimizersConfig(TrainConfig):
    """A configuration whose optimizer may be one of the table."""

    # ---- Optimizer and schedule
    optimizer_args: Annotated[str, ARGUMENTS, Resume.STATE] = ""
    """Further settings of the optimizer, comma-separated: momentum=0.9,nesterov=True. Names and defaults are in the
    table of optimizers in docs/settings.md."""

    @classmethod
    def optimizers(cls) -> Mapping[str, Hyperparameters]:
        """See TrainConfig."""
        return {**super().optimizers(), **OPTIMIZERS}

    @property
    def hyperparameters(self) -> Hyperparameters:
        """See TrainConfig."""
        chosen = super().hyperparameters
        return chosen._replace(arguments={**chosen.arguments, **parse_arguments(self.optimizer_args)})

    def accepts(self, name: str, before: object) -> bool:
        """See TrainConfig: arguments without effect may differ."""
        if name != "optimizer_args":
            return super().accepts(name, before)
        defaults = self.optimizers()[self.optimizer].arguments
        return arguments_in_effect(str(before), defaults) == arguments_in_effect(self.optimizer_args, defaults)

    @property
    def matching_settings(self) -> list[str]:
        """See TrainConfig: this setting once stood after `optimizer`, and runs keep their names."""
        names = [name for name in super().matching_settings if name != "optimizer_args"]
        place = names.index("optimizer") + 1
        return [*names[:place], "optimizer_args", *names[place:]]

    def update_rule(self, name: str) -> Any:
        """See TrainConfig."""
        from pretraining.extensions.optimizers.rules import rule_of

        return super().update_rule(name) or rule_of(self, name)

    def full_tensor_updates(self, shards: Any, parameters: Any, gradients: Any, step: Any, rate: Any) -> Any:
        """See TrainConfig."""
        from pretraining.extensions.optimizers.full_tensors import compute_on_full_tensors

        return compute_on_full_tensors(shards, parameters, gradients, step, rate)

    def own_rate(self, step: int) -> float | None:
        """See TrainConfig: Adafactor's relative step (Shazeer and Stern 2018, section 7), and rprop's first step."""
        arguments = self.hyperparameters.arguments
        if self.optimizer == "rprop":
            return self.hyperparameters.learning_rate
        if not arguments.get("relative_step"):
            return super().own_rate(step)
        largest = 1e-6 * (step + 1) if arguments["warmup_init"] else arguments["min_step"]
        return min(largest, 1 / math.sqrt(step + 1))

    @property
    def facts(self) -> dict[str, str]:
        """See TrainConfig."""
        facts, matrices = super().facts, [f"model.layers.0.{name}.weight" for name in PROJECTIONS]
        if self.optimizer == "muon" and not any(map(self.is_trained, matrices)):
            facts |= {"muon": "updates nothing: no matrix of the blocks is trained, and AdamW updates all others"}
        if self.optimizer == "rprop":
            facts |= {"schedule": "no effect on rprop, whose elements have steps of their own"}
        return facts


def check_optimizer_settings(config: OptimizersConfig) -> Iterator[Problem]:
    """The optimizer has every setting that is set, and each is set once."""
    defaults = config.optimizers()[config.optimizer]
    accepted = f"it has {', '.join(defaults.arguments)}" if defaults.arguments else "it has none"
    for name, value in parse_arguments(config.optimizer_args).items():
        subject = f"--optimizer_args={name}={value}"
        if name not in defaults.arguments:
            yield Problem(subject, f"optimizer={config.optimizer} has no {name}; {accepted}")
        elif not is_like(value, defaults.arguments[name]):
            yield Problem(subject, f"expected a value like {defaults.arguments[name]}")
        elif name in FLAGS and getattr(config, FLAGS[name]) is not None:
            other = f"{FLAGS[name]}={getattr(config, FLAGS[name])}"
            yield Problem(subject, f"has the same meaning as {other}; set only one of the two")
    for name, field in FLAGS.items():
        if getattr(config, field) is not None and not isinstance(defaults.arguments.get(name, ()), float | None):
            yield problem(config, field, f"optimizer={config.optimizer} has no {name} of one number; {accepted}")
    if config.weight_decay and defaults.weight_decay is None:
        remedy = f"optimizer={config.optimizer} has no weight decay; remove it, or use another optimizer"
        yield problem(config, "weight_decay", remedy)


def check_idle_arguments(config: OptimizersConfig) -> Iterator[Problem]:
    """No argument is without effect because of another one."""
    defaults = config.optimizers()[config.optimizer].arguments
    arguments = {**defaults, **parse_arguments(config.optimizer_args)}
    for name, other in _NEEDS.items():
        if name in defaults and arguments[name] != defaults[name] and not arguments[other]:
            remedy = f"has no effect with {other}={arguments[other]}; set {other} too, or remove {name}{LEAVE_OUT}"
            yield Problem(f"--optimizer_args={name}={arguments[name]}", remedy)


def check_relative_step(config: OptimizersConfig) -> Iterator[Problem]:
    """Adafactor's relative step is a learning rate of its own."""
    arguments = {**config.optimizers()[config.optimizer].arguments, **parse_arguments(config.optimizer_args)}
    for name, setting in settings_of(type(config)).items():
        is_rate = arguments.get("relative_step") and setting.resume is Resume.RATE
        if is_rate and getattr(config, name) != setting.default:
            remedy = "contradicts adafactor's relative_step=True, which computes its own rate; remove one of the two"
            yield problem(config, name, remedy)


CHECKS = (check_optimizer_settings, check_idle_arguments, check_relative_step)
