"""Another number of copies of the key/value heads than tensor ranks need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import AtLeast
from pretraining.config.errors import Problem
from pretraining.config.extension import Extension
from pretraining.config.support import TORCH, Limit
from pretraining.config.training import TrainConfig
from pretraining.config.validate import divisors, either, problem
from pretraining.config.variants import model_shape


@dataclass(frozen=True)
class KvReplicationConfig(TrainConfig):
    """A configuration with a number of copies of the key/value heads."""

    # ---- Engine and sharding
    kv_replication: Annotated[int, AtLeast(0)] = 0
    """Copies of each key/value head in use if tensor ranks do not divide them. 0: as few as possible,
    tensor_parallel_size / gcd(num_kv_heads, tensor_parallel_size). 1 with too few heads: every tensor rank computes all
    key/value heads. The xla engine stores the weights of a head once, the torch engine in every tensor rank."""

    @property
    def kv_copies(self) -> int:
        """See TrainConfig."""
        return self.kv_replication or super().kv_copies

    @classmethod
    def limits(cls) -> tuple[Any, ...]:
        """See TrainConfig."""
        reason = "its tensor ranks have the key/value heads of their queries, each of them once"
        values = "more or fewer copies than there must be"
        return (*super().limits(), Limit("kv_replication", TORCH, reason, values, _repeats_heads_more))


def _repeats_heads_more(config: KvReplicationConfig) -> bool:
    ranks = config.tensor_parallel_size
    return config.kv_replication not in (0, ranks // math.gcd(model_shape(config).num_kv_heads, ranks))


def check_copies(config: KvReplicationConfig) -> Iterator[Problem]:
    """Every tensor rank computes the same number of copies of key/value heads."""
    repeats, ranks = config.kv_replication, config.tensor_parallel_size
    if repeats > 1:
        heads = model_shape(config).num_kv_heads
        valid = [r for r in divisors(ranks) if heads * r % ranks == 0]
        if repeats not in valid:
            remedy = f"x num_kv_heads={heads} is not a multiple of tensor_parallel_size={ranks}"
            yield problem(config, "kv_replication", f"{remedy}; use {either(valid)}, or 0 for the smallest")


EXTENSION = Extension(configuration=KvReplicationConfig, checks=(check_copies,))
