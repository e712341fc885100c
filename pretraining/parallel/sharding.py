"""How everything is sharded, as two tables: of every parameter by its name, and of every activation of a block.

Both engines read them. Knows no device. The mesh's axes: `replica` and `shard` split the rows of the batch, `context`
the tokens of a row, `tensor` heads, feed-forward channels and vocabulary. Parameters are split along `tensor`, and
along `shard` and `context` together as the strategy asks. A dimension marked None is whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

Axis = str | tuple[str, ...] | None  # a tuple: split along the first of them, each part along the next
Spec = tuple[Axis, ...]  # one entry per dimension


class Row(NamedTuple):
    pattern: str  # glob over Hugging Face names
    spec: Spec


# Context ranks run the same parameters on other tokens, so they are data parallelism as far as parameters go.
SHARD = ("shard", "context")

# First match wins; every parameter of every variant matches exactly one row (tests/parallel/test_tables.py).
LLAMA_SHARDING = (
    Row("*.embed_tokens.weight", ("tensor", SHARD)),  # [vocabulary, hidden]: a lookup reads whole columns, no gather
    Row("*.embed_positions.weight", (None, SHARD)),  # [positions, hidden]
    Row("*.[qkv]_proj.weight", ("tensor", SHARD)),  # [heads, hidden]: column parallel, heads are split
    Row("*.o_proj.weight", (SHARD, "tensor")),  # [hidden, heads]: row parallel, partial sums are added up
    Row("*.gate_proj.weight", ("tensor", SHARD)),  # [feed-forward, hidden]
    Row("*.up_proj.weight", ("tensor", SHARD)),
    Row("*.down_proj.weight", (SHARD, "tensor")),  # [hidden, feed-forward]
    Row("lm_head.weight", ("tensor", SHARD)),  # [vocabulary, hidden]
    Row("*.[od]*_proj.lora_A.weight", (None, ("tensor", *SHARD))),  # [rank, inputs]: inputs are split
    Row("*.lora_A.weight", (None, SHARD)),
    Row("*.[od]*_proj.lora_B.weight", (SHARD, None)),  # [outputs, rank]
    Row("*.lora_B.weight", (("tensor", *SHARD), None)),  # heads or feed-forward channels are split
    Row("*.[qkv]_proj.bias", ("tensor",)),
    Row("*.gate_proj.bias", ("tensor",)),
    Row("*.up_proj.bias", ("tensor",)),
    Row("*.[od]*_proj.bias", (None,)),  # added once, after the partial sums
    Row("*norm.bias", (None,)),
    Row("*norm.weight", (None,)),  # [hidden]: 32 KB at most, replication is cheaper than a gather
)
# Keys and values with fewer heads than tensor ranks: kept once, spread over all ranks, and gathered where each rank
# takes the heads it needs (2 x kv_heads x head_dim x hidden values a layer).
REPEATED_HEADS = (
    Row("*.[kv]_proj.weight", (None, (*SHARD, "tensor"))),
    Row("*.[kv]_proj.bias", (None,)),
)
# Without tensor ranks, as q_proj is, which often has the same shape: the compiler makes the optimizer's scalars as
# large as a parameter once for each shape, laid out like one of them, and moves them about for the other (of llama3_8b
# on 16 TPUs eleven all-to-alls of 128 MiB in every step, benchmarks/RESULTS.md).
WITHOUT_TENSOR_RANKS = (Row("*.o_proj.weight", (None, SHARD)),)

BATCH_AXES = ("replica", "shard")  # the data-parallel ranks
TOKENS: Spec = (BATCH_AXES, "context")  # [rows, tokens]
STREAM: Spec = (*TOKENS, None)  # [rows, tokens, hidden], between blocks
STREAM_OF_SEQUENCE: Spec = (BATCH_AXES, ("context", "tensor"), None)  # the same with sequence_parallel
LOGITS: Spec = (*TOKENS, "tensor")  # [rows, tokens, vocabulary]

# What a module of a block takes or gives, [rows, tokens, features]; None stands for the stream between blocks.
Activation = tuple[str, str, Spec | None]
Activations = tuple[Activation, ...]
# Held with data-parallel ranks alone, too, where the compiler would find the one way there is for all others: where
# o_proj's columns are split over more ranks than there are heads, the split of its gradient reaches back through the
# heads, and the activations of all ranks are gathered to make it (benchmarks/RESULTS.md).
HEADS: Activation = ("self_attn.o_proj", "input", (*TOKENS, "tensor"))
ACTIVATIONS: Activations = (
    ("self_attn", "input", STREAM),  # with sequence_parallel, here tokens are gathered
    ("self_attn.q_proj", "output", (*TOKENS, "tensor")),
    ("self_attn.k_proj", "output", (BATCH_AXES, None, "tensor")),  # every query sees all keys: gathered along context
    ("self_attn.v_proj", "output", (BATCH_AXES, None, "tensor")),
    HEADS,
    ("self_attn.o_proj", "output", None),  # here partial sums are added up, or added up and scattered
    ("mlp", "input", STREAM),
    ("mlp.gate_proj", "output", (*TOKENS, "tensor")),
    ("mlp.up_proj", "output", (*TOKENS, "tensor")),
    ("mlp.down_proj", "output", None),
)
HEAD_ACTIVATIONS: Activations = (
    ("model.norm", "output", STREAM),
    ("lm_head", "output", LOGITS),
)

WHOLE_HEADS: Spec = (BATCH_AXES, None, None)  # of k_proj and v_proj where every tensor rank computes all heads


def spec_of(name: str, *, repeated_heads: bool = False, tensor_ranks: int = 2) -> Spec:
    """The row of `name` (a Hugging Face parameter name, or one whose layer index is left out)."""
    exceptions = (*(REPEATED_HEADS if repeated_heads else ()), *(WITHOUT_TENSOR_RANKS if tensor_ranks == 1 else ()))
    for row in (*exceptions, *LLAMA_SHARDING):
        if fnmatchcase(name, row.pattern):
            return row.spec
    raise KeyError(f"no row of the sharding table matches {name}")


def whole_along_shard(spec: Spec) -> Spec:
    """`spec` of a tensor that its strategy does not split along `shard` and `context`."""
    return tuple(_without(axis, SHARD) for axis in spec)


def on_mesh(spec: Spec, mesh: Mapping[str, int]) -> Spec:
    """`spec` without the axes that have a single rank in `mesh` (axis -> ranks)."""
    return tuple(_without(axis, [name for name, ranks in mesh.items() if ranks == 1]) for axis in spec)


def _without(axis: Axis, dropped: tuple[str, ...] | list[str]) -> Axis:
    kept = tuple(name for name in axes_of(axis) if name not in dropped)
    return kept if len(kept) > 1 else kept[0] if kept else None


def axes_of(axis: Axis) -> tuple[str, ...]:
    """The mesh axes that split one dimension, the slowest first."""
    return (axis,) if isinstance(axis, str) else axis or ()


def parts(axis: Axis, mesh: Mapping[str, int]) -> int:
    """Into how many parts a dimension is split in `mesh` (axis -> ranks)."""
    return math.prod(mesh[name] for name in axes_of(axis))
