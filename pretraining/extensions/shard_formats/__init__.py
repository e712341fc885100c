"""Token shards of other tools: Parquet, Megatron's .idx next to .bin, and Arrow or Parquet with labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension
from pretraining.data.stores import MAGIC, STREAM_MAGIC
from pretraining.storage import ShardFormat

if TYPE_CHECKING:
    from pretraining.config.training import TrainConfig
    from pretraining.data.stores.shard import ShardContents

PARQUET = b"PAR1"
MEGATRON = b"MMIDIDX\x00\x00"
OLD_MEGATRON = b"TNTIDX\x00\x00"  # "lazy" and "cached" datasets of the first Megatron


def index_labelled_arrow(path: str, column: str, decoded: str) -> ShardContents:
    """See ShardFormat. Shards without labels are read as the core does."""
    from pretraining.data.stores.arrow import index_arrow  # imports numpy
    from pretraining.extensions.shard_formats.labels import read_labels

    return index_arrow(path, column, decoded, read_labels)


def index_parquet(path: str, column: str, decoded: str) -> ShardContents:
    """See ShardFormat."""
    from pretraining.extensions.shard_formats.parquet import decode_parquet  # imports numpy

    return decode_parquet(path, column, decoded)


def open_megatron(path: str, column: str, decoded: str) -> ShardContents:
    """See ShardFormat. There are no columns, and nothing is decoded."""
    from pretraining.extensions.shard_formats import megatron  # imports numpy

    return megatron.index_megatron(path)


def check_folders(config: TrainConfig) -> None:
    """See splits.check_splits."""
    from pretraining.extensions.shard_formats.splits import check_splits

    check_splits(config)


EXTENSION = Extension(
    stored_data=(check_folders,),
    shard_formats={
        "arrow": ShardFormat((MAGIC, STREAM_MAGIC), index_labelled_arrow),
        "parquet": ShardFormat((PARQUET,), index_parquet),
        "megatron": ShardFormat((MEGATRON, OLD_MEGATRON), open_megatron),
    },
)
