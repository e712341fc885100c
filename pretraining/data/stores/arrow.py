"""Arrow IPC shards: one document per record batch (fms-fsdp's layout) or one per element of a list column.

A stream (what Hugging Face's datasets save) is read message after message, a file by the places in its footer: polars
pads between them. pyarrow parses the messages; the position of a buffer in the file is its distance from the body of
its message. Decided by measurement: with one document per record batch, pyarrow takes 10 us
of CPU time a document (0.10 / 1.1 / 8.7 s for 10^4 / 10^5 / 10^6 documents, 30 MiB), where a vectorised reader of the
headers took 1.8 us (1.8 s and 174 MiB for 10^6); with 64 documents per batch of a list column both take 0.3 us. That
reader was 220 lines, and an index is built once and kept, so pyarrow is the only path.
"""

from __future__ import annotations

import io
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores import MAGIC
from pretraining.data.stores.labels import LABELS, LOSS_MASK, POSITIONS
from pretraining.data.stores.shard import TOKEN_TYPES, ShardContents
from pretraining.storage import BUFFER, StorageError, is_remote, location, size_of

if TYPE_CHECKING:
    import pyarrow as pa

# A record batch in the footer of a file: of its message, the place, and the bytes before the body (File.fbs, Block).
_BLOCK = np.dtype([("place", "<i8"), ("header", "<i4"), ("padding", "<i4"), ("body", "<i8")])
_RECORD_BATCHES = 3  # number of the field in the footer's table
NULLS = "the token column has nulls: write a document without tokens as an empty list"
COMPRESSED = "compressed buffers cannot be read in place: write the shard without compression"
# Bytes of a message from which on its body is left out when it is indexed: a request for less takes as long.
LARGE = 1 << 16


def refuse_labels(schema: pa.Schema, batches: object, column: str, path: str, decoded: str) -> None:
    """Raise UserError for a shard with labels, in place of the extension that decodes them."""
    if label_columns(schema, column):
        remedy = "add the folder pretraining/extensions/shard_formats, and its name to NAMES of main_training.py"
        raise UserError(f"{path}: nothing here reads its labels: {remedy}")


def index_arrow(
    path: str, column: str, decoded: str, read_labels: Callable[..., ShardContents | None] = refuse_labels
) -> ShardContents:
    """Return the documents of an Arrow file, from its column `column`; with labels, their tokens are in `decoded`.

    read_labels: see extensions/shard_formats; None of a shard without. UserError names the path if the file is not
    complete, or its column has nulls, compression or the wrong type.
    """
    import pyarrow as pa

    try:
        # pyarrow opens a file of its own in half the time; a path may not be UTF-8
        with location(path).open("rb", LARGE) if is_remote(path) else pa.OSFile(os.fsencode(path)) as source:
            if source.read(len(MAGIC)) == MAGIC:
                footer = _footer(source)
                schema, blocks = pa.ipc.open_file(pa.BufferReader(MAGIC + footer)).schema, _blocks(footer)
                files = map(pa.ipc.open_file, [source])  # opened for labels alone
                batches = (file.get_batch(number) for file in files for number in range(file.num_record_batches))
            else:
                source.seek(0)
                batches, blocks = pa.ipc.open_stream(source), None
                schema = batches.schema
            if contents := read_labels(schema, batches, column, path, decoded):
                _refuse_rest(source, blocks)
                return contents
            mean = size_of(location(path)) // (1 if blocks is None else max(1, len(blocks)))  # bytes of a batch
            if mean < LARGE and not is_remote(path):
                return _read_messages(source, None, column, path, schema, blocks)
        with location(path).open("rb", BUFFER if mean < BUFFER else LARGE) as source:
            headers = WithoutBodies(source)
            return _read_messages(pa.PythonFile(headers, "r"), headers, column, path, schema, blocks)
    except StorageError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, EOFError) as error:
        if "decompress" in str(error):
            raise UserError(f"{path}: {COMPRESSED}") from error
        raise UserError(f"{path}: not a complete Arrow file ({error}): copy or write it again") from error


