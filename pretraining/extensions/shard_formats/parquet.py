"""Parquet shards with a list column of token ids.

The pages of Parquet are encoded, so a document cannot be read in place: the column is decoded once, into a plain file
of tokens in the index folder (4 bytes a token, 2 for uint16), and read from there like every other shard.
"""

from __future__ import annotations

import os

from pretraining.config.errors import UserError
from pretraining.data.stores.arrow import is_list, label_columns, token_type
from pretraining.data.stores.shard import ShardContents
from pretraining.extensions.shard_formats.labels import decode
from pretraining.extensions.shard_formats.masks import check_columns, checked_columns, refuse_other_masks
from pretraining.storage import BUFFER, StorageError, is_remote, location

# Rows decoded at once: 2.6 MB at 660 tokens each.
_ROWS = 1024


def decode_parquet(path: str, column: str, decoded: str) -> ShardContents:
    """Write the tokens of the list column `column` of a Parquet file to `decoded`.

    UserError names the path if the file is not complete, or its column has nulls or is no list of token ids.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = location(path).open("rb", BUFFER) if is_remote(path) else pa.OSFile(os.fsencode(path))
        with pq.ParquetFile(file, memory_map=False, pre_buffer=False) as source:
            dtype = token_type(source.schema_arrow, column, path)
            if not is_list(source.schema_arrow.field(column).type):
                raise UserError(f"{path}: a column of single tokens has no documents: write a list of tokens per row")
            columns = [column, *label_columns(source.schema_arrow, column)]
            refuse_other_masks(source.schema_arrow, column, path)
            if names := checked_columns(source.schema_arrow, column):
                check_columns(source.iter_batches(_ROWS, columns=names), columns[1:], path)
            batches = (batch.select(columns) for batch in source.iter_batches(_ROWS, columns=columns))
            contents = decode(batches, dtype, path, decoded)
            pa.default_memory_pool().release_unused()
    except StorageError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the latter of a damaged name in the schema
        raise UserError(f"{path}: not a complete Parquet file ({error}): copy or write it again") from error
    return contents
