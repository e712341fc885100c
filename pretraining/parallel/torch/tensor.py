"""Tensor parallelism of the torch engine: every rank holds its shard of a matrix as a plain tensor.

The sharding table determines the shard; FSDP then shards it along the other axis of its row. Partial sums are
all-reduced after a row-parallel matrix, and their gradients before a column-parallel one (Megatron-LM's f and g). With
sequence_parallel they are reduce-scattered over tokens and all-gathered again (Korthikanti et al. 2022).

torch.distributed.tensor.parallel with loss_parallel does not serve instead. Measured with torch 2.9 on 2 gloo ranks (4
layers, hidden size 256, vocabulary 4096, forward and backward): 14 lines instead of about 70 and the same loss for the
plain model, in 1.26 times the step time (medians of 1235 and 983 ms). But the gradients of q_norm and k_norm are wrong
without an error (by 0.9 of their norm), adapters and a tied head raise an error, columns of padding count, and
loss_parallel needs all logits of a micro-batch, where ops.head_loss holds LOSS_ROWS rows of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pretraining.models.dropout import DropoutNoise
from pretraining.models.llama import Embedding, Linear, Llama
from pretraining.models.ops import PLAIN_LOSS, LossOptions, loss_and_gradient
from pretraining.parallel.layout import KEYS_AND_VALUES, TorchLayout

COLUMN_PARALLEL_INPUTS, ROW_PARALLEL = ("self_attn", "mlp"), ("self_attn.o_proj", "mlp.down_proj")
KEY_VALUE_PROJECTIONS = ("self_attn.k_proj", "self_attn.v_proj")
# Replicated parameters that act on a rank's heads or channels only: each rank has a partial gradient.
PARTIAL_GRADIENTS = (
    "*.[qk]_norm.*",
    "*.[qkv]_proj.lora_A.*",
    "*.gate_proj.lora_A.*",
    "*.up_proj.lora_A.*",
    "*.o_proj.lora_B.*",
    "*.down_proj.lora_B.*",
)
# With sequence_parallel also those that act on a rank's tokens only.
PARTIAL_ON_TOKENS = ("*.input_layernorm.*", "*.post_attention_layernorm.*", "*.o_proj.bias", "*.down_proj.bias")

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def shard_over_tensor_ranks(
    model: Llama, ranks: DeviceMesh, layout: TorchLayout, sequence_parallel: bool
) -> VocabularyParallelLoss:
    """Narrow every sharded parameter of `model`, on the meta device, to one rank's shard, and add the collectives.

    Returns how the loss is computed from a rank's columns of the logits.
    """
    for name, weight in list(model.named_parameters()):
        if (dim := layout.tensor_dimension(name)) is not None:
            module, _, short = name.rpartition(".")
            shard = weight.detach().chunk(ranks.size(), dim)[0].clone()
            setattr(model.get_submodule(module), short, nn.Parameter(shard, weight.requires_grad))
    group = ranks.get_group()
    enter, leave = copy_to_tensor, reduce_from_tensor
    if sequence_parallel:
        enter, leave = gather_to_tensor, reduce_scatter_to_sequence
    for block in model.model.layers:
        for name in COLUMN_PARALLEL_INPUTS:
            block.get_submodule(name).register_forward_pre_hook(lambda _, args: (enter(args[0], group), *args[1:]))
        for name in ROW_PARALLEL:
            projection = cast(Linear, block.get_submodule(name))
            projection.forward = partial(_row_parallel, projection, leave, group)  # type: ignore[method-assign]
        for name in KEY_VALUE_PROJECTIONS if layout.repeated_heads else ():
            projection = cast(Linear, block.get_submodule(name))
            heads = model.shape.num_kv_heads, heads_of_rank(model.shape.num_kv_heads, ranks)
            projection.forward = partial(_some_heads, projection, *heads)  # type: ignore[method-assign]
    embedding = model.model.embed_tokens
    embedding.forward = partial(_vocabulary_parallel_lookup, embedding, ranks)  # type: ignore[method-assign]
    # The input of every rank's rows of the head, whose partial gradients are all-reduced
    model.model.norm.register_forward_hook(lambda _, __, x: copy_to_tensor(x, group))
    return VocabularyParallelLoss(ranks)


def heads_of_rank(kv_heads: int, ranks: DeviceMesh) -> list[int]:
    """Return the key/value heads of this rank's queries, where the number of ranks does not divide that of heads.

    Heads are repeated as often as they must be to be shared out; then every head that a rank has serves as many
    queries.
    """
    repeats = ranks.size() // math.gcd(kv_heads, ranks.size())
    count = kv_heads * repeats // ranks.size()
    return [copy // repeats for copy in range(ranks.get_local_rank() * count, (ranks.get_local_rank() + 1) * count)]


def all_reduce_partial_gradients(
    gradients: dict[str, Tensor], ranks: DeviceMesh, layout: TorchLayout, sequence_parallel: bool
) -> None:
    """Sum, in place and in one collective, the gradients that are partial; `gradients` are by parameter name."""
    patterns = (*PARTIAL_GRADIENTS, *(PARTIAL_ON_TOKENS if sequence_parallel else ()))
    patterns = (*patterns, KEYS_AND_VALUES) if layout.repeated_heads else patterns
    partials = [grad for name, grad in gradients.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if partials:
        flat = torch.cat([grad.flatten() for grad in partials])
        dist.all_reduce(flat, group=ranks.get_group())
        for grad, total in zip(partials, flat.split([grad.numel() for grad in partials]), strict=True):
            grad.copy_(total.view_as(grad))


def _vocabulary_parallel_lookup(embedding: Embedding, ranks: DeviceMesh, tokens: Tensor) -> Tensor:
    """Look up tokens [B, T] -> [B, T, D] in an embedding whose rows are sharded."""
    rows = tokens - ranks.get_local_rank() * len(embedding.weight)
    is_elsewhere = (rows < 0) | (rows >= len(embedding.weight))
    embedded = Embedding.forward(embedding, rows.masked_fill(is_elsewhere, 0))
    return reduce_from_tensor(embedded.masked_fill(is_elsewhere[..., None], 0), ranks.get_group())


def _some_heads(
    projection: Linear, count: int, heads: list[int], x: Tensor, noise: DropoutNoise | None = None
) -> Tensor:
    """Project x to some of `count` heads, of which the rank has all the weights."""

    def chosen(parameter: Tensor, dim: int = 0) -> Tensor:
        parts = parameter.chunk(count, dim)
        return torch.cat([parts[head] for head in heads], dim)

    y = projection.multiply(x, chosen(projection.weight))
    if (added := projection.added(x, noise)) is not None:
        y = y + chosen(added, dim=-1)
    return projection.add_bias(y, chosen)


def _row_parallel(
    projection: Linear, leave: Collective, group: dist.ProcessGroup, x: Tensor, noise: DropoutNoise | None = None
) -> Tensor:
    """Project a shard of the input's channels; the bias is added once, after the reduction."""
    return projection.add_bias(leave(projection.product(x, noise), group))


