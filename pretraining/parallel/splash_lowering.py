"""Lower splash attention for the shard of one device, without a TPU.

    python -m pretraining.parallel.splash_lowering FOLDER < shape.json

reads a splash.SplashShape, and writes two programs (XLA's HloModuleProto) to FOLDER:
forward.pb: q [B, H, T, E], k and v [B, K, T, E] (and segments [B, T] int32) -> y [B, H, T, E], log-sum-exp [B, H, T]
backward.pb: those arguments, y, log-sum-exp and the gradient of y -> the gradients of q, k and v.
The log-sum-exp is fp32. A window and a length are part of the program.

Runs in a process of its own, because torch-xla and jax each claim the devices of their process. Works with the version
of jax in requirements-tpu-aot.txt: the backward pass is no public function of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # no search for a TPU

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pretraining.parallel.splash import SplashShape

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


def padded_length(length: int) -> int:
    """Return `length` rounded up to whole blocks."""
    unit = LANES if length <= COMPUTED else COMPUTED
    return -(-length // unit) * unit


def programs(shape: SplashShape) -> tuple[Program, Program]:
    """Return the forward and the backward pass of one row; arguments as in the module's docstring, without B."""
    length = padded_length(shape.length)
    block = BLOCK if length % BLOCK == 0 else min(length, COMPUTED)
    computed = min(block, COMPUTED)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=computed,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=computed,
        block_q_dq=block,
        block_kv_dq=block,
    )
    causal = masks.CausalMask((length, length))
    visible = masks.LocalMask((length, length), (shape.window - 1, 0), 0) if shape.window else causal
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([visible] * shape.heads),
        block_sizes=sizes,
        save_residuals=True,
        head_shards=1,
        q_seq_shards=1,
        interpret=shape.is_interpreted,
    )
    scale = 1 / math.sqrt(shape.width)

    def padded(x: jax.Array) -> jax.Array:
        """[.., T, E] with zeros to whole blocks. Causality hides them from every query."""
        return jnp.pad(x, ((0, 0), (0, length - shape.length), (0, 0)))

    def scaled(q: jax.Array) -> jax.Array:
        return (q.astype(jnp.float32) * scale).astype(q.dtype)

    def segment_ids(segments: list[jax.Array]) -> kernels.SegmentIds | None:
        if not segments:
            return None
        ids = jnp.pad(segments[0], (0, length - shape.length), constant_values=PADDING)
        return kernels.SegmentIds(q=ids, kv=ids)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> tuple[jax.Array, ...]:
        ids = segment_ids(list(segments))
        y, (logsumexp,) = kernel(padded(scaled(q)), padded(k), padded(v), ids)
        return y[:, : shape.length], logsumexp[:, : shape.length]

    def backward(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, *segments, y, logsumexp, grad = arguments
        # Queries of the padding have probabilities of 1 and gradients of 0.
        logsumexp = jnp.pad(logsumexp, ((0, 0), (0, length - shape.length)))
        inputs = (padded(scaled(q)), padded(k), padded(v), segment_ids(segments), None)
        residuals = (*inputs, padded(y), logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
        options = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}
        gradients = kernels._splash_attention_bwd(save_residuals=False, res=residuals, do=padded(grad), **options)
        grad_q, grad_k, grad_v = (gradient[:, : shape.length] for gradient in gradients[3:6])
        return scaled(grad_q), grad_k, grad_v

    return forward, backward


def arguments(shape: SplashShape) -> tuple[list[Any], list[Any]]:
    """Return the shapes and dtypes of what the programs read."""
    dtype = jnp.dtype(shape.dtype)
    queries = jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.length, shape.width), dtype)
    keys = jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, shape.length, shape.width), dtype)
    segments = [jax.ShapeDtypeStruct((shape.rows, shape.length), jnp.int32)] * shape.has_segments
    logsumexp = jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32)
    inputs = [queries, keys, keys, *segments]
    return inputs, [*inputs, queries, logsumexp, queries]


def main(folder: Path, shape: SplashShape) -> None:
    """Write both programs; see the module's docstring."""
    platform = "cpu" if shape.is_interpreted else "tpu"
    for name, program, inputs in zip(("forward", "backward"), programs(shape), arguments(shape), strict=True):
        traced = jax.jit(jax.vmap(program), keep_unused=True).trace(*inputs)
        low = traced.lower(lowering_platforms=(platform,), _private_parameters=FOR_EXPORT)
        (folder / f"{name}.pb").write_bytes(low.compiler_ir("hlo").as_serialized_hlo_module_proto())


if __name__ == "__main__":
    main(Path(sys.argv[1]), SplashShape(**json.load(sys.stdin)))
