"""Rules across the settings of adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.grammar import comma_separated
from pretraining.config.validate import problem
from pretraining.config.variants import model_shape
from pretraining.extensions.lora.settings import LoraConfig
from pretraining.extensions.lora.targets import (
    USUAL,
    adapted,
    is_expression,
    is_saved,
    matches,
    modules,
    projections,
)


def check_adapters(config: LoraConfig) -> Iterator[Problem]:
    """The modules that LoRA names exist."""
    if not config.lora_rank:
        return
    yield from _check_targets(config)
    for word in comma_separated(config.lora_modules_to_save):
        if not any(is_saved(module, word) for module in modules(config)):
            remedy = f"contains {word}, which ends the name of no module; the modules are {', '.join(modules(config))}"
            yield problem(config, "lora_modules_to_save", remedy)


def _check_targets(config: LoraConfig) -> Iterator[Problem]:
    """Every word of lora_target_modules names projections, the same in all layers, that are not trained in full."""
    wanted, known = config.lora_target_modules or USUAL, projections(config)
    layers = range(model_shape(config).num_layers if is_expression(wanted) or "layers." in wanted else 1)
    try:
        targets = adapted(config)
        idle = [
            word
            for word in ([wanted] if is_expression(wanted) else comma_separated(wanted))
            if not any(matches(name, word, layer) for layer in layers for name in known)
        ]
    except re.error as error:
        yield problem(config, "lora_target_modules", f"is not a valid regular expression: {error}")
        return
    if idle:
        remedy = f"contains {', '.join(idle)}, which matches no projection; the projections are "
        remedy += ", ".join(name.rpartition(".")[2] for name in known)
        yield problem(config, "lora_target_modules", remedy)
    for name in targets:
        if is_saved(f"model.layers.0.{name}", config.lora_modules_to_save):
            remedy = f"names {name}, which has an adapter; leave it out here or in --lora_target_modules"
            yield problem(config, "lora_modules_to_save", remedy)
    other = (layer for layer in layers if [name for name in known if matches(name, wanted, layer)] != targets)
    if not idle and (layer := next(other, None)) is not None:
        remedy = f"means other projections in layer {layer} than in layer 0; an adapter has the same in all layers"
        yield problem(config, "lora_target_modules", remedy)


CHECKS = (check_adapters,)
