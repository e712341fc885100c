"""Tensor parallelism of the torch engine: every rank holds its part of a matrix as a plain tensor.

Which part, the sharding table says; FSDP then splits that part along the other axis of its row. Partial sums are added
up where a row-parallel matrix ends, their gradients where a column-parallel one begins (Megatron's f and g). With
sequence_parallel they are added up and scattered over tokens, and gathered again (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from pretraining.models.dropout import Noise
from pretraining.models.linear import Linear
from pretraining.models.llama import Llama
from pretraining.models.ops import IGNORED, without_padding
from pretraining.parallel.layout import shard_dimension, tensor_dimension

COLUMN_INPUTS, ROW_PARALLEL = ("self_attn", "mlp"), ("self_attn.o_proj", "mlp.down_proj")
# Whole on every rank, and used on a rank's own heads or channels: each has a part of their gradient.
USED_IN_PARTS = (
    *("*.[qk]_norm.*", "*.[qkv]_proj.lora_A.*", "*.gate_proj.lora_A.*", "*.up_proj.lora_A.*"),
    *("*.o_proj.lora_B.*", "*.down_proj.lora_B.*"),
)
# The same with sequence_parallel: used on a rank's own tokens.
USED_ON_TOKENS = ("*.input_layernorm.*", "*.post_attention_layernorm.*", "*.o_proj.bias", "*.down_proj.bias")


def split_over_ranks(model: Llama, ranks: DeviceMesh, sequence: bool) -> None:
    """Narrow every split parameter of `model`, on the meta device, to one rank's part, and add up what is partial."""
    for name, weight in list(model.named_parameters()):
        if (dim := tensor_dimension(name)) is not None:
            module, _, short = name.rpartition(".")
            part = weight.detach().chunk(ranks.size(), dim)[0].clone()
            setattr(model.get_submodule(module), short, nn.Parameter(part, weight.requires_grad))
    group = ranks.get_group()
    enter, leave = (GATHERED, SCATTERED) if sequence else (GRADIENTS_ADDED, ADDED)
    for block in model.model.layers:
        for name in COLUMN_INPUTS:
            block.get_submodule(name).register_forward_pre_hook(
                lambda _, given: (_exchanged(given[0], group, enter), *given[1:])
            )
        for name in ROW_PARALLEL:
            projection = cast(Linear, block.get_submodule(name))
            projection.forward = partial(_added_up, projection, leave, group)  # type: ignore[method-assign]
    model.model.embed_tokens.forward = _Lookup(model.model.embed_tokens, ranks).look_up  # type: ignore[method-assign, assignment]


