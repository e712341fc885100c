"""Parquet shards with a list column of token ids.

The pages of Parquet are encoded, so a document cannot be read in place: the column is decoded once, into a plain file
of tokens in the index folder (4 bytes a token, 2 for uint16), and read from there like every other shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.arrow import NULLS, is_list, list_offsets, token_type
from pretraining.data.stores.shard import ShardContents, to_int32

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
# Rows decoded at once: 2.6 MB at 660 tokens each.
_ROWS = 1024


def decode_parquet(path: str, column: str, decoded: str) -> ShardContents:
    """Write the tokens of the list column `column` of a Parquet file to `decoded`.

    UserError names the path if the file is not complete, or its column has nulls or is no list of token ids.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=False, pre_buffer=False) as source:
            dtype = token_type(source.schema_arrow, column, path)
            if not is_list(source.schema_arrow.field(column).type):
                raise UserError(f"{path}: a column of single tokens has no documents: write a list of tokens per row")
            lengths = _decode(source.iter_batches(_ROWS, columns=[column]), path, decoded)
            pa.default_memory_pool().release_unused()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a complete Parquet file ({error}): copy or write it again") from error
    dtype = "int32" if dtype in ("int64", "uint64") else dtype
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    return ShardContents(decoded, dtype, starts, lengths)


def _decode(batches: Iterator[pa.RecordBatch], path: str, decoded: str) -> np.ndarray:
    """Append the tokens of every batch to `decoded`; return the lengths of the documents, int64 [documents]."""
    lengths = [np.zeros(0, np.int64)]
    with Path(decoded).open("wb") as file:
        for batch in batches:
            lists = batch.column(0)
            values = lists.flatten()
            if lists.null_count or values.null_count:
                raise UserError(f"{path}: {NULLS}")
            lengths.append(np.diff(list_offsets(lists)))
            to_int32(values.to_numpy(), path).tofile(file)
    return np.concatenate(lengths)
