"""One Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Plain torch modules that know no device, mesh or engine. Parameters have the names of Hugging Face's
LlamaForCausalLM, so a checkpoint of one is a checkpoint of the other.
Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, E head width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.config.training import TrainConfig
from pretraining.config.variants import ModelShape, model_shape, padded_vocabulary
from pretraining.models.chunked import AttentionMask
from pretraining.models.dropout import (
    ATTENTION_OUTPUT,
    ATTENTION_WEIGHTS,
    EMBEDDING,
    MLP_ACTIVATION,
    MLP_OUTPUT,
    DropoutNoise,
    dropout,
)
from pretraining.models.ops import (
    Kernel,
    LossAndGradient,
    LossOptions,
    attention,
    head_loss,
    linear,
    loss_and_gradient,
    softcapped,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from pretraining.models.ops import Mask


class Rope(NamedTuple):
    """Cosines and sines of the angles of R pairs of channels, [T, R] each (or [B, T, R] for given positions), fp32."""

    cos: Tensor
    sin: Tensor


class BatchInputs(NamedTuple):
    """What the model reads of a micro-batch besides its tokens."""

    positions: Tensor | None = None  # [B, T], or [T] of every row; None: 0 .. T-1
    # [B, T]: tokens attend within equal ids only; or what an engine made of the segments and the window for its kernel
    segments: Tensor | BlockMask | tuple[BlockMask, ...] | None = None
    noise: DropoutNoise | None = None  # None: no dropout
    dtype: torch.dtype = torch.float32  # of the residual stream
    rope: Rope | None = None  # Llama.hidden computes it from the positions
    kernel: Kernel = "repeated"  # of causal attention

    def next_block(self, count: int = 1) -> BatchInputs:
        """Return the inputs of the block `count` blocks further, which differ in their dropout noise."""
        return self if self.noise is None else self._replace(noise=self.noise.next_block(count))


NO_INPUTS = BatchInputs()

# An engine's own loop over the blocks, [B, T, D] -> [B, T, D]
RunBlocks = Callable[[Iterable[nn.Module], Tensor, BatchInputs], Tensor]


class Module(nn.Module):
    """nn.Module whose call is typed to return a tensor."""

    __call__: Callable[..., Tensor]


class Linear(nn.Linear, Module):
    """A projection whose weight may stay fp32 while its input is bf16 (see ops.linear)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.multiply = linear  # of x and the weight

    def reset_parameters(self) -> None:
        """Leave the weight as it is: init.py sets it, and on meta nn.Linear's own imports sympy (0.6 CPU s)."""

    def forward(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Project x; `noise` decides what `added` drops."""
        return self.add_bias(self.product(x, noise))

    def product(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Project x without adding the bias: the products of shards of x sum up to the product of x."""
        product, added = self.multiply(x, self.weight), self.added(x, noise)
        return product if added is None else product + added

    def added(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor | None:
        """Return what a subclass adds to the product of the weight; None: nothing."""
        return None

    def add_bias(self, y: Tensor, arranged: Callable[[Tensor], Tensor] = lambda vector: vector) -> Tensor:
        """Add the bias to a product, if there is one; in fp32, as in RMSNorm. arranged: returns it as y has it."""
        return y if self.bias is None else (y.float() + arranged(self.bias.float())).to(y.dtype)


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich 2019), times `factor`."""

    def __init__(self, width: int, eps: float, result: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.factor, self.result = eps, 1.0, result  # dtype of the result, None: the input's

    def forward(self, x: Tensor, arranged: Callable[[Tensor], Tensor] = lambda vector: vector) -> Tensor:
        normed = self.normed(x)
        # XLA sums the gradients of tokens in the dtype of the product: of 8192 equal ones, bf16 lost a third.
        return (normed.float() * arranged(self.weight.float())).to(normed.dtype)

    def normed(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps), times `factor`."""
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        scale = scale if self.factor == 1 else scale * self.factor
        return (x_fp32 * scale).to(self.result or x.dtype)


class LayerNorm(Module):
    """((x - mean(x)) / sqrt(var(x) + eps) * weight + bias) * factor, computed in fp32 (Ba et al. 2016)."""

    def __init__(self, width: int, eps: float, bias: bool, result: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.eps, self.factor, self.result = eps, 1.0, result  # as RMSNorm's

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        y = F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), bias, self.eps)
        y = y if self.factor == 1 else y * self.factor
        return y.to(self.result or x.dtype)