class WithoutBodies(io.RawIOBase):
    """A file for pyarrow that does not read the bodies of large messages: they consist of zeros."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._position, self._size, self._before = file, 0, file.seek(0, io.SEEK_END), 0

    def readable(self) -> bool:  # what io.RawIOBase declares
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        count = min(size, self._size - self._position)
        is_body = size >= LARGE and self._before > 8  # behind the 4 bytes of its size, a message has its description
        data = bytes(count) if is_body else self.read_at(self._position, count)
        self._position, self._before = self._position + len(data), size
        return data

    def read_at(self, start: int, count: int) -> bytes:
        """Return the bytes that are in the file."""
        self._file.seek(start)
        return self._file.read(count)


def _footer(source: BinaryIO) -> bytes:
    """Return the end of a file.

    After its magic number, pyarrow opens it like the file. That it would read by threads of its own, which takes twice
    the CPU time, and up to ten times as long where the cores have other work.
    """
    source.seek(-4 - len(MAGIC), io.SEEK_END)
    end = source.read()
    if not end.endswith(MAGIC):
        raise EOFError("its end is missing")
    source.seek(-len(end) - int.from_bytes(end[:4], "little"), io.SEEK_END)
    return source.read()


def _blocks(footer: bytes) -> np.ndarray:
    """Return the record batches that a footer lists, _BLOCK. pyarrow has verified it."""
    (table,) = struct.unpack_from("<I", footer)  # a flatbuffer: the root's table, and before it where its fields are
    fields = table - struct.unpack_from("<i", footer, table)[0]
    has_field = struct.unpack_from("<H", footer, fields)[0] > 4 + 2 * _RECORD_BATCHES
    place = struct.unpack_from("<H", footer, fields + 4 + 2 * _RECORD_BATCHES)[0] if has_field else 0
    if not place:
        return np.zeros(0, _BLOCK)
    vector = table + place + struct.unpack_from("<I", footer, table + place)[0]
    return np.frombuffer(footer, _BLOCK, struct.unpack_from("<I", footer, vector)[0], vector + 4)


def _bodies(source: pa.NativeFile, blocks: np.ndarray | None) -> Iterator[tuple[pa.Message, int]]:
    """Yield the record batches of a file, or of a stream (None), each with the place of its body."""
    import pyarrow as pa

    if blocks is None:
        source.seek(0)
        messages = pa.ipc.MessageReader.open_stream(source)
        messages.read_next_message()  # the schema
        yield from ((message, source.tell() - message.body.size) for message in messages
                    if message.type == "record batch")  # and no dictionary of another column  # fmt: skip
        _refuse_rest(source, blocks)
        return
    for place, header, _, _ in blocks.tolist():
        source.seek(place)
        message = pa.ipc.read_message(source)
        if message.type != "record batch":
            raise pa.ArrowInvalid(f"a {message.type} where its footer lists a record batch")
        yield message, place + header


def _refuse_rest(source: BinaryIO, blocks: np.ndarray | None) -> None:
    """Raise ArrowInvalid if something follows a stream that was read, such as a second one: nothing reads it."""
    import pyarrow as pa

    if blocks is None and source.read(1):
        raise pa.ArrowInvalid("bytes follow the end of its stream; join streams with pyarrow, not with cat")


def _read_messages(
    source: pa.NativeFile,
    headers: WithoutBodies | None,
    column: str,
    path: str,
    full_schema: pa.Schema,
    blocks: np.ndarray | None,
) -> ShardContents:
    """Return the documents. blocks: see _bodies. headers: what `source` reads, if that is without bodies."""
    import pyarrow as pa

    dtype = token_type(full_schema, column, path)
    schema = _schema_up_to(full_schema, column)
    width, lists = np.dtype(dtype).itemsize, is_list(full_schema.field(column).type)
    starts, lengths = array("q"), array("q")  # 8 bytes a document, where Python's integers take 36
    for message, begin in _bodies(source, blocks):
        body = message.body
        documents = pa.ipc.read_record_batch(message, schema).column(column)
        documents.validate()
        values = documents.values if lists else documents
        if documents.null_count or values.null_count:
            raise UserError(f"{path}: {NULLS}")
        first = begin + _place_in_body(values.buffers()[1], body, path)
        if lists:
            offsets = list_offsets(documents)
            if headers and body.size >= LARGE and not pa.types.is_fixed_size_list(documents.type):
                buffer = documents.buffers()[1]
                raw = headers.read_at(begin + _place_in_body(buffer, body, path), buffer.size)
                kind = documents.offsets.type.to_pandas_dtype()
                offsets = np.frombuffer(raw, kind, len(documents) + 1).astype(np.int64)
                if offsets[0] < 0 or offsets[-1] > len(values):  # pyarrow has validated the zeros
                    raise pa.ArrowInvalid(f"a document ends at token {offsets[-1]:,} of {len(values):,}")
            starts.frombytes((offsets[:-1] * width + first).tobytes())
            lengths.frombytes(np.diff(offsets).tobytes())
        else:
            starts.append(first)
            lengths.append(len(documents))
    return ShardContents(path, dtype, np.frombuffer(starts, np.int64), np.frombuffer(lengths, np.int64))


def _place_in_body(buffer: pa.Buffer | None, body: pa.Buffer, path: str) -> int:
    """Return the distance of a buffer from the beginning of the body that it is in; 0 for none."""
    place = int(buffer.address - body.address) if buffer else 0
    if not 0 <= place <= body.size:  # pyarrow decompressed it
        raise UserError(f"{path}: {COMPRESSED}")
    return place


def _schema_up_to(schema: pa.Schema, column: str) -> pa.Schema:
    """Return the schema that a record batch is read with: dictionary-encoded columns are read as their indices."""
    import pyarrow as pa

    fields = [schema.field(number) for number in range(schema.get_field_index(column) + 1)]
    kinds = [field.type.index_type if pa.types.is_dictionary(field.type) else field.type for field in fields]
    return pa.schema([field.with_type(kind) for field, kind in zip(fields, kinds, strict=True)])


def token_type(schema: pa.Schema, column: str, path: str) -> str:
    """Return the dtype of the ids in `column`. UserError if there is no such column, or it holds no token ids."""
    if schema.get_field_index(column) < 0:  # of several columns of a name, too
        raise UserError(f"{path}: no single column {column!r} among {', '.join(schema.names)}: choose with --col_name")
    kind = schema.field(column).type
    value = str(kind.value_type if is_list(kind) else kind)
    if value not in TOKEN_TYPES:
        allowed = ", ".join(TOKEN_TYPES)
        raise UserError(f"{path}: column {column!r} holds {kind}; token ids are {allowed}, or a list of one of them")
    return value


def label_columns(schema: pa.Schema, column: str) -> list[str]:
    """Return the columns that mark the tokens of `column`, the one with labels first; empty for a shard without."""
    lists = [field.name for field in schema if is_list(field.type)]
    labels = [name for name in (LABELS, LOSS_MASK) if name in lists and column in lists][:1]
    return [*labels, *(name for name in lists if labels and name == POSITIONS)]


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
    return np.asarray(lists.offsets.to_numpy(), np.int64)
