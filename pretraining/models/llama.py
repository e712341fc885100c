"""One Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Plain torch modules that know no device, mesh or engine. Parameters have the names of Hugging Face's
LlamaForCausalLM, so a checkpoint of one is a checkpoint of the other.
Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, E head width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.config.training import TrainConfig
from pretraining.config.variants import ModelShape, model_shape, padded_vocabulary
from pretraining.models.ops import LossAndGradient, attention, head_loss, linear, loss_and_gradient


class Rope(NamedTuple):
    """Cosines and sines of the rotary angles, [T, E] each (or [B, T, E] where rows differ in positions), fp32."""

    cos: Tensor
    sin: Tensor


RunBlocks = Callable[[Iterable[nn.Module], Tensor, Rope, Tensor | None], Tensor]  # an engine's own loop over blocks


class Module(nn.Module):
    """nn.Module whose call is known to give a tensor."""

    __call__: Callable[..., Tensor]


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


class Linear(nn.Linear, Module):
    """A projection without bias whose weight may stay fp32 while its input is bf16 (see ops.linear)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(Module):
    """Causal self-attention; groups of H / K query heads share one key/value head (Ainslie et al. 2023)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = Linear(shape.hidden_size, self.heads * self.head_dim)
        self.k_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, shape.hidden_size)

    def forward(self, x: Tensor, rope: Rope, segments: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        # -1: an engine may run this with its rank's share of the heads
        q = self.q_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)  # [B, H, T, E]
        k = self.k_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)  # [B, K, T, E]
        v = self.v_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        y = attention(rotate(q, rope), rotate(k, rope), v, segments)  # [B, H, T, E]
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


class MLP(Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: ModelShape, norm_eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rope: Rope, segments: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, segments)  # [B, T, D]
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks and final norm, under Hugging Face's names."""

    def __init__(self, shape: ModelShape, norm_eps: float, rows: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(rows, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, norm_eps) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, norm_eps)


class Llama(Module):
    """A decoder with its output head. Parameters are not initialised: see models.init, or load a checkpoint."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.shape = model_shape(config)
        self.rope_frequencies = rope_frequencies(config, self.shape)
        rows = padded_vocabulary(config)
        self.model = Decoder(self.shape, config.norm_eps, rows)
        self.lm_head = Linear(self.shape.hidden_size, rows)

    def forward(
        self,
        tokens: Tensor,  # [B, T] integers
        positions: Tensor | None = None,  # [B, T]; None: 0 .. T-1 in every row
        segments: Tensor | None = None,  # [B, T]; tokens attend within equal ids only
        dtype: torch.dtype = torch.float32,
        run_blocks: RunBlocks | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the next token, in `dtype` (that of the activations)."""
        return self.padded_logits(tokens, positions, segments, dtype, run_blocks)[..., : self.shape.vocab_size]

    def padded_logits(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        run_blocks: RunBlocks | None = None,
    ) -> Tensor:
        """Logits with the columns of padding, which mean nothing; arguments as in `forward`."""
        return self.lm_head(self.hidden(tokens, positions, segments, dtype, run_blocks))

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        run_blocks: RunBlocks | None = None,
    ) -> Tensor:
        """What the output head sees, [B, T, D]; arguments as in `forward`."""
        x = F.embedding(tokens, self.model.embed_tokens.weight).to(dtype)  # [B, T, D]
        rope = rope_table(self.rope_frequencies, tokens, positions)
        x = (run_blocks or _in_order)(self.model.layers, x, rope, segments)
        return self.model.norm(x)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,  # [B, T]; ops.IGNORED is not trained on
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        run_blocks: RunBlocks | None = None,
        inner: LossAndGradient = loss_and_gradient,
    ) -> Tensor:
        """Summed loss of all trained positions, fp32 scalar, without all logits at once (ops.head_loss)."""
        x = self.hidden(tokens, positions, segments, dtype, run_blocks)
        return head_loss(x, self.lm_head.weight, labels, self.shape.vocab_size, inner)


def _in_order(blocks: Iterable[nn.Module], x: Tensor, rope: Rope, segments: Tensor | None) -> Tensor:
    for block in blocks:
        x = block(x, rope, segments)
    return x


def rope_frequencies(config: TrainConfig, shape: ModelShape) -> tuple[float, ...]:
    """Radians per position of each pair of channels, E / 2 of them, scaled as config.rope_scaling_type says.

    Su et al. 2021; "llama3": Llama 3.1's rule, as transformers' `_compute_llama3_parameters` computes it.
    """
    pairs = range(0, shape.head_dim, 2)
    plain = [shape.rope_theta ** (-i / shape.head_dim) for i in pairs]
    if config.rope_scaling_type == "linear":
        return tuple(f / config.rope_scaling_factor for f in plain)
    if config.rope_scaling_type == "llama3":
        return tuple(_llama3_scaled(f, config) for f in plain)
    return tuple(plain)


def _llama3_scaled(frequency: float, config: TrainConfig) -> float:
    turns = config.rope_original_max_position * frequency / (2 * math.pi)  # within the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if turns > high:
        return frequency
    if turns < low:
        return frequency / config.rope_scaling_factor
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / config.rope_scaling_factor + smooth * frequency


def rope_table(frequencies: tuple[float, ...], tokens: Tensor, positions: Tensor | None) -> Rope:
    """Cosines and sines [T, E], or [B, T, E] for given positions; channel i pairs with channel i + E / 2."""
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    rates = torch.tensor(frequencies, dtype=torch.float32, device=tokens.device)
    angles = positions.float()[..., None] * rates  # [.., T, E/2]
    angles = torch.cat((angles, angles), -1)
    return Rope(angles.cos(), angles.sin())


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary positions on x [B, heads, T, E], in fp32."""
    cos, sin = (t if t.dim() == 2 else t[:, None] for t in rope)  # [T, E] or [B, 1, T, E]
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