def norm_of(config: TrainConfig, width: int) -> Module:
    """Return the configured norm."""
    # With autocast only the inputs of matrix products are bf16, and all of these come from a norm.
    result = torch.bfloat16 if config.precision == "autocast" else None
    if config.norm_type == "layernorm":
        return LayerNorm(width, config.norm_eps, config.norm_bias, result)
    return RMSNorm(width, config.norm_eps, result)


class Attention(Module):
    """Causal self-attention; groups of H / K query heads share one key/value head (Ainslie et al. 2023)."""

    def __init__(self, config: TrainConfig, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_kv_heads, shape.head_dim
        bias, hidden = config.attn_bias or config.qkv_bias, shape.hidden_size
        self.q_proj = Linear(hidden, self.heads * self.head_dim, bias)
        self.k_proj = Linear(hidden, self.kv_heads * self.head_dim, bias)
        self.v_proj = Linear(hidden, self.kv_heads * self.head_dim, bias)
        self.o_proj = Linear(self.heads * self.head_dim, hidden, config.attn_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (norm_of(config, self.head_dim) for _ in range(2))
        self.normed, self.rotated = config.qk_norm, config.position_embedding_type == "rope"
        self.window, self.dropout = config.sliding_window, config.attention_dropout
        self.query_scale = 1.0  # factor of the queries, besides 1 / sqrt(E)

    def forward(self, x: Tensor, inputs: BatchInputs) -> Tensor:
        rows, length, _ = x.shape
        noise = inputs.noise
        # -1: a tensor rank computes its shard of the heads
        q = self.q_proj(x, noise).view(rows, length, -1, self.head_dim)  # [B, T, H, E]
        k = self.k_proj(x, noise).view(rows, length, -1, self.head_dim)  # [B, T, K, E]
        v = self.v_proj(x, noise).view(rows, length, -1, self.head_dim)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.query_scale != 1:
            q = q * self.query_scale
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, E], [B, K, T, E] twice
        if self.rotated:
            assert inputs.rope is not None
            q, k = rotate(q, inputs.rope), rotate(k, inputs.rope)
        y = attention(q, k, v, self._mask(inputs), inputs.kernel)  # [B, H, T, E]
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1), noise)

    def _mask(self, inputs: BatchInputs) -> Mask:
        if inputs.segments is not None and not isinstance(inputs.segments, Tensor):
            return inputs.segments
        mask, noise = AttentionMask(inputs.segments, self.window), inputs.noise
        if noise is None or not self.dropout:
            return mask
        hashes = noise.site_hash(ATTENTION_WEIGHTS)
        return mask._replace(noise=hashes, dropout=self.dropout, tensor_rank=noise.tensor_rank)


def _squared_relu(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("swiglu", "silu"), F.silu),
    **dict.fromkeys(("geglu", "gelu"), F.gelu),
    **dict.fromkeys(("reglu", "relu"), F.relu),
    **dict.fromkeys(("geglu_tanh", "gelu_tanh"), partial(F.gelu, approximate="tanh")),
    "squared_relu": _squared_relu,
}


