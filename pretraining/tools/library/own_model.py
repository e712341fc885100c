"""A model of one's own, whose parameters are not Llama's: its description, and what it changes in a configuration.

See docs/own_model.md. The engines get it as the extension of one run; the names of its parameters are its own in
sharding rules, messages and checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from pretraining.config.declaration import settings_of
from pretraining.config.errors import Problem
from pretraining.config.extension import Extension
from pretraining.config.support import TORCH, Limit
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.parallel.sharding import Row, Spec

BLOCK = "block"  # the attribute of model.layers.N that is block N of the model
# The name of a parameter in the engines, with or without the number of its block (the xla engine stacks blocks), and
# before it that of an optimizer's moment
ENGINE_NAME = re.compile(rf"(optimizer\.\w+\.)?(?:rest\.|model\.layers\.(?:(\d+)\.)?({BLOCK})\.)(.+)")
PRECISIONS = ("fp32", "mixed_bf16")
REASONS = {
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "ffn_dropout"), "it has no dropout that repeats"),
    **dict.fromkeys(("reset_position_ids", "reset_attention_mask"), "it reads tokens alone"),
    **dict.fromkeys(("context_parallel_size", "sequence_parallel"), "its attention needs all tokens of a row"),
    "pipeline_parallel_size": "it is not divided into stages",
    **dict.fromkeys(("lora_rank", "mup_base_width"), "it is known for Llama's projections alone"),
    **dict.fromkeys(("checkpoint_granularity", "checkpoint_num_layers"), "OwnModel.recompute names what is recomputed"),
    "save_attention": "its attention is its own",
    "attention_impl": "its attention is its own",
    "low_cpu_fsdp": "it is built in host memory",
    "one_program": "its step is several programs, between which FSDP2 communicates",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnModel:
    """A model of one's own: tokens [B, T] -> logits [B, T, V]."""

    build: Callable[[TrainConfig], nn.Module]
    """Return the model for a configuration, with its initial weights, in host memory and in fp32. They must not depend
    on the process: seed the generator."""
    blocks: str
    """Path of the nn.ModuleList with num_layers blocks, over which `forward` runs a loop: x = block(x)."""
    sharding: tuple[Row, ...]
    """How each parameter is sharded, by name: the first row that matches. Names have the block's number. Parameters of
    one dimension have no weight decay unless norm_weight_decay is set."""
    recompute: tuple[type[nn.Module], ...] = ()
    """Classes of modules that fsdp_activation_checkpointing recomputes in the blocks that selective_checkpointing
    chooses. Empty: the whole block."""

    def find_spec(self, name: str) -> Spec | None:
        """Return the sharding of a parameter; None if no row matches."""
        return next((row.spec for row in self.sharding if fnmatchcase(name, row.pattern)), None)

    def own_name(self, name: str) -> str:
        """Return the model's name of a parameter or moment that the engines know as `name`; other names as they are.

        Of stacked parameters, that of the first block.
        """
        if (match := ENGINE_NAME.fullmatch(name)) is None:
            return name
        moment, number, is_block, rest = match.groups()
        return (moment or "") + (f"{self.blocks}.{number or 0}.{rest}" if is_block else rest)

    def table(self, name: str, **_: Any) -> Spec:
        """Return the sharding of a parameter that the engines know as `name`. See layout.Layout."""
        spec = self.find_spec(self.own_name(name))
        assert spec is not None, f"{name} has been checked"
        return spec

    def extension(self) -> Extension:
        """Return what this model adds to a run."""
        return Extension(configuration=configuration_for(self), checks=(check_settings,))


def configuration_for(model: OwnModel) -> type[TrainConfig]:
    """Return the class of the configurations of `model`."""

    @dataclass(frozen=True)
    class OwnConfig(TrainConfig):
        """A configuration of a model of one's own."""

        def engine_class(self, name: str) -> Any:
            """See TrainConfig."""
            if name == "xla":
                from pretraining.tools.library.xla_engine import OwnXlaEngine

                return partial(OwnXlaEngine, model)
            from pretraining.tools.library.torch_engine import OwnTorchEngine

            return partial(OwnTorchEngine, model)

        def recomputed_modules(self, block: Any) -> list[str]:
            """See TrainConfig."""
            modules = block.get_submodule(BLOCK).named_modules(prefix=BLOCK)
            paths = [path for path, module in modules if isinstance(module, model.recompute)] or [BLOCK]
            return [path for path in paths if not any(path.startswith(f"{outer}.") for outer in paths)]

        @classmethod
        def limits(cls) -> tuple[Any, ...]:
            """See TrainConfig."""
            reason = "only the xla engine divides the products of a model of one's own by its sharding rules"
            return (*super().limits(), Limit("tensor_parallel_size", TORCH, reason))

    return OwnConfig


def check_settings(config: TrainConfig) -> Iterator[Problem]:
    """A model of one's own has no part in what is known for Llama alone."""
    settings = settings_of(type(config))
    for name, reason in REASONS.items():
        if name in settings and getattr(config, name) != settings[name].default:
            yield problem(config, name, f"does nothing for a model of one's own: {reason}; remove it")
    if config.precision_mode not in PRECISIONS:
        yield problem(config, "precision", f"is for Llama; a model of one's own has {' or '.join(PRECISIONS)}")
    if config.optimizer == "muon":
        yield problem(config, "optimizer", "is for the matrices of Llama's blocks; use adamw")
