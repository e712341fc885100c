"""Masks in shards of transformers and TRL: of padding, and of trained tokens under other names than here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores import MAGIC
from pretraining.data.stores.arrow import LARGE, is_list, label_columns, list_offsets
from pretraining.data.stores.labels import LOSS_MASK
from pretraining.storage import BUFFER, location

if TYPE_CHECKING:
    import pyarrow as pa

MASK = "attention_mask"
LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")  # TRL's and transformers' names of loss_mask


def refuse_other_masks(schema: pa.Schema, column: str, path: str) -> None:
    """Raise UserError if a shard says under another name which of its tokens are trained."""
    others = [field.name for field in schema if field.name in LOSS_MASKS and is_list(field.type)]
    if others and not label_columns(schema, column):
        remedy = f"rename it to {LOSS_MASK}, or remove it to train all tokens"
        raise UserError(f"{path}: column {others[0]} marks the trained tokens, but is not read: {remedy}")


def has_mask(schema: pa.Schema) -> bool:
    """Return whether rows have a list of numbers that may mark padding."""
    import pyarrow as pa

    kinds = [field.type for field in schema if field.name == MASK and is_list(field.type)]
    return any(pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type) for kind in kinds)


def check_arrow_masks(path: str, column: str) -> None:
    """Raise UserError for a mask of an Arrow shard, which can be read, that this training would not follow."""
    import pyarrow as pa

    with location(path).open("rb", LARGE) as source:  # a schema is short
        is_file = source.read(len(MAGIC)) == MAGIC
        source.seek(0)
        schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).schema
        refuse_other_masks(schema, column, path)
    if not has_mask(schema):
        return
    with location(path).open("rb", BUFFER) as source:
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(MASK)])
        if is_file:
            reader = pa.ipc.open_file(source, options=options)
            batches: Iterable[pa.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(source, options=options)
        check_padding(batches, bool(label_columns(schema, column)), path)


def check_padding(batches: Iterable[pa.RecordBatch], has_labels: bool, path: str) -> None:
    """Raise UserError for the padding of a shard whose first column is its mask: 0 where a token is no text.

    Without labels all tokens are trained, those of padding too. With labels, padding behind a text has no effect on it,
    but the tokens of a text attend to what is before them.
    """
    for batch in batches:
        mask, borders = batch.column(0), list_offsets(batch.column(0))
        values = mask.values.to_numpy(zero_copy_only=False).astype(bool)[: borders[-1]]
        values[: borders[0]] = True
        padding = int(np.count_nonzero(~values))
        if padding and not has_labels:
            remedy = "write the documents without padding, or with a column labels that is -100 there"
            raise UserError(f"{path}: {MASK} marks {padding:,} tokens of padding, which would be trained: {remedy}")
        begins = np.zeros(len(values) + 1, bool)
        begins[borders] = True
        if padding and (values[1:] & ~values[:-1] & ~begins[1:-1]).any():
            raise UserError(
                f"{path}: {MASK} marks padding before a text, which would attend to it: pad behind the text"
            )
