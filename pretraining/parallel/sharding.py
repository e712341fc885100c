"""The sharding table: how every parameter, by its name, and every activation of a block is sharded.

Both engines read it. Does not depend on devices. The mesh's axes: `stage` shards the stacked layers; `stage`, `replica`
and `shard` the rows of the batch, `context` the tokens of a row, `tensor` heads, feed-forward channels and vocabulary.
Parameters are sharded along `tensor`, and along `shard` and `context` together as the strategy asks. None marks a
dimension that is not sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

Axis = str | tuple[str, ...] | None  # a tuple: sharded along the first of them, each shard along the next
Spec = tuple[Axis, ...]  # one entry per dimension


class Row(NamedTuple):
    """The sharding of the parameters whose names match."""

    pattern: str  # glob over Hugging Face names
    spec: Spec


# Context ranks run the same parameters on other tokens, so for parameters they are data-parallel ranks.
SHARD = ("shard", "context")

# First match wins; every parameter of every variant matches exactly one row (tests/parallel/test_tables.py).
LLAMA_SHARDING = (
    Row("*.embed_tokens.weight", ("tensor", SHARD)),  # [vocabulary, hidden]: a lookup needs no all-gather
    Row("*.embed_positions.weight", (None, SHARD)),  # [positions, hidden]
    Row("*.[qkv]_proj.weight", ("tensor", SHARD)),  # [heads, hidden]: column parallel, heads are sharded
    Row("*.o_proj.weight", (SHARD, "tensor")),  # [hidden, heads]: row parallel, partial sums are all-reduced
    Row("*.gate_proj.weight", ("tensor", SHARD)),  # [feed-forward, hidden]
    Row("*.up_proj.weight", ("tensor", SHARD)),
    Row("*.down_proj.weight", (SHARD, "tensor")),  # [hidden, feed-forward]
    Row("lm_head.weight", ("tensor", SHARD)),  # [vocabulary, hidden]
    Row("*.[od]*_proj.lora_A.weight", (None, ("tensor", *SHARD))),  # [rank, inputs]: inputs are sharded
    Row("*.lora_A.weight", (None, SHARD)),
    Row("*.[od]*_proj.lora_B.weight", (SHARD, None)),  # [outputs, rank]
    Row("*.lora_B.weight", (("tensor", *SHARD), None)),  # heads or feed-forward channels are sharded
    Row("*.[qkv]_proj.bias", ("tensor",)),
    Row("*.gate_proj.bias", ("tensor",)),
    Row("*.up_proj.bias", ("tensor",)),
    Row("*.[od]*_proj.bias", (None,)),  # added once, after the all-reduce
    Row("*norm.bias", (None,)),
    Row("*norm.weight", (None,)),  # [hidden]: 32 KB at most, replication is cheaper than a gather
)
# Fewer KV heads than tensor ranks: stored once, sharded over all ranks, and all-gathered before each rank selects the
# heads that it needs (2 x kv_heads x head_dim x hidden values per layer).
REPEATED_HEADS = (Row("*.[kv]_proj.weight", (None, (*SHARD, "tensor"))), Row("*.[kv]_proj.bias", (None,)))
# Without tensor ranks, o_proj is sharded like q_proj, which often has the same shape: the compiler broadcasts the
# optimizer's scalars once per shape, sharded like one of the parameters, and reshards them for the other (llama3_8b on
# 16 TPUs: eleven all-to-alls of 128 MiB in every step, benchmarks/RESULTS.md).
WITHOUT_TENSOR_RANKS = (Row("*.o_proj.weight", (None, SHARD)),)

REPLICAS = ("stage", "replica")
BATCH_AXES = (*REPLICAS, "shard")  # a stage computes embedding, head and loss of other rows, as data-parallel ranks do
TOKENS: Spec = (BATCH_AXES, "context")  # [rows, tokens]
STREAM: Spec = (*TOKENS, None)  # [rows, tokens, hidden], between blocks
STREAM_OF_SEQUENCE: Spec = (BATCH_AXES, ("context", "tensor"), None)  # the same with sequence_parallel
LOGITS: Spec = (*TOKENS, "tensor")  # [rows, tokens, vocabulary]
# Every query attends to all keys and values: all-gathered along context, and their gradients reduce-scattered
KEYS: Spec = (BATCH_AXES, None, "tensor")
WHOLE_HEADS: Spec = (BATCH_AXES, None, None)  # the same if every tensor rank computes all heads

# Module, its input or output [rows, tokens, features], and the sharding; None stands for the residual stream's.
Activation = tuple[str, str, Spec | None]
Activations = tuple[Activation, ...]
# The compiler would infer most of them, but not all: if o_proj's columns are sharded over more ranks than there are
# heads, the sharding of its gradient propagates back through the heads, and the activations of all ranks are gathered
# for it; activations that are kept for the backward pass are sharded like the weights that they are multiplied by; and
# the view of q, k and v as heads merges with the products, which become loops over shards (benchmarks/RESULTS.md).
ACTIVATIONS: Activations = (
    ("self_attn", "input", STREAM),  # with sequence_parallel, tokens are all-gathered here
    ("self_attn.q_proj", "output", (*TOKENS, "tensor")),
    ("self_attn.k_proj", "output", KEYS),
    ("self_attn.v_proj", "output", KEYS),
    ("self_attn.o_proj", "input", (*TOKENS, "tensor")),
    ("self_attn.o_proj", "output", None),  # partial sums are all-reduced or reduce-scattered here
    ("mlp", "input", STREAM),
    ("mlp.gate_proj", "output", (*TOKENS, "tensor")),
    ("mlp.up_proj", "output", (*TOKENS, "tensor")),
    ("mlp.down_proj", "output", None),
)
# A fused kernel gathers the rotated keys, and the values, itself.
KERNEL_ACTIVATIONS: Activations = tuple(
    (name, side, (*TOKENS, "tensor") if spec == KEYS else spec) for name, side, spec in ACTIVATIONS
)
NORM_ACTIVATIONS: Activations = (("model.norm", "output", STREAM),)


def spec_of(name: str, *, repeated_heads: bool = False, tensor_ranks: int = 2) -> Spec:
    """Return the sharding of `name` (a Hugging Face parameter name, with or without the layer index)."""
    exceptions = (REPEATED_HEADS if repeated_heads else ()) + (WITHOUT_TENSOR_RANKS if tensor_ranks == 1 else ())
    for row in exceptions + LLAMA_SHARDING:
        if fnmatchcase(name, row.pattern):
            return row.spec
    raise KeyError(f"no row of the sharding table matches {name}")


def replicated_along_shard(spec: Spec) -> Spec:
    """Return `spec` of a tensor that its strategy does not shard along `shard` and `context`."""
    return _without(spec, SHARD)


def on_mesh(spec: Spec, mesh: Mapping[str, int]) -> Spec:
    """Return `spec` without the axes that have a single rank in `mesh` (axis -> ranks)."""
    return _without(spec, [name for name, ranks in mesh.items() if ranks == 1])


def without_single(spec: Spec, shape: Iterable[int]) -> Spec:
    """Return `spec` of a tensor of this shape: dimensions of extent 1 are replicated."""
    return tuple(axis if extent > 1 else None for axis, extent in zip(spec, shape, strict=True))


def _without(spec: Spec, dropped: Collection[str]) -> Spec:
    remaining = [tuple(name for name in axes_of(axis) if name not in dropped) for axis in spec]
    return tuple(axes if len(axes) > 1 else next(iter(axes), None) for axes in remaining)


def axes_of(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes that shard one dimension, the slowest first."""
    return (axis,) if isinstance(axis, str) else axis or ()
