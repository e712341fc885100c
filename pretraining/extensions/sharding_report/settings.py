"""The setting of the report on sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pretraining.config.declaration import PER_HOST
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class ShardingReportConfig(TrainConfig):
    """A configuration with a report on sharding."""

    # ---- Engine and sharding
    dump_sharding: Annotated[str, PER_HOST] = ""
    """File that is written before the first step, as JSON: the mesh and, of every parameter and moment, shape, dtype
    and the mesh axes that shard each dimension. Empty: none."""
