"""Arrow IPC shards: one document per record batch (fms-fsdp's layout) or one per element of a list column.

The IPC file format and the stream format (what Hugging Face's datasets save) are read alike, message after message: a
file is a stream between two magic numbers. pyarrow parses the messages; the position of a buffer in the file is its
distance from the body of its message. Decided by measurement: with one document per record batch, pyarrow takes 10 us
of CPU time a document (0.10 / 1.1 / 8.7 s for 10^4 / 10^5 / 10^6 documents, 30 MiB), where a vectorised reader of the
headers took 1.8 us (1.8 s and 174 MiB for 10^6); with 64 documents per batch of a list column both take 0.3 us. That
reader was 220 lines, and an index is built once and kept, so pyarrow is the only path.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.labels import NULLS, decode, is_list, label_columns, list_offsets
from pretraining.data.stores.shard import TOKEN_TYPES, ShardContents

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"  # the continuation marker that begins every message
_FILE_PREFIX = 8  # bytes before the first message of a file: the magic number, padded


def index_arrow(path: str, column: str, decoded: str) -> ShardContents:
    """Return the documents of an Arrow file, from its column `column`; with labels, their tokens are in `decoded`.

    UserError names the path if the file is not complete, or its column has nulls, compression or the wrong type.
    """
    import pyarrow as pa

    try:
        with pa.OSFile(path) as source:
            if source.read(len(MAGIC)) == MAGIC:
                file = pa.ipc.open_file(source)
                schema, count = file.schema, file.num_record_batches
                batches = map(file.get_batch, range(count))
            else:
                source.seek(0)
                batches, count = pa.ipc.open_stream(source), None
                schema = batches.schema
            dtype = token_type(schema, column, path)
            if labels := label_columns(schema, column):
                return decode((batch.select([column, *labels]) for batch in batches), dtype, path, decoded)
            source.seek(0 if count is None else _FILE_PREFIX)
            return _read_messages(source, column, path, count)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a complete Arrow file ({error}): copy or write it again") from error


def _read_messages(source: pa.NativeFile, column: str, path: str, batches: int | None) -> ShardContents:
    import pyarrow as pa

    messages = pa.ipc.MessageReader.open_stream(source)
    full_schema = pa.ipc.read_schema(messages.read_next_message())
    dtype = token_type(full_schema, column, path)
    schema = _schema_up_to(full_schema, column)
    width, lists = np.dtype(dtype).itemsize, is_list(full_schema.field(column).type)
    starts, lengths, count = array("q"), array("q"), 0  # 8 bytes a document, where Python's integers take 36
    for message in messages:
        if message.type != "record batch":  # a dictionary of another column
            continue
        count += 1
        documents = pa.ipc.read_record_batch(message, schema).column(column)
        documents.validate()
        values = documents.values if lists else documents
        if documents.null_count or values.null_count:
            raise UserError(f"{path}: {NULLS}")
        body, buffer = message.body, values.buffers()[1]
        in_body = buffer.address - body.address if buffer else 0
        if not 0 <= in_body <= body.size:  # pyarrow decompressed it
            raise UserError(f"{path}: compressed buffers cannot be read in place: write the shard without compression")
        first = source.tell() - body.size + in_body
        if lists:
            offsets = list_offsets(documents)
            starts.frombytes((offsets[:-1] * width + first).tobytes())
            lengths.frombytes(np.diff(offsets).tobytes())
        else:
            starts.append(first)
            lengths.append(len(documents))
    if batches is not None and count != batches:
        raise UserError(f"{path}: {count} record batches, but its footer lists {batches}: write the shard again")
    return ShardContents(path, dtype, np.frombuffer(starts, np.int64), np.frombuffer(lengths, np.int64))


def _schema_up_to(schema: pa.Schema, column: str) -> pa.Schema:
    """Return the schema that a record batch is read with: dictionary-encoded columns are read as their indices."""
    import pyarrow as pa

    fields = [schema.field(number) for number in range(schema.get_field_index(column) + 1)]
    kinds = [field.type.index_type if pa.types.is_dictionary(field.type) else field.type for field in fields]
    return pa.schema([field.with_type(kind) for field, kind in zip(fields, kinds, strict=True)])


def token_type(schema: pa.Schema, column: str, path: str) -> str:
    """Return the dtype of the ids in `column`. UserError if there is no such column, or it holds no token ids."""
    if column not in schema.names:
        raise UserError(f"{path}: no column {column!r}, it has {', '.join(schema.names)}: choose with --col_name")
    kind = schema.field(column).type
    value = str(kind.value_type if is_list(kind) else kind)
    if value not in TOKEN_TYPES:
        allowed = ", ".join(TOKEN_TYPES)
        raise UserError(f"{path}: column {column!r} holds {kind}; token ids are {allowed}, or a list of one of them")
    return value
