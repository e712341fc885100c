"""How everything is sharded, as a table: parameter name -> the mesh axis that splits each of its dimensions.

Both engines read it. Knows no device. `shard` is the axis of fsdp and hsdp; a dimension marked None is whole on
every device. Activations are split over `replica` and `shard` along the rows of the batch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

Spec = tuple[str | None, ...]  # one entry per dimension


class Row(NamedTuple):
    pattern: str  # glob over Hugging Face names
    spec: Spec


# First match wins; every parameter of every variant matches exactly one row (tests/parallel/test_sharding.py).
LLAMA_SHARDING = (
    Row("*.embed_tokens.weight", (None, "shard")),  # [vocabulary, hidden]: a lookup reads whole columns, no gather
    Row("*.[qkv]_proj.weight", (None, "shard")),  # [heads, hidden]
    Row("*.o_proj.weight", ("shard", None)),  # [hidden, heads]
    Row("*.gate_proj.weight", (None, "shard")),  # [feed-forward, hidden]
    Row("*.up_proj.weight", (None, "shard")),
    Row("*.down_proj.weight", ("shard", None)),  # [hidden, feed-forward]
    Row("lm_head.weight", (None, "shard")),  # [vocabulary, hidden]
    Row("*norm.weight", (None,)),  # [hidden]: 32 KB at most, replication is cheaper than a gather
)
BATCH_AXES = ("replica", "shard")  # [rows, ...] of every activation


def spec_of(name: str) -> Spec:
    """The row of `name` (a Hugging Face parameter name, or one whose layer index is left out)."""
    for row in LLAMA_SHARDING:
        if fnmatchcase(name, row.pattern):
            return row.spec
    raise KeyError(f"no row of the sharding table matches {name}")
