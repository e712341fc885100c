"""Splash attention in the trace of torch-xla: the lowered programs of one device's shard, run by every device.

The partitioner cannot shard a kernel. So the rows and heads of each device are taken out of its hands (manual sharding)
and given back afterwards; no device communicates. A context rank has its own queries and all keys, and returns its part
of the gradients of all keys, which the partitioner sums. Shapes as in models/chunked.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.spmd as xs
from torch import Tensor

from pretraining.extensions.splash.programs import SplashShape, lowered
from pretraining.extensions.state_bytes import shards_along
from pretraining.models.chunked import AttentionMask
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.sharding import BATCH_AXES, Spec, on_mesh

QUERIES: Spec = (BATCH_AXES, "tensor", "context", None)  # of q and y, [rows, heads, tokens, width]
KEYS: Spec = (BATCH_AXES, "tensor", None, None)  # of k and v
LOG_SUM_EXP: Spec = QUERIES[:3]
TOKENS: Spec = (BATCH_AXES, "context")  # of the segments of queries
ROWS: Spec = (BATCH_AXES, None)  # of those of keys
RANK: Spec = ("context",)

# The meshes of this process. Custom operations take tensors and numbers only, so they name a mesh by its place.
_meshes: list[tuple[Mesh, xs.Mesh, bool]] = []


class SplashAttention:
    """Causal attention of tensors sharded over a mesh. See ops.AttentionKernel."""

    def __init__(self, mesh: Mesh, xla_mesh: xs.Mesh, *, is_interpreted: bool) -> None:
        self.place = len(_meshes)
        _meshes.append((mesh, xla_mesh, is_interpreted))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Return softmax(q k^T / sqrt(E)) v: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E]."""
        assert mask.noise is None
        segments = None if mask.segments is None else mask.segments.int()
        return splash_attention(q, k, v, segments, mask.window, self.place)[0]


@torch.library.custom_op("pretraining::fused_attention", mutates_args=())
def splash_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, window: int | None, mesh: int
) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, T, E] and the log-sum-exp of every query, fp32 [B, H, T]; `segments` is int32 [B, T]."""
    inputs = _inputs(q, k, v, segments)
    y, logsumexp = _call(0, inputs, [(q.shape, QUERIES), (q.shape[:3], LOG_SUM_EXP)], window, mesh)
    return y, logsumexp


@splash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("pretraining::fused_attention_backward", mutates_args=())
def splash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    y: Tensor,
    logsumexp: Tensor,
    grad: Tensor,
    window: int | None,
    mesh: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the results of splash_attention and the gradient of the first."""
    inputs = [*_inputs(q, k, v, segments), (y, QUERIES), (logsumexp, LOG_SUM_EXP), (grad, QUERIES)]
    axes, xla_mesh, _ = _meshes[mesh]
    of_ranks = (torch.Size((axes.context, *k.shape)), (*RANK, *KEYS))
    grad_q, *grads = _call(1, inputs, [(q.shape, QUERIES), of_ranks, of_ranks], window, mesh)
    tokens = on_mesh(QUERIES, axes._asdict())  # reduce-scattered
    grad_k, grad_v = (xs.mark_sharding(grad.sum(0), xla_mesh, tokens).global_tensor for grad in grads)
    return grad_q, grad_k, grad_v


@splash_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.mesh = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = splash_attention_backward(*ctx.saved_tensors, grad, ctx.window, ctx.mesh)
    return (*gradients, None, None, None)


splash_attention.register_autograd(_differentiate, setup_context=_keep)


def _inputs(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> list[tuple[Tensor, Spec]]:
    inputs = [(q, QUERIES), (k, KEYS), (v, KEYS)]
    return inputs if segments is None else [*inputs, (segments, TOKENS), (segments, ROWS)]


def _call(
    program: int,
    inputs: Sequence[tuple[Tensor, Spec]],
    results: Sequence[tuple[torch.Size, Spec]],
    window: int | None,
    place: int,
) -> list[Tensor]:
    """Run a program (0: forward, 1: backward) on every device's shards; `results` are global shapes."""
    mesh, xla_mesh, is_interpreted = _meshes[place]
    axes = mesh._asdict()
    (q, _), (k, _), *_ = inputs
    rows, heads = (shards_along(axis, axes) for axis in QUERIES[:2])
    assert q.shape[0] % rows == q.shape[1] % heads == k.shape[1] % heads == 0, (q.shape, k.shape, mesh)
    shape = SplashShape(
        rows=q.shape[0] // rows,
        heads=q.shape[1] // heads,
        kv_heads=k.shape[1] // heads,
        length=q.shape[2],
        width=q.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        window=window,
        has_segments=any(spec == TOKENS for _, spec in inputs),
        is_interpreted=is_interpreted,
        context=mesh.context,
    )
    ranks = torch.arange(mesh.context, dtype=torch.int32, device=q.device)
    local = [
        # A copy, because marking changes the tensor itself
        xs.enable_manual_sharding(tensor.clone(), on_mesh(spec, axes), mesh=xla_mesh).global_tensor
        for tensor, spec in [(ranks, RANK), *inputs]
    ]
    outputs = torch_xla._XLAC._xla_user_computation("xla::splash_attention", local, _computations(shape)[program])
    return [
        xs.disable_manual_sharding(output, on_mesh(spec, axes), size, mesh=xla_mesh).global_tensor
        for output, (size, spec) in zip(outputs, results, strict=True)
    ]


@functools.cache
def _computations(shape: SplashShape) -> tuple[Any, Any]:
    forward, backward = lowered(shape)
    load = xb.computation_from_module_proto
    return load("splash_forward", forward), load("splash_backward", backward)