class Activation(Module):
    """act(gate) * up, or act(up) where there is no gate."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.function(up) if gate is None else self.function(gate) * up


class MLP(Module):
    """down(act(gate(x)) * up(x)) where the activation is gated (Shazeer 2020), otherwise down(act(up(x)))."""

    def __init__(self, config: TrainConfig, shape: ModelShape) -> None:
        super().__init__()
        hidden, width, bias = shape.hidden_size, shape.intermediate_size, config.mlp_bias
        if shape.gated:
            self.gate_proj = Linear(hidden, width, bias)
        self.up_proj = Linear(hidden, width, bias)
        self.down_proj = Linear(width, hidden, bias)
        self.gated, self.act_fn = shape.gated, Activation(config.activation)
        self.dropout = config.ffn_dropout

    def forward(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        gate = self.gate_proj(x, noise) if self.gated else None
        active = self.act_fn(self.up_proj(x, noise), gate)  # [B, T, F]
        return self.down_proj(dropout(active, self.dropout, noise, MLP_ACTIVATION, is_sharded=True), noise)


class Block(Module):
    """One pre-norm transformer block."""

    def __init__(self, config: TrainConfig, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config, shape.hidden_size)
        self.self_attn = Attention(config, shape)
        if not config.shared_norm:
            self.post_attention_layernorm = norm_of(config, shape.hidden_size)
        self.mlp = MLP(config, shape)
        self.parallel, self.shares_norm = config.parallel_residual, config.shared_norm
        self.dropout = config.hidden_dropout

    def forward(self, x: Tensor, inputs: BatchInputs) -> Tensor:
        noise = inputs.noise
        normed = self.input_layernorm(x)
        attended = x + dropout(self.self_attn(normed, inputs), self.dropout, noise, ATTENTION_OUTPUT)  # [B, T, D]
        if not self.shares_norm:
            normed = self.post_attention_layernorm(x if self.parallel else attended)
        mlp_output = self.mlp(normed, noise)
        return attended + dropout(mlp_output, self.dropout, noise, MLP_OUTPUT)


class Embedding(nn.Embedding, Module):
    """A vector for each token, or for each position. is_wide: looked up in fp32.

    Most devices sum the gradients of a token's occurrences in the dtype of the lookup: of 1024 equal ones, bf16 counts
    256.
    """

    is_wide = True

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight.float() if self.is_wide else self.weight)


class Decoder(nn.Module):
    """Embedding, blocks and final norm, under Hugging Face's names."""

    def __init__(self, config: TrainConfig, shape: ModelShape, rows: int) -> None:
        super().__init__()
        # from_pretrained: nn.Embedding's own initialization loads 864 modules of torch on the meta device, 1.1 s.
        tokens = torch.empty(rows, shape.hidden_size)
        self.embed_tokens: Embedding = Embedding.from_pretrained(tokens, freeze=False)
        if config.position_embedding_type == "learned_absolute":
            positions = torch.empty(shape.max_position_embeddings, shape.hidden_size)
            self.embed_positions: Embedding = Embedding.from_pretrained(positions, freeze=False)
        self.layers = nn.ModuleList(Block(config, shape) for _ in range(shape.num_layers))
        self.norm = norm_of(config, shape.hidden_size)
        self.positioned, self.dropout = config.position_embedding_type == "learned_absolute", config.hidden_dropout
        self.scale = math.sqrt(shape.hidden_size) if config.scale_embeddings else 1.0  # of embeddings

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """[B, T] -> [B, T, D], fp32."""
        x = self.embed_tokens(tokens)
        if self.positioned:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.embed_positions(positions)
        return x if self.scale == 1 else x * self.scale


class Head(Linear):
    """The output head with a weight of its own."""

    def loss(self, x: Tensor, labels: Tensor, vocabulary: int, chunk_loss: LossAndGradient) -> Tensor:
        """See ops.head_loss."""
        return head_loss(x, self.weight, labels, vocabulary, chunk_loss)


