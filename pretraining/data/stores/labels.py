"""Shards with labels: which tokens are trained, and where examples begin in a row, as two bits of every token id.

A shard has labels if `labels` (Hugging Face's: the token itself where it is trained, otherwise -100) or `loss_mask` (1
where it is trained, otherwise 0) is next to its list column of tokens. `position_ids`, if that is there too, is 0 where
an example begins. Such a shard is decoded once, like Parquet, so that ids and marks are read, shuffled and checked as
one array.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.shard import ShardContents, to_int32

if TYPE_CHECKING:
    import pyarrow as pa

IGNORED = -100  # label of a position that is not trained: torch's and Hugging Face's default ignore_index
LABELS, LOSS_MASK, POSITIONS = "labels", "loss_mask", "position_ids"
NULLS = "the token column has nulls: write a document without tokens as an empty list"
_BEGINS = 1 << 30
_IDS = np.int32(_BEGINS - 1)


def label_columns(schema: pa.Schema, column: str) -> list[str]:
    """Return the columns that mark the tokens of `column`, the one with labels first; empty for a shard without."""
    lists = [field.name for field in schema if is_list(field.type)]
    labels = [name for name in (LABELS, LOSS_MASK) if name in lists and column in lists][:1]
    return [*labels, *(name for name in lists if labels and name == POSITIONS)]


def unmark(row: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Turn marked ids, int32 [T], into ids; return the places of untrained ones, and of those that begin an example."""
    untrained = np.flatnonzero(row < 0)
    begins = untrained[row[untrained] & _BEGINS > 0].tolist()
    row &= _IDS
    return untrained, begins


def decode(batches: Iterable[pa.RecordBatch], dtype: str, path: str, decoded: str) -> ShardContents:
    """Write the tokens of every batch to `decoded`: of its first column, marked by the others where there are any.

    UserError names the path if a column has nulls, or the columns do not belong together.
    """
    lengths, trained = [np.zeros(0, np.int64)], None
    temporary = Path(f"{decoded}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for batch in batches:
                lists = batch.column(0)
                tokens = to_int32(_values(lists, path), path)
                lengths.append(np.diff(list_offsets(lists)))
                if batch.num_columns > 1:
                    tokens = _mark(tokens, batch, lengths[-1], path)
                    trained = (trained or 0) + int(np.count_nonzero(tokens >= 0))
                tokens.tofile(file)
        # All processes of a run decode, and one may read its copy already: the first one stays
        with suppress(FileExistsError):
            os.link(temporary, decoded)
    finally:
        temporary.unlink(missing_ok=True)
    joined = np.concatenate(lengths)
    dtype = "int32" if trained is not None or dtype in ("int64", "uint64") else dtype
    starts = (np.cumsum(joined, dtype=np.int64) - joined) * np.dtype(dtype).itemsize
    return ShardContents(decoded, dtype, starts, joined, trained)


def _values(lists: pa.Array, path: str) -> np.ndarray:
    values = lists.flatten()
    if lists.null_count or values.null_count:
        raise UserError(f"{path}: {NULLS}")
    array: np.ndarray = values.to_numpy(zero_copy_only=False)
    return array


def _mark(tokens: np.ndarray, batch: pa.RecordBatch, lengths: np.ndarray, path: str) -> np.ndarray:
    """Return the ids of a batch with their marks, int32. The first token of an example has nothing to predict it."""
    for name, lists in zip(batch.schema.names[1:], batch.columns[1:], strict=True):
        if not np.array_equal(np.diff(list_offsets(lists)), lengths):
            raise UserError(f"{path}: {name} has not one entry for each token of its row: write the shard again")
    ids, labels = tokens.astype(np.int64), _values(batch.column(1), path)
    if len(ids) and (ids.min() < 0 or ids.max() >= _BEGINS):
        raise UserError(f"{path}: token id {ids.min() if ids.min() < 0 else ids.max()} is outside 0..2^30-1")
    is_trained = labels != IGNORED if batch.schema.names[1] == LABELS else labels > 0
    if batch.schema.names[1] == LABELS and (labels != ids)[is_trained].any():
        raise UserError(f"{path}: a label is neither {IGNORED} nor the token at its own place: labels are not shifted")
    is_first = np.zeros(len(ids), bool)
    is_first[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
    if batch.num_columns > 2:
        is_first |= _values(batch.column(2), path) == 0
    marks = np.where(is_trained & ~is_first, 0, -(1 << 31)) + np.where(is_first, _BEGINS, 0)
    return (ids + marks).astype(np.int32)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a list in every row."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def list_offsets(lists: pa.Array) -> np.ndarray:
    """Return the borders of lists among their values, int64 [lists + 1]."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(lists.type):
        return np.arange(len(lists) + 1) * int(lists.type.list_size)
    offsets: np.ndarray = lists.offsets.to_numpy().astype(np.int64)
    return offsets
