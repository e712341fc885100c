"""Columns in shards of transformers and TRL that training may not follow, which is then refused.

Masks of padding, masks of trained tokens under other names than here, and the places of packed sequences in a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores import MAGIC
from pretraining.data.stores.arrow import is_list, label_columns, list_offsets
from pretraining.data.stores.labels import LOSS_MASK, POSITIONS
from pretraining.storage import BUFFER, location

if TYPE_CHECKING:
    import pyarrow as pa

MASK = "attention_mask"
SEQUENCES = "seq_lengths"  # what TRL's packing adds: the lengths of the sequences of a row
OTHER_MASKS = (MASK, LOSS_MASK, "special_tokens_mask")  # which do not say under another name what is trained


def refuse_other_masks(schema: pa.Schema, column: str, path: str) -> None:
    """Raise UserError if a shard says under another name which of its tokens are trained.

    TRL has completion_mask, transformers assistant_masks, torchtune mask, which is true where a token is not trained.
    """
    others = [field.name for field in schema if "mask" in field.name and is_list(field.type)]
    others = [name for name in others if name not in OTHER_MASKS]
    if others and not label_columns(schema, column):
        remedy = f"rename it to {LOSS_MASK} if it is 1 where a token is trained, or remove it to train all tokens"
        raise UserError(f"{path}: column {others[0]} marks the trained tokens, but is not read: {remedy}")


def checked_columns(schema: pa.Schema, column: str) -> list[str]:
    """Return the columns whose numbers may mark padding or several sequences in a row, and are not followed."""
    import pyarrow as pa

    packing = [] if POSITIONS in label_columns(schema, column) else [SEQUENCES, POSITIONS]
    lists = [field for field in schema if field.name in (MASK, *packing) and is_list(field.type)]
    kinds = {field.name: field.type.value_type for field in lists}
    return [name for name, kind in kinds.items() if pa.types.is_primitive(kind)]


def check_arrow_columns(schema: pa.Schema, column: str, path: str) -> None:
    """Raise UserError for a column of an Arrow shard that this training would not follow."""
    import pyarrow as pa

    refuse_other_masks(schema, column, path)
    if names := checked_columns(schema, column):
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
        with location(path).open("rb", BUFFER) as source:
            is_file = source.read(len(MAGIC)) == MAGIC
            source.seek(0)
            shard = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)
            batches = map(shard.get_batch, range(shard.num_record_batches)) if is_file else shard
            check_columns(batches, label_columns(schema, column), path)


def check_columns(batches: Iterable[pa.RecordBatch], followed: list[str], path: str) -> None:
    """Raise UserError if the checked_columns, all columns of the batches, mark what this training would not follow.

    followed: the label_columns of their shard.
    """
    for batch in batches:
        for name, lists in zip(batch.schema.names, batch.columns, strict=True):
            if name == MASK:
                check_padding(lists, bool(followed), path)
            if POSITIONS not in followed and is_packed(name, lists):
                remedy = "remove the column to train each row as one document"
                if name == POSITIONS:
                    remedy = f"add {LOSS_MASK}, next to which it is read"
                marks = f"column {name} marks several sequences in a row, but is not read"
                raise UserError(f"{path}: {marks}: write each sequence as a row of its own, or {remedy}")


def is_packed(name: str, lists: pa.Array) -> bool:
    """Return whether a row has several sequences: by their lengths, numbers in a mask, or positions from 0 again."""
    if name == MASK:  # LLaMA-Factory's neat_packing
        return bool((lists.flatten().to_numpy(zero_copy_only=False) > 1).any())
    borders = list_offsets(lists)
    if name == SEQUENCES:
        return bool((np.diff(borders) > 1).any())
    is_first = lists.flatten().to_numpy(zero_copy_only=False) == 0
    is_first[(borders - borders[0])[:-1][np.diff(borders) > 0]] = False
    return bool(is_first.any())


def check_padding(masks: pa.Array, has_labels: bool, path: str) -> None:
    """Raise UserError for the padding that the masks of rows mark: 0 where a token is no text.

    Without labels all tokens are trained, those of padding too. With labels, padding behind a text has no effect on it,
    but the tokens of a text attend to what is before them.
    """
    borders = list_offsets(masks)
    values = masks.values.to_numpy(zero_copy_only=False).astype(bool)[: borders[-1]]
    values[: borders[0]] = True
    padding = int(np.count_nonzero(~values))
    if padding and not has_labels:
        remedy = "write the documents without padding, or with a column labels that is -100 there"
        raise UserError(f"{path}: {MASK} marks {padding:,} tokens of padding, which would be trained: {remedy}")
    begins = np.zeros(len(values) + 1, bool)
    begins[borders] = True
    if padding and (values[1:] & ~values[:-1] & ~begins[1:-1]).any():
        raise UserError(f"{path}: {MASK} marks padding before a text, which would attend to it: pad behind the text")
