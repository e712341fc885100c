"""Lower splash attention for the shard of one device, without a TPU.

    python -m pretraining.extensions.splash.lowering FOLDER < shape.json

reads a programs.SplashShape, and writes two programs (XLA's HloModuleProto) to FOLDER:
forward.pb: rank [1], q [B, H, T, E], k and v [B, K, S, E] (and the segments of queries [B, T] and of keys [B, S])
    -> y [B, H, T, E], log-sum-exp [B, H, T]
backward.pb: those arguments, y, log-sum-exp and the gradient of y -> the gradients of q, k and v; those of k and v
    [1, B, K, S, E] are of these queries only.
The queries are those of one of S / T context ranks, and the keys those of rank 0, rank 1, ... (mesh.chunks_by_rank).
Rank and segments are int32, the log-sum-exp is fp32. A window and a length are part of the program.

Runs in a process of its own, because torch-xla and jax each claim the devices of their process. Works with the version
of jax in requirements/tpu-aot.txt: the backward pass is no public function of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # no search for a TPU

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pretraining.extensions.splash.programs import SplashShape
from pretraining.parallel.mesh import chunks_by_rank, token_order

jax.config.update("jax_use_shardy_partitioner", False)  # GSPMD, as torch-xla uses it
# No paths of this machine in the programs: every host of a run must make the same ones.
jax.config.update("jax_include_full_tracebacks_in_locations", False)
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
# Without it, jax writes a newer version of the kernel's format than libtpu of the same age reads: it sees no libtpu.
FOR_EXPORT = mlir.LoweringParameters(for_export=True)

# Queries, and keys, that are in the fast memory of a core at a time; keys of one product
BLOCK, COMPUTED, LANES = 1024, 512, 128
# Id of the tokens that fill a row: none of the data's
PADDING = -1

Program = Callable[..., tuple[jax.Array, ...]]
Kernel = Any  # kernels.SplashAttentionKernel, which has no types


def padded_length(length: int) -> int:
    """Return `length` rounded up to whole blocks."""
    unit = LANES if length <= COMPUTED else COMPUTED
    return -(-length // unit) * unit


def block_of(length: int) -> int:
    """Return the size of the blocks of a padded length."""
    return BLOCK if length % BLOCK == 0 else min(length, COMPUTED)


def kernel_of_all_ranks(shape: SplashShape) -> Kernel:
    """Return the kernel for the queries of all context ranks, each rank's padded to whole blocks."""
    queries, keys = padded_length(shape.length // shape.context), padded_length(shape.length)
    block_q, block_kv = block_of(queries), block_of(keys)
    sizes = kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=min(block_kv, COMPUTED),
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=min(block_kv, COMPUTED),
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    size = (queries * shape.context, keys)
    visible = masks.LocalMask(size, (shape.window - 1, 0), 0) if shape.window else masks.CausalMask(size)
    positions = token_order(shape.length, shape.context).astype(np.int32).reshape(shape.context, -1)
    visible.q_sequence = np.pad(positions, ((0, 0), (0, queries - positions.shape[1])), mode="edge").ravel()
    return kernels.make_splash_mha(
        masks.MultiHeadMask([visible] * shape.heads),
        block_sizes=sizes,
        save_residuals=True,
        head_shards=1,
        q_seq_shards=shape.context,
        interpret=shape.is_interpreted,
    )


def kernel_of_rank(kernel: Kernel, rank: jax.Array, ranks: int) -> Kernel:
    """Return the kernel for the queries of one rank. What depends on it are tables of the blocks that have scores."""

    def shard(table: jax.Array) -> jax.Array:
        """Of [heads, blocks, blocks] or [queries], the rank's."""
        axis = min(table.ndim - 1, 1)
        size = table.shape[axis] // ranks
        return jax.lax.dynamic_slice_in_dim(table, rank * size, size, axis)

    of_rank: Kernel = jax.tree.map(shard, kernel)
    return of_rank


def reordered(x: jax.Array, order: list[int], axis: int = 1) -> jax.Array:
    """Return `x` with its equal chunks along `axis` in this order."""
    if order == sorted(order):
        return x  # a single rank's, whose length may be odd
    chunks = jnp.split(x, len(order), axis)
    return jnp.concatenate([chunks[i] for i in order], axis)


def programs(shape: SplashShape) -> tuple[Program, Program]:
    """Return the forward and the backward pass; arguments as in the module's docstring."""
    of_all_ranks, scale = kernel_of_all_ranks(shape), 1 / math.sqrt(shape.width)
    by_rank = chunks_by_rank(shape.context)
    in_row = [by_rank.index(chunk) for chunk in range(len(by_rank))]

    def padded(x: jax.Array) -> jax.Array:
        """[.., T, E] with zeros to whole blocks. Causality hides them from every query."""
        return jnp.pad(x, ((0, 0), (0, padded_length(x.shape[1]) - x.shape[1]), (0, 0)))

    def scaled(q: jax.Array) -> jax.Array:
        return (q.astype(jnp.float32) * scale).astype(q.dtype)

    def all_keys(x: jax.Array) -> jax.Array:
        return padded(reordered(x, in_row))

    def segment_ids(segments: list[jax.Array]) -> kernels.SegmentIds | None:
        if not segments:
            return None
        segments = [segments[0], reordered(segments[1], in_row, axis=0)]
        q, kv = (jnp.pad(x, (0, padded_length(len(x)) - len(x)), constant_values=PADDING) for x in segments)
        return kernels.SegmentIds(q=q, kv=kv)

    def forward_row(kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> Any:
        ids = segment_ids(list(segments))
        y, (logsumexp,) = kernel(padded(scaled(q)), all_keys(k), all_keys(v), ids)
        return y[:, : q.shape[1]], logsumexp[:, : q.shape[1]]

    def backward_row(kernel: Kernel, *arguments: jax.Array) -> Any:
        q, k, v, *segments, y, logsumexp, grad = arguments
        # Queries of the padding have probabilities of 1 and gradients of 0.
        logsumexp = jnp.pad(logsumexp, ((0, 0), (0, padded_length(q.shape[1]) - q.shape[1])))
        inputs = (padded(scaled(q)), all_keys(k), all_keys(v), segment_ids(segments), None)
        residuals = (*inputs, padded(y), logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
        options = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}
        gradients = kernels._splash_attention_bwd(save_residuals=False, res=residuals, do=padded(grad), **options)
        grad_q, *grads = gradients[3:6]
        grad_k, grad_v = (reordered(grad[:, : shape.length], by_rank) for grad in grads)
        return scaled(grad_q[:, : q.shape[1]]), grad_k, grad_v

    def forward(rank: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        kernel = kernel_of_rank(of_all_ranks, rank[0], shape.context)
        return jax.vmap(partial(forward_row, kernel))(*rows)

    def backward(rank: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        kernel = kernel_of_rank(of_all_ranks, rank[0], shape.context)
        grad_q, grad_k, grad_v = jax.vmap(partial(backward_row, kernel))(*rows)
        return grad_q, grad_k[None], grad_v[None]

    return forward, backward


def arguments(shape: SplashShape) -> tuple[list[Any], list[Any]]:
    """Return the shapes and dtypes of what the programs read."""
    dtype, tokens = jnp.dtype(shape.dtype), shape.length // shape.context
    rank = jax.ShapeDtypeStruct((1,), jnp.int32)
    queries = jax.ShapeDtypeStruct((shape.rows, shape.heads, tokens, shape.width), dtype)
    keys = jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, shape.length, shape.width), dtype)
    segments = [jax.ShapeDtypeStruct((shape.rows, length), jnp.int32) for length in (tokens, shape.length)]
    logsumexp = jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32)
    inputs = [rank, queries, keys, keys, *(segments if shape.has_segments else [])]
    return inputs, [*inputs, queries, logsumexp, queries]


def main(folder: Path, shape: SplashShape) -> None:
    """Write both programs; see the module's docstring."""
    platform = "cpu" if shape.is_interpreted else "tpu"
    for name, program, inputs in zip(("forward", "backward"), programs(shape), arguments(shape), strict=True):
        traced = jax.jit(program, keep_unused=True).trace(*inputs)
        low = traced.lower(lowering_platforms=(platform,), _private_parameters=FOR_EXPORT)
        (folder / f"{name}.pb").write_bytes(low.compiler_ir("hlo").as_serialized_hlo_module_proto())


if __name__ == "__main__":
    main(Path(sys.argv[1]), SplashShape(**json.load(sys.stdin)))
