"""Shards with labels, decoded once into a file of marked ids (see data/stores/labels.py)."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.arrow import NULLS, is_list, label_columns, list_offsets, token_type
from pretraining.data.stores.labels import BEGINS, IGNORED, LABELS, LOSS_MASK, UNTRAINED
from pretraining.data.stores.shard import ShardContents, to_int32
from pretraining.extensions.files import temporary_of
from pretraining.extensions.shard_formats.masks import check_arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa


def read_labels(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], column: str, path: str, decoded: str
) -> ShardContents | None:
    """Decode an Arrow shard with labels to `decoded`; None for one without, which is read in place.

    A shard with categories in a list, struct or map before its tokens is decoded, too: in place, only whole columns of
    categories are passed over.
    UserError names the path, if its columns mark what this training would not follow, or as `decode` does.
    """
    dtype = token_type(schema, column, path)
    check_arrow_columns(schema, column, path)
    columns = [column, *(labels := label_columns(schema, column))]
    before = schema.types[: schema.get_field_index(column)] if is_list(schema.field(column).type) else []
    if not labels and not any("dictionary<" in str(kind).removeprefix("dictionary<") for kind in before):
        return None
    return decode((batch.select(columns) for batch in batches), dtype, path, decoded)


def decode(batches: Iterable[pa.RecordBatch], dtype: str, path: str, decoded: str) -> ShardContents:
    """Write the tokens of every batch to `decoded`: of its first column, marked by the others where there are any.

    UserError names the path if a column has nulls, or the columns do not belong together.
    """
    lengths, trained = [np.zeros(0, np.int64)], None
    temporary = temporary_of(Path(decoded))
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
        # All processes of a run decode, and one may read its copy already: the first one stays, unless it is damaged
        try:
            os.link(temporary, decoded)
        except FileExistsError:
            if not filecmp.cmp(temporary, decoded, shallow=False):
                temporary.replace(decoded)
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
    if len(ids) and (ids.min() < 0 or ids.max() >= BEGINS):
        raise UserError(f"{path}: token id {ids.min() if ids.min() < 0 else ids.max()} is outside 0..2^30-1")
    if batch.schema.names[1] == LOSS_MASK and not (is_binary := np.isin(labels, (0, 1))).all():
        wrong = labels[~is_binary][0]
        raise UserError(f"{path}: {LOSS_MASK} has {wrong}: write 1 where a token is trained, otherwise 0")
    is_trained = labels != IGNORED if batch.schema.names[1] == LABELS else labels > 0
    if batch.schema.names[1] == LABELS and (labels != ids)[is_trained].any():
        raise UserError(f"{path}: a label is neither {IGNORED} nor the token at its own place: labels are not shifted")
    is_first = np.zeros(len(ids), bool)
    is_first[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
    if batch.num_columns > 2:
        is_first |= _values(batch.column(2), path) == 0
    marks = np.where(is_trained & ~is_first, 0, UNTRAINED) + np.where(is_first, BEGINS, 0)
    return (ids + marks).astype(np.int32)
