"""A model of one's own in the form in which the engines take a Llama: blocks, and what is around them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd as Dropout

from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.models.llama import BatchInputs, Llama, Rope, RunBlocks, loss_options
from pretraining.models.ops import next_token_loss
from pretraining.parallel.engine import TrainingState
from pretraining.parallel.sharding import SHARD, axes_of
from pretraining.tools.library.own_model import OwnModel


class OwnBlock(nn.Module):
    """A block of the model with the arguments of Llama's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, _: BatchInputs) -> Tensor:
        """Run the block in the dtype of x."""
        return call_in(x.dtype, self.block, x)


class BlockLoop(nn.Module):
    """In place of the list of blocks: a loop over it makes one turn, in which the engine runs all blocks."""

    run: Callable[[Tensor], Tensor]

    def __iter__(self) -> Iterator[Callable[[Tensor], Tensor]]:
        yield self.run


class OwnDecoder(nn.Module):
    """The blocks where the engines look for Llama's; the final norm is part of the rest of the model."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(OwnBlock, blocks))
        self.norm = nn.Identity()


class OwnLlama(nn.Module):
    """A model of one's own, as the engines take a Llama."""

    def __init__(self, config: TrainConfig, description: OwnModel, own: nn.Module) -> None:
        super().__init__()
        self.config = config
        # Rows of padding are Llama's: none of these parameters has as many rows as the vocabulary.
        self.shape = replace(model_shape(config), vocab_size=sys.maxsize)
        path, _, name = description.blocks.rpartition(".")
        self.model = OwnDecoder(cast(nn.ModuleList, own.get_submodule(description.blocks)))
        self.loop = BlockLoop()
        setattr(own.get_submodule(path), name, self.loop)
        self.rest = own

    def hidden(self, tokens: Tensor, inputs: BatchInputs, run_blocks: RunBlocks) -> Tensor:
        """Return the logits, [B, T, V]: what the head is, only the model knows."""
        none = torch.zeros(1, device=tokens.device)
        inputs = inputs._replace(rope=Rope(none, none))
        self.loop.run = lambda x: run_blocks(self.model.layers, x, inputs)
        logits = call_in(inputs.dtype, self.rest, tokens)
        vocabulary = model_shape(self.config).vocab_size
        if logits.dim() != 3 or logits.shape[-1] < vocabulary:
            needed = f"needs [rows, tokens, at least vocab_size={vocabulary}]"
            raise UserError(f"the logits of {type(self.rest).__name__} are {list(logits.shape)}: {needed}")
        return logits

    def loss(self, tokens: Tensor, labels: Tensor, inputs: BatchInputs, run_blocks: RunBlocks, _: Any) -> Tensor:
        """Return the summed loss of all trained positions, fp32 scalar."""
        return next_token_loss(self.hidden(tokens, inputs, run_blocks), labels, options=loss_options(self.config))


