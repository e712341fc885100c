"""Initial weights: each a pure function of (seed, parameter name, shape).

Every mesh and engine, and a model built on the meta device, therefore start bitwise identical. Every parameter of every
layer has its own generator, so that parameters are initialised independently and in parallel.
"""

from __future__ import annotations

import hashlib
import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.models.llama import Llama

VOCABULARIES = ("embed_tokens", "lm_head")  # [vocabulary, hidden], whose rows may be padded
RESIDUAL_OUTPUTS = ("o_proj", "down_proj")  # output_init_method: their outputs are summed over depth


def initial_weight(config: TrainConfig, name: str, shape: torch.Size) -> Tensor:
    """Return the initial fp32 value of the parameter with this Hugging Face name, on the CPU; padded rows are zero."""
    module = name.split(".")[-2]
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if module.endswith("norm"):
        return torch.ones(shape)
    generator = generator_of(config, name)
    if (added := config.initial_value(name, shape, generator)) is not None:
        return cast(Tensor, added)
    method = config.output_init_method if module in RESIDUAL_OUTPUTS else config.init_method
    used = min(shape[0], model_shape(config).vocab_size) if module in VOCABULARIES else shape[0]
    used_shape = torch.Size((used, *shape[1:]))
    weight = draw(method, used_shape, deviation(method, config, name, used_shape), generator)
    return weight if used == shape[0] else F.pad(weight, (0, 0, 0, shape[0] - used))


def draw(method: str, shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    """Return random values of this standard deviation: normal, or uniform with xavier_uniform."""
    if method == "xavier_uniform":
        return torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_(math.sqrt(3) * std)
    return torch.randn(shape, generator=generator).mul_(std)


def generator_of(config: TrainConfig, name: str) -> torch.Generator:
    """Return the generator of one parameter."""
    digest = hashlib.blake2b(f"{config.seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def deviation(method: str, config: TrainConfig, name: str, shape: torch.Size) -> float:
    """Return the standard deviation of a weight [outputs, inputs]; sources in TrainConfig.init_method."""
    model = model_shape(config)

    def of(hidden: float, outputs: float, inputs: float) -> float:
        deviations = {
            "normal": config.init_std,
            "scaled_normal": config.init_std / math.sqrt(2 * model.num_layers),
            "small_init": math.sqrt(2 / (5 * hidden)),
            "wang_init": 2 / (model.num_layers * math.sqrt(hidden)),
            **dict.fromkeys(("xavier_normal", "xavier_uniform"), math.sqrt(2 / (outputs + inputs))),
        }
        return deviations[method]

    return config.initial_deviation(name, (model.hidden_size, *shape), of)


def on_meta(config: TrainConfig) -> Llama:
    """Return the configured model on the meta device: names and shapes only."""
    with torch.device("meta"):
        return Llama(config)


def build_model(config: TrainConfig) -> Llama:
    """Return the configured model: on the meta device with low_cpu_fsdp, otherwise initialised in host memory."""
    model = on_meta(config)
    if config.low_cpu_fsdp:
        return model
    for prefix, module in model.named_modules():
        for name, meta in module.named_parameters(prefix, recurse=False):
            value = nn.Parameter(initial_weight(config, name, meta.shape), meta.requires_grad)
            setattr(module, name.rpartition(".")[2], value)
    return model
