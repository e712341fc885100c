"""FLOPs of a token, and the throughput and MFU that follow from the time of a step.

Pure arithmetic on the shape of a model and the kind of a device. MFU (model FLOPs utilisation, PaLM, Chowdhery et al.
2022, appendix B) counts what the model needs, never what activation checkpointing computes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pretraining.config.training import TrainConfig
from pretraining.config.variants import ModelShape, model_shape
from pretraining.extensions.devices import DeviceKind
from pretraining.extensions.projections import PROJECTIONS


class FlopsPerToken(NamedTuple):
    """Floating-point operations of a forward and backward pass per token, in two conventions."""

    full: int  # attention over the whole sequence: 6 N + 12 L d S (PaLM, nanoGPT, fms-fsdp); "mfu"
    causal: int  # only the half of it that a causal mask leaves: 6 N + 6 L d S; "mfu_causal"


def training_flops(config: TrainConfig, seq_length: int) -> FlopsPerToken:
    """Return the FLOPs of training on one token of a sequence of `seq_length`, as `config` says."""
    return flops_per_token(model_shape(config), seq_length, frozen_weights(config))


def flops_formula(config: TrainConfig) -> str:
    """Return what training_flops counts, for a report."""
    return "6N + 12LdS" + ", 4 of a frozen weight" * bool(frozen_weights(config))


@cache
def frozen_weights(config: TrainConfig) -> int:
    """Return the weights of matrix products that are not trained, such as those next to adapters."""
    if all(config.is_trained(f"model.layers.0.{name}.weight") for name in PROJECTIONS):
        return 0  # a search plans thousands of configurations, and a model on meta takes 10 to 25 ms
    from pretraining.models.init import on_meta  # imports torch

    weights = on_meta(config).named_parameters()
    frozen = {name: weight.numel() for name, weight in weights if weight.dim() > 1 and not config.is_trained(name)}
    return sum(size for name, size in frozen.items() if ".embed_" not in name or _is_head(config, name))


def _is_head(config: TrainConfig, name: str) -> bool:
    return config.tie_word_embeddings and name == "model.embed_tokens.weight"


def flops_per_token(shape: ModelShape, seq_length: int, frozen: int = 0) -> FlopsPerToken:
    """Return the FLOPs of training on one token of a sequence of `seq_length`. frozen: see frozen_weights.

    6 N: two per weight in the forward pass, four in the backward. N is every parameter except the input embeddings of
    tokens and positions, which are lookups (torchtitan and nanochat leave them out too; fms-fsdp's published figures
    leave them in, 2 % more at 7 B). The output head is in. Of a frozen weight there is no gradient, so it takes four;
    adapters are not counted.
    12 L d S: the scores and their product with the values in L layers, where d is heads x head_dim and S the sequence
    length.
    """
    weights = shape.parameters - shape.embedding_parameters + shape.vocab_size * shape.hidden_size
    attention = 12 * shape.num_layers * shape.num_attention_heads * shape.head_dim * seq_length
    products = 6 * weights - 2 * frozen
    return FlopsPerToken(products + attention, products + attention // 2)


@dataclass(frozen=True)
class Meter:
    """Throughput and MFU of a step from its time."""

    tokens_per_step: float
    devices: int
    flops: FlopsPerToken
    kind: DeviceKind | None  # None: its peak is unknown, so there is no MFU

    def speed(self, step_time: float) -> dict[str, float | None]:
        """Return the timing keys of metrics.jsonl for a step of `step_time` seconds, above 0. MFUs are shares of 1."""
        tokens = self.tokens_per_step / step_time
        return {
            "step_time": step_time,
            "tokens_per_second": tokens,
            "tokens_per_second_per_device": tokens / self.devices,
            "mfu": utilisation(tokens / self.devices, self.flops.full, self.kind),
            "mfu_causal": utilisation(tokens / self.devices, self.flops.causal, self.kind),
        }


def utilisation(tokens_per_second: float, flops: int, kind: DeviceKind | None) -> float | None:
    """Return the share of a device's peak that its tokens take, of so many FLOPs each; None if the peak is unknown."""
    return None if kind is None else tokens_per_second * flops / kind.peak_flops