def call_in(dtype: torch.dtype, module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x) with parameters of `dtype`: copies, unless FSDP has gathered them in it."""
    weights = dict(module.named_parameters())
    if all(weight.dtype == dtype for weight in weights.values()):
        return cast(Tensor, module(x))
    return cast(Tensor, functional_call(module, {name: weight.to(dtype) for name, weight in weights.items()}, (x,)))


def as_llama(config: TrainConfig, description: OwnModel, own: nn.Module) -> Llama:
    """Return the model in the form in which the engines take a Llama. Raises ConfigError with all that prevents it."""
    if problems := [*block_problems(config, description, own), *parameter_problems(description, own)]:
        raise ConfigError(problems)
    return cast(Llama, OwnLlama(config, description, own))


def block_problems(config: TrainConfig, description: OwnModel, own: nn.Module) -> Iterator[Problem]:
    """Yield what is wrong with the modules of a model."""
    modules, expected = dict(own.named_modules()), model_shape(config).num_layers
    blocks = modules.get(description.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != expected:
        content = f"has {len(blocks)} modules" if isinstance(blocks, nn.ModuleList) else "is no nn.ModuleList"
        remedy = f"{content}; OwnModel.blocks names the list of the num_layers={expected} blocks"
        yield Problem(f"blocks={description.blocks}", remedy)
    for name, module in modules.items():
        if isinstance(module, Dropout) and module.p:
            yield Problem(name, f"its dropout of {module.p} differs from mesh to mesh; set it to 0")
    for name, _ in own.named_buffers():
        yield Problem(name, "is a buffer, which is neither placed nor saved; compute it in forward")
    for kind in description.recompute:
        if not any(isinstance(module, kind) for module in (blocks.modules() if blocks else ())):
            yield Problem(f"recompute={kind.__name__}", f"{description.blocks} has no module of this class")


def parameter_problems(description: OwnModel, own: nn.Module) -> Iterator[Problem]:
    """Yield what is wrong with the parameters of a model."""
    names: dict[nn.Parameter, str] = {}
    for name, weight in own.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(weight, name)) != name:
            yield Problem(name, f"is the parameter {other}, too; read {other} in forward instead")
            continue
        if weight.is_meta or weight.dtype != torch.float32:
            yield Problem(name, f"is {weight.dtype} on {weight.device}; build returns fp32 values in host memory")
        spec = description.find_spec(name)
        if spec is None:
            yield Problem(name, "matches no row of OwnModel.sharding; add one")
        elif len(spec) != weight.dim() or not {*sum(map(axes_of, spec), ())} <= {"tensor", *SHARD}:
            remedy = f"has {weight.dim()} dimensions, and OwnModel.sharding gives {spec}"
            yield Problem(name, f"{remedy}; give SHARD, 'tensor' or None for each of them")


def unlike_blocks(blocks: nn.ModuleList, path: str) -> Iterator[Problem]:
    """Yield a problem with each block that is not like the first one, as which the xla engine would run it."""
    first = describe_modules(blocks[0])
    for number, block in enumerate(blocks):
        if describe_modules(block) != first:
            remedy = "differs from block 0, and the xla engine runs all blocks as one; use --engine=torch"
            yield Problem(f"{path}.{number}", remedy)


def describe_modules(root: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return the class of each module by its path, its attributes, and the shapes of its parameters."""
    of_every_module = vars(nn.Module()).keys() - {"training"}
    return {
        path: (
            type(module),
            {name: describe_value(value) for name, value in vars(module).items() if name not in of_every_module},
            {name: (weight.shape, weight.requires_grad) for name, weight in module.named_parameters(recurse=False)},
        )
        for path, module in root.named_modules()
    }


def describe_value(value: object) -> str:
    """Return an attribute in words; of an array, also in a container, a hash of all values: its repr abbreviates."""
    if isinstance(value, Tensor) and not value.is_meta:
        bytes_of_values = value.detach().cpu().to_dense().contiguous().flatten().view(torch.uint8).numpy().data
        return f"{value.dtype} {list(value.shape)} {sha256(bytes_of_values).hexdigest()}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, partial):
        return f"partial {describe_value([value.func, value.args, value.keywords])}"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value)} {[describe_value(getattr(value, field.name, None)) for field in fields(value)]}"
    if isinstance(value, list | tuple):
        return f"{type(value)} {[*map(describe_value, value)]}"
    if isinstance(value, dict):
        return f"{type(value)} {[(repr(key), describe_value(each)) for key, each in value.items()]}"
    return repr(value)


def own_names(description: OwnModel, state: TrainingState) -> TrainingState:
    """Return `state` under the model's names of its parameters."""

    def commit(restart_optimizer: bool) -> None:
        state.commit(restart_optimizer=restart_optimizer)

    return TrainingState({description.own_name(name): state[name] for name in state}, commit)


def weight_decay(config: TrainConfig, description: OwnModel, name: str) -> float:
    """Return the weight decay of a parameter that the engines know as `name`."""
    is_decayed = config.norm_weight_decay or len(description.table(name)) > 1
    return (config.hyperparameters.weight_decay or 0.0) if is_decayed else 0.0
