"""Modules whose parameters are shards: what reads a parameter gathers it, and its gradient is reduce-scattered.

The collectives are operations of the traced step, so that its compiler can overlap them with products, as in SimpleFSDP
(Zhang et al. 2024, arXiv 2411.00284). Each matrix is gathered along its rows, which needs no copy besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pretraining.models.llama import Embedding

# Columns of an embedding whose gradients exist at once: all of llama3_8b's, [128256, 4096], are 2.1 GB in fp32.
COLUMNS = 1024


class Ranks(NamedTuple):
    """The processes that share parameters, and in which dtypes they communicate."""

    shard: dist.ProcessGroup | None  # have a shard each; None: every process has all
    replica: dist.ProcessGroup | None  # have the same shard
    products: torch.dtype  # of gathered weights
    reduction: torch.dtype  # of gradients while they are summed

    def gather(self, shard: Tensor) -> Tensor:
        """Return the parameter of which this process has `shard`, in the dtype of the products."""
        shard = shard.to(self.products)
        return shard if self.shard is None else _waited(funcol.all_gather_tensor(shard, 0, self.shard))

    def scatter(self, gradient: Tensor) -> Tensor:
        """Return this process's shard of the mean of the shard ranks' gradients, in the dtype of the reduction."""
        gradient = gradient.to(self.reduction)
        if self.shard is None:
            return gradient
        return _waited(funcol.reduce_scatter_tensor(gradient, "sum", 0, self.shard)) / self.shard.size()

    def mean(self, gradient: Tensor) -> Tensor:
        """Return the mean of the replicas' gradients."""
        if self.replica is None:
            return gradient
        summed = _waited(funcol.all_reduce(gradient.to(self.reduction), "sum", self.replica))
        return (summed / self.replica.size()).to(gradient.dtype)


def _waited(result: Tensor) -> Tensor:
    """Return a collective's result; in a traced graph it has been waited for."""
    return result.wait() if isinstance(result, funcol.AsyncCollectiveTensor) else result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.dtype = ranks, shard.dtype
        gathered = ranks.gather(shard)
        return shard.view_as(shard) if gathered is shard else gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.scatter(gradient).to(ctx.dtype), None


def gathered(shard: Tensor, ranks: Ranks) -> Tensor:
    """Return the parameter of which this process has `shard`; its gradient is this process's shard of the mean."""
    whole: Tensor = _Gathered.apply(shard, ranks)
    return whole


class _LookedUp(torch.autograd.Function):
    """Rows of a gathered embedding, in fp32; see llama.Embedding. Its gradient is summed some columns at a time."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, tokens: Tensor, ranks: Ranks) -> Tensor:
        whole = ranks.gather(shard)
        ctx.save_for_backward(tokens)
        ctx.ranks, ctx.dtype, ctx.rows = ranks, shard.dtype, len(whole)
        return F.embedding(tokens, whole.float())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        sums = (
            torch.ops.aten.embedding_dense_backward(columns, tokens, ctx.rows, -1, False)
            for columns in gradient.split(COLUMNS, -1)
        )
        return torch.cat([ctx.ranks.scatter(columns).to(ctx.dtype) for columns in sums], -1), None, None


def gather_on_access(model: nn.Module, ranks: Ranks) -> None:
    """Have every module of `model`, whose parameters are shards, read the whole parameters.

    Parameters keep their names, and optimizer and checkpoints see the shards.
    """

    def shard_of(module: nn.Module, name: str) -> Tensor | None:
        shard = module._parameters[name]
        return shard.to_local() if isinstance(shard, DTensor) else shard

    def reading(name: str) -> property:
        def read(module: nn.Module) -> Tensor | None:
            shard = shard_of(module, name)
            return None if shard is None else gathered(shard, ranks)

        return property(read)

    def look_up(module: Embedding, tokens: Tensor) -> Tensor:
        found: Tensor = _LookedUp.apply(shard_of(module, "weight"), tokens, ranks)
        return found

    for module in model.modules():
        if names := list(module._parameters):
            changed: dict[str, Any] = {name: reading(name) for name in names}
            if isinstance(module, Embedding) and module.is_wide:
                changed["forward"] = look_up
            module.__class__ = type(type(module).__name__, (type(module),), changed)


@contextmanager
def replaced(model: nn.Module, shards: Mapping[str, Tensor]) -> Iterator[None]:
    """Run with `shards` in place of the parameters of these names."""
    owners = [(model.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2]) for name in shards]
    kept = [parameters[name] for parameters, name in owners]
    for (parameters, name), shard in zip(owners, shards.values(), strict=True):
        parameters[name] = shard  # type: ignore[assignment]
    try:
        yield
    finally:
        for (parameters, name), parameter in zip(owners, kept, strict=True):
            parameters[name] = parameter