def own_part(whole: Tensor, name: str, shape: torch.Size, tensor: tuple[int, int], shard: tuple[int, int]) -> Tensor:
    """The part, of this shape, of `whole` that a process holds; `tensor` and `shard` are its (rank, ranks)."""
    dim = tensor_dimension(name)
    part = whole if dim is None else whole.chunk(tensor[1], dim)[tensor[0]]
    along = shard_dimension(name) if tensor[1] > 1 else 0
    extent = -(-part.shape[along] // shard[1])  # of all shards but the last, as torch.chunk cuts
    start = min(shard[0] * extent, part.shape[along])
    return part.narrow(along, start, shape[along])


def placements(name: str) -> tuple[Placement, Placement, Placement]:
    """How `name` lies on the mesh replica x tensor x shard: FSDP splits what tensor ranks have."""
    dim = tensor_dimension(name)
    return Replicate(), Replicate() if dim is None else Shard(dim), Shard(shard_dimension(name))


def add_up_parts(gradients: dict[str, Tensor], ranks: DeviceMesh, sequence: bool) -> None:
    """The gradients, in place, of what is USED_IN_PARTS, in one collective; those of a whole step, by name."""
    patterns = (*USED_IN_PARTS, *(USED_ON_TOKENS if sequence else ()))
    parts = [grad for name, grad in gradients.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if parts:
        whole = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(whole, group=ranks.get_group())
        for part, added in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(added.view_as(part))


class _Lookup:
    """An embedding whose rows are split: each rank looks up those it holds, and the parts are added up."""

    def __init__(self, embedding: nn.Embedding, ranks: DeviceMesh) -> None:
        self.embedding, self.ranks = embedding, ranks

    def look_up(self, tokens: Tensor) -> Tensor:
        """[rows, tokens] -> [rows, tokens, hidden]."""
        weight = self.embedding.weight
        rows = tokens - self.ranks.get_local_rank() * len(weight)
        elsewhere = (rows < 0) | (rows >= len(weight))
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
        return _exchanged(found, self.ranks.get_group(), ADDED)


class VocabularyParallelLoss:
    """ops.LossAndGradient where each rank has some columns of the logits: three numbers a row are communicated."""

    def __init__(self, ranks: DeviceMesh) -> None:
        self.ranks = ranks

    def __call__(
        self, logits: Tensor, labels: Tensor, vocabulary: int, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        first, group = self.ranks.get_local_rank() * logits.shape[-1], self.ranks.get_group()
        wide = without_padding(logits.float(), vocabulary - first)
        chosen = first + torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]  # [R, V / ranks]
        top = _sum(wide.amax(-1), group, "max")  # [R]
        sums = torch.stack(((wide - top[:, None]).exp().sum(-1), torch.where(chosen, wide, 0).sum(-1)))
        total, label = _sum(sums, group)
        normaliser, trained = top + total.log(), labels != IGNORED
        probability = (wide - normaliser[:, None]).exp()
        gradient = torch.where(chosen, probability - 1, probability) * trained[:, None]
        scaled = gradient if factor is None else gradient * factor
        return ((normaliser - label) * trained).sum(), scaled.to(logits.dtype)

    def input(self, x: Tensor) -> Tensor:
        """`x` as every rank multiplies it with its own rows of the head."""
        return _exchanged(x, self.ranks.get_group(), GRADIENTS_ADDED)


def own_tokens(x: Tensor, ranks: DeviceMesh) -> Tensor:
    """[B, T, D], the same on all ranks -> [B, T / ranks, D], each rank's own."""
    return _exchanged(x, ranks.get_group(), CUT)


def all_tokens(x: Tensor, ranks: DeviceMesh) -> Tensor:
    """[B, T / ranks, D] -> [B, T, D], for what is the same on all ranks from here on."""
    return _exchanged(x, ranks.get_group(), JOINED)


def _added_up(
    projection: Linear,
    leave: tuple[Between, Between],
    group: dist.ProcessGroup,
    x: Tensor,
    noise: Noise | None = None,
) -> Tensor:
    """What a row-parallel projection gives: its bias counts once."""
    return projection.biased(_exchanged(projection.product(x, noise), group, leave))


class _Exchange(torch.autograd.Function):
    """Something between ranks, and what that is for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Between, backward: Between) -> Tensor:
        ctx.group, ctx.opposite = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.opposite(grad, ctx.group), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, how: tuple[Between, Between]) -> Tensor:
    """Forward as the first of `how` says, backward as the second."""
    given: Tensor = _Exchange.apply(x, group, *how)
    return given


def _same(x: Tensor, _: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole: Tensor = funcol.wait_tensor(funcol.all_gather_tensor(x.contiguous(), 1, group))
    return whole


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    part: Tensor = funcol.wait_tensor(funcol.reduce_scatter_tensor(x.contiguous(), "sum", 1, group))
    return part


def _sum(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    added: Tensor = funcol.wait_tensor(funcol.all_reduce(x.contiguous(), operation, group))
    return added


Between = Callable[[Tensor, dist.ProcessGroup], Tensor]
ADDED = (_sum, _same)  # parts in, their sum out, whose gradient is every part's
GRADIENTS_ADDED = (_same, _sum)  # the same on all ranks, each of which makes part of its gradient
SCATTERED = (_scatter, _gather)  # parts of all tokens [B, T, D] in, the sum of a rank's own [B, T / ranks, D] out
GATHERED = (_gather, _scatter)  # a rank's own tokens in, all of them out, of whose gradient each rank makes part
CUT = (_own, _gather)  # the same on all ranks in, a rank's own tokens out
JOINED = (_gather, _own)  # a rank's own tokens in, all of them out, whose gradient is the same on all ranks