class TiedHead(Module):
    """The output head where it is the embedding: no weight of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list, so that its weight is not named twice

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def loss(self, x: Tensor, labels: Tensor, vocabulary: int, chunk_loss: LossAndGradient) -> Tensor:
        """See ops.head_loss."""
        return head_loss(x, self.weight, labels, vocabulary, chunk_loss)


class Llama(Module):
    """A decoder with its output head. Parameters are not initialised: see models.init, or load a checkpoint."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.shape = model_shape(config)
        self.rope_frequencies = rope_frequencies(config, self.shape)
        self.logit_softcap = config.logit_softcap
        rows = padded_vocabulary(config)
        self.model = Decoder(config, self.shape, rows)
        tied = config.tie_word_embeddings
        self.lm_head = TiedHead(self.model.embed_tokens) if tied else Head(self.shape.hidden_size, rows)
        config.extend_model(self)

    def forward(self, tokens: Tensor, inputs: BatchInputs = NO_INPUTS) -> Tensor:
        """Return the logits [B, T, V] of the next token, in inputs.dtype; tokens are integers [B, T]."""
        logits = self.lm_head(self.hidden(tokens, inputs))[..., : self.shape.vocab_size]
        return softcapped(logits, self.logit_softcap)

    def hidden(self, tokens: Tensor, inputs: BatchInputs = NO_INPUTS, run_blocks: RunBlocks | None = None) -> Tensor:
        """Return the input of the output head, [B, T, D]."""
        x = self.embed(tokens, inputs)
        x = (run_blocks or run_in_order)(self.model.layers, x, self.with_rope(tokens, inputs))
        return self.model.norm(x)

    def embed(self, tokens: Tensor, inputs: BatchInputs) -> Tensor:
        """Return the input of the first block, [B, T, D]."""
        embedded = self.model.embed(tokens, inputs.positions).to(inputs.dtype)
        return dropout(embedded, self.model.dropout, inputs.noise, EMBEDDING)

    def with_rope(self, tokens: Tensor, inputs: BatchInputs) -> BatchInputs:
        """Return `inputs` as the blocks read them; of `tokens`, or of any tensor [B, T], the shape counts."""
        return inputs._replace(rope=rope_table(self.rope_frequencies, tokens, inputs.positions))

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,  # [B, T]; ops.IGNORED is not trained on
        inputs: BatchInputs = NO_INPUTS,
        run_blocks: RunBlocks | None = None,
        chunk_loss: LossAndGradient = loss_and_gradient,
    ) -> Tensor:
        """Return the summed loss of all trained positions, fp32 scalar, without all logits at once (ops.head_loss)."""
        return self.loss_of_hidden(self.hidden(tokens, inputs, run_blocks), labels, chunk_loss)

    def loss_of_hidden(self, x: Tensor, labels: Tensor, chunk_loss: LossAndGradient = loss_and_gradient) -> Tensor:
        """Return `loss`, given the input of the output head."""
        return self.lm_head.loss(x, labels, self.shape.vocab_size, chunk_loss)


def loss_options(config: TrainConfig) -> LossOptions:
    """Return the options of the training loss, or without gradients those of an evaluation."""
    return LossOptions(config.z_loss if torch.is_grad_enabled() else 0.0, config.logit_softcap)


def run_in_order(blocks: Iterable[nn.Module], x: Tensor, inputs: BatchInputs) -> Tensor:
    """Run consecutive blocks, [B, T, D] -> [B, T, D]; `inputs` are those of the first. See RunBlocks."""
    for block in blocks:
        x = block(x, inputs)
        inputs = inputs.next_block()
    return x


def rope_frequencies(config: TrainConfig, shape: ModelShape) -> tuple[float, ...]:
    """Radians per position of each pair of rotated channels, scaled as config.rope_scaling_type says.

    There are E / 2 pairs, or fewer with rotary_percentage.

    Su et al. 2021; "llama3": Llama 3.1's rule, as transformers' `_compute_llama3_parameters` computes it.
    """
    width = int(shape.head_dim * config.rotary_percentage) // 2 * 2  # channels that are rotated
    plain = [shape.rope_theta ** (-i / width) for i in range(0, width, 2)]
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
    """Cosines and sines of the angles of R pairs of channels, [T, R], or [B, T, R] for given positions."""
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    # A copy to a GPU waits for all that the GPU has been given, unless it is told not to.
    rates = torch.tensor(frequencies, dtype=torch.float32).to(tokens.device, non_blocking=True)
    angles = positions.float()[..., None] * rates  # [.., T, R]
    return Rope(angles.cos(), angles.sin())


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary positions on x [B, heads, T, E], in fp32: channel i pairs with i + R, and those from 2 R on stay."""
    cos, sin = (t if t.dim() == 2 else t[:, None] for t in rope)  # [T, R] or [B, 1, T, R]
    pairs = cos.shape[-1]
    first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), -1)
    first, second = first.float(), second.float()
    rotated = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    return torch.cat((*rotated, rest), -1)