class VocabularyParallelLoss:
    """ops.LossAndGradient for logits whose columns are sharded: three numbers per row are communicated."""

    def __init__(self, ranks: DeviceMesh) -> None:
        self.rank, self.group = ranks.get_local_rank(), ranks.get_group()

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocabulary: int,
        factor: Tensor | None = None,
        options: LossOptions = PLAIN_LOSS,
    ) -> tuple[Tensor, Tensor]:
        first = self.rank * logits.shape[-1]
        return loss_and_gradient(logits, labels, vocabulary, factor, options, first, self._combine)

    def _combine(self, logits: Tensor, label_logit: Tensor) -> tuple[Tensor, Tensor]:
        largest = _all_reduce(logits.amax(-1), self.group, "max")
        sums = torch.stack(((logits - largest[..., None]).exp().sum(-1), label_logit))
        total, label_logit = _all_reduce(sums, self.group)
        return largest + total.log(), label_logit


# ---- Collectives that autograd differentiates, named as in Megatron-LM


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.backward_collective = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_collective(grad, ctx.group), None, None, None


def _differentiable(forward: Collective, backward: Collective) -> Collective:
    """Return `forward` as a collective whose gradient is `backward`."""

    def apply(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        y: Tensor = _Differentiable.apply(x, group, forward, backward)
        return y

    return apply


def _identity(x: Tensor, _: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _local_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _waited(result: Tensor) -> Tensor:
    """Return a collective's result; in a traced graph it has been waited for, and TorchTPU refuses to wait again."""
    return result.wait() if isinstance(result, funcol.AsyncCollectiveTensor) else result


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _waited(funcol.all_gather_tensor(x.contiguous(), 1, group))


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _waited(funcol.reduce_scatter_tensor(x.contiguous(), "sum", 1, group))


def _all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    return _waited(funcol.all_reduce(x.contiguous(), operation, group))


# [B, T, D] on every rank, or a rank's tokens [B, T / ranks, D] (sequence)
copy_to_tensor = _differentiable(_identity, _all_reduce)  # replicated -> input of column-parallel matrices
reduce_from_tensor = _differentiable(_all_reduce, _identity)  # partial sums -> replicated
scatter_to_sequence = _differentiable(_local_tokens, _all_gather)  # replicated -> a rank's tokens
gather_from_sequence = _differentiable(_all_gather, _local_tokens)  # a rank's tokens -> replicated
gather_to_tensor = _differentiable(_all_gather, _reduce_scatter)  # a rank's tokens -> input of column-parallel matrices
reduce_scatter_to_sequence = _differentiable(_reduce_scatter, _all_gather)  # partial sums -> a rank's tokens
