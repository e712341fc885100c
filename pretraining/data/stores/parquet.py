"""Parquet shards with a list column of token ids.

Parquet's pages are encoded, so a document cannot be read from its place: the column is decoded once, into a plain
file of tokens in the index's folder (4 bytes a token, 2 for uint16), and read from there like every other shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.arrow import find_target
from pretraining.data.stores.shard import Documents, Layout, checked_lengths

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
# Rows decoded at once: at 660 tokens each 2.6 MB.
_ROWS = 1024


def decode_parquet(path: str, column: str, decoded: str) -> Layout:
    """Write the tokens of the list column `column` of a Parquet file to `decoded`.

    UserError names the path if the file is not complete, or its column has nulls or is no list of token ids.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=False, pre_buffer=False) as source:
            target = find_target(source.schema_arrow, column, path)
            if target.offsets is None:
                raise UserError(f"{path}: a column of single tokens has no documents; write a list of tokens per row")
            lengths = _decode(source.iter_batches(_ROWS, columns=[target.name]), target.dtype, path, decoded)
            pa.default_memory_pool().release_unused()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a complete Parquet file ({error}); copy or write it again") from error
    dtype = "int32" if target.dtype == "int64" else target.dtype
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    return Layout(decoded, dtype, Documents(starts, checked_lengths(lengths, path)))


def _decode(batches: Iterator[pa.RecordBatch], dtype: str, path: str, decoded: str) -> np.ndarray:
    """Append the tokens of every batch to `decoded`; the lengths of the documents, int64."""
    lengths = [np.zeros(0, np.int64)]
    with Path(decoded).open("wb") as file:
        for batch in batches:
            lists = batch.column(0)
            values = lists.flatten()
            if lists.null_count or values.null_count:
                raise UserError(f"{path}: the token column has nulls; a document without tokens is an empty list")
            lengths.append(np.diff(lists.offsets.to_numpy()).astype(np.int64))
            _narrow(values.to_numpy(), dtype, path).tofile(file)
    return np.concatenate(lengths)


def _narrow(values: np.ndarray, dtype: str, path: str) -> np.ndarray:
    """int64 ids as int32; the other types as they are."""
    if dtype != "int64":
        return values
    if len(values) and (int(values.max()) >= 2**31 or int(values.min()) < 0):
        raise UserError(f"{path}: token id {int(values.max())} or {int(values.min())} is outside 0..2^31-1")
    return values.astype(np.int32)
