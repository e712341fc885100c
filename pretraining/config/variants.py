"""The variant table: the dimensions of every Llama that has a name.

Part of the configuration, not of the model, so that a head count that does not divide is reported with every other
mistake before torch is imported. Sources: Hugging Face's config.json of Llama 2 and 3, fms-fsdp's
`config_utils.py` (1.4b, 34b, 194m, 1.8b, 3.2b); tiny and mini are ours, for CPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from pretraining.config.errors import UnknownValueError

if TYPE_CHECKING:
    from pretraining.config.training import TrainConfig


GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")  # activations with a gate


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of one Llama, every one of them known."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float
    head_dim: int
    activation: str = "swiglu"
    attn_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    shared_norm: bool = False
    tie_word_embeddings: bool = False
    position_embedding_type: str = "rope"

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate next to its first matrix."""
        return self.activation in GATED

    @property
    def parameters(self) -> int:
        """Parameters, embedding and head included; a tied head counts once."""
        norm = self.hidden_size * (1 + self.norm_bias)
        block = self._attention() + self._feed_forward() + (1 if self.shared_norm else 2) * norm
        return self.num_layers * block + self.embedding_parameters + norm

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of tokens and positions and of the output head."""
        rows = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        rows += self.max_position_embeddings * (self.position_embedding_type == "learned_absolute")
        return rows * self.hidden_size

    def _attention(self) -> int:
        queries, keys = self.num_attention_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = (queries + 2 * keys) * (self.attn_bias or self.qkv_bias) + self.hidden_size * self.attn_bias
        norms = 2 * self.head_dim * (1 + self.norm_bias) * self.qk_norm
        return 2 * self.hidden_size * (queries + keys) + biases + norms

    def _feed_forward(self) -> int:
        first = (2 if self.gated else 1) * self.intermediate_size
        return self.hidden_size * (first + self.intermediate_size) + (first + self.hidden_size) * self.mlp_bias


def _shape(vocab: int, hidden: int, layers: int, heads: int, kv: int, ff: int, length: int, theta: float) -> ModelShape:
    return ModelShape(vocab, hidden, layers, heads, kv, ff, length, theta, hidden // heads)


VARIANTS: dict[str, ModelShape] = {
    #                       vocabulary hidden layers heads kv  feed-forward length theta
    "tiny":            _shape(4096,   192,   6,    6,   3,   512,   512,   1e4),
    "mini":            _shape(32000,  768,  12,   12,   4,  2048,  2048,   1e4),
    "llama2_1.4b":     _shape(32000,  2048, 24,   16,   4,  6144,  4096,   1e4),
    "llama2_7b":       _shape(32000,  4096, 32,   32,  32, 11008,  4096,   1e4),
    "llama2_13b":      _shape(32000,  5120, 40,   40,  40, 13824,  4096,   1e4),
    "llama2_34b":      _shape(32000,  8192, 48,   64,   8, 22016, 16384,   1e6),
    "llama2_70b":      _shape(32000,  8192, 80,   64,   8, 28672,  4096,   1e4),
    "llama3_194m_4k":  _shape(128256, 1024, 10,    8,   8,  2816,  4096,   5e5),
    "llama3_1.8b":     _shape(128256, 2048, 24,   16,   8,  7168,  8192,   5e5),
    "llama3_3.2b":     _shape(128256, 3072, 24,   24,   8,  8192,  8192,   5e5),
    "llama3_8b":       _shape(128256, 4096, 32,   32,   8, 14336,  8192,   5e5),
    "llama3_70b":      _shape(128256, 8192, 80,   64,   8, 28672,  8192,   5e5),
}  # fmt: skip
for _name in ("llama3_1.8b", "llama3_3.2b", "llama3_8b", "llama3_70b"):
    VARIANTS[f"{_name}_4k"] = replace(VARIANTS[_name], max_position_embeddings=4096)
for _size in ("7b", "13b", "34b", "70b"):  # fms-fsdp's first names
    VARIANTS[_size] = VARIANTS[f"llama2_{_size}"]


def padded_vocabulary(config: TrainConfig) -> int:
    """Rows of the embedding and of the head: vocab_size up to a multiple of make_vocab_size_divisible_by x
    tensor_parallel_size (Megatron's rule)."""
    multiple = config.make_vocab_size_divisible_by * config.tensor_parallel_size
    return math.ceil(model_shape(config).vocab_size / multiple) * multiple


CUSTOM = "custom"
REQUIRED_OF_CUSTOM = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "intermediate_size")


def missing_dimensions(config: TrainConfig) -> list[str]:
    """Return the dimensions that a "custom" model still needs; none for a variant of the table."""
    needed = REQUIRED_OF_CUSTOM if config.model_variant == CUSTOM else ()
    return [name for name in needed if getattr(config, name) is None]


def model_shape(config: TrainConfig) -> ModelShape:
    """Return the dimensions of the variant, replaced by those that `config` sets.

    Raises UnknownValueError if a dimension of a "custom" model is missing.
    """
    if missing := missing_dimensions(config):
        raise UnknownValueError(f"model_variant=custom needs {', '.join(missing)}")
    dimensions = {f.name: getattr(config, f.name) for f in fields(ModelShape) if getattr(config, f.name) is not None}
    if config.model_variant != CUSTOM:
        base = VARIANTS[config.model_variant]
        if "head_dim" not in dimensions and dimensions.keys() & {"hidden_size", "num_attention_heads"}:
            wide = replace(base, **dimensions)
            dimensions["head_dim"] = wide.hidden_size // wide.num_attention_heads
        return replace(base, **dimensions)
    defaults = {
        "num_kv_heads": dimensions["num_attention_heads"],
        "head_dim": dimensions["hidden_size"] // dimensions["num_attention_heads"],
        "max_position_embeddings": config.seq_length,
        "rope_theta": 1e4,
    }
    return ModelShape(**{**defaults, **dimensions})
