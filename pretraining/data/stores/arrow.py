"""Arrow IPC shards: one document per record batch (fms-fsdp's layout) or one per element of a list column.

Only the schema goes through pyarrow. The headers of the record batches are read directly: 10 thousand of them differ
in a few numbers only, so they are compared as one matrix and the numbers cut out of it (0.7 us a document; pyarrow
takes 8.6). Both the file format and the stream format (what Hugging Face's datasets save) are understood.
Source of the layout: Arrow's format/Columnar.rst, "IPC File Format".
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores import flatbuffer
from pretraining.data.stores.shard import TOKEN_TYPES, Documents, Layout, checked_lengths, opened, read_exactly

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"  # the continuation marker that begins every message
_PREFIX = 8  # continuation marker and length of the metadata
_RECORD_BATCH = 3  # MessageHeader.RecordBatch
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
# Headers compared at once: bounds the memory to about 16 MB and costs nothing in speed.
_AT_ONCE = 65_536


class Target(NamedTuple):
    """Where the token column lies among a record batch's nodes and buffers."""

    name: str
    dtype: str
    node: int
    buffer: int
    offsets: str | None  # dtype of a list column's offsets; None for a flat column


class Batches(NamedTuple):
    """What the headers of all record batches say of the token column; int64, one row per batch."""

    body: np.ndarray  # [batches] byte of the body in the file
    end: np.ndarray  # [batches] byte after the body
    nodes: np.ndarray  # [batches, 1 or 2, 2] (length, null count) of the column and, for a list, of its values
    buffers: np.ndarray  # [batches, 2 or 4, 2] (offset in the body, length)


def index_arrow(path: str, column: str) -> Layout:
    """The documents of an Arrow file, from its column `column`.

    UserError names the path if the file is not complete, or its column has nulls, compression or the wrong type.
    """
    schema, is_file = _schema(path)
    target = find_target(schema, column, path)
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        try:
            blocks = _footer_blocks(descriptor, size, path) if is_file else _stream_blocks(descriptor, size, path)
            batches = _read_batches(descriptor, blocks, target, path)
        except (struct.error, IndexError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: a record batch's header is damaged ({error}); write the shard again") from error
        _check(batches, target, size, path)
        documents = _flat(batches) if target.offsets is None else _lists(descriptor, batches, target, path)
    return Layout(path, target.dtype, documents)


# ---- Schema


def _schema(path: str) -> tuple[pa.Schema, bool]:
    """The schema and whether the file has a footer. Read, not mapped."""
    import pyarrow as pa

    try:
        with pa.OSFile(path) as source:
            is_file = source.read(len(MAGIC)) == MAGIC
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            return reader.schema, is_file
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a complete Arrow file ({error}); copy or write it again") from error


def find_target(schema: pa.Schema, column: str, path: str) -> Target:
    """Where the column `column` lies. UserError if there is none, or it holds no token ids."""
    if column not in schema.names:
        raise UserError(f"{path}: no column {column!r}, it has {', '.join(schema.names)}; choose with --col_name")
    kind = schema.field(column).type
    dtype = _token_type(kind)
    if dtype is None:
        allowed = ", ".join(TOKEN_TYPES)
        raise UserError(f"{path}: column {column!r} holds {kind}; tokens are {allowed}, or a list of one of them")
    node, buffer = 0, 0
    for name in schema.names[: schema.get_field_index(column)]:
        nodes, buffers = _parts(schema.field(name).type, path)
        node, buffer = node + nodes, buffer + buffers
    return Target(column, dtype, node, buffer, _offsets_type(kind))


def _offsets_type(kind: pa.DataType) -> str | None:
    import pyarrow as pa

    if pa.types.is_list(kind):
        return "int32"
    return "int64" if pa.types.is_large_list(kind) else None


def _token_type(kind: pa.DataType) -> str | None:
    """The dtype of the ids in a column of this type; None if it holds none."""
    value = kind.value_type if _offsets_type(kind) else kind
    return str(value) if str(value) in TOKEN_TYPES else None


def _parts(kind: pa.DataType, path: str) -> tuple[int, int]:
    """(nodes, buffers) that a column of this type takes in a record batch."""
    import pyarrow as pa

    types = pa.types
    if types.is_null(kind):
        return 1, 0
    if _offsets_type(kind) or types.is_map(kind):
        nodes, buffers = _parts(kind.value_type, path) if not types.is_map(kind) else _parts(_entries(kind), path)
        return nodes + 1, buffers + 2
    if types.is_fixed_size_list(kind):
        nodes, buffers = _parts(kind.value_type, path)
        return nodes + 1, buffers + 1
    if types.is_struct(kind):
        inner = [_parts(kind.field(number).type, path) for number in range(kind.num_fields)]
        return 1 + sum(nodes for nodes, _ in inner), 1 + sum(buffers for _, buffers in inner)
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return 1, 3
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        return 1, 2
    raise UserError(f"{path}: a column of type {kind} stands before the tokens; write the token column alone")


def _entries(kind: pa.MapType) -> pa.DataType:
    import pyarrow as pa

    return pa.struct([("key", kind.key_type), ("value", kind.item_type)])


# ---- Headers


def _footer_blocks(descriptor: int, size: int, path: str) -> np.ndarray:
    """Offset and sizes of every record batch, from the footer."""
    tail = read_exactly(descriptor, 10, size - 10, path)
    length = flatbuffer.int32(tail, 0)
    footer = read_exactly(descriptor, length, size - 10 - length, path)
    at, count = flatbuffer.vector(footer, flatbuffer.follow(footer, 0), 3)
    return np.frombuffer(footer, _BLOCK, count, at) if count else np.zeros(0, _BLOCK)


def _stream_blocks(descriptor: int, size: int, path: str) -> np.ndarray:
    """The same by walking from message to message. UserError if the file ends inside one."""
    blocks, at = [], 0
    while at + _PREFIX <= size:
        prefix = read_exactly(descriptor, _PREFIX, at, path)
        length = flatbuffer.int32(prefix, 4)
        if length == 0:  # end of stream
            break
        raw = read_exactly(descriptor, length, at + _PREFIX, path)
        message = flatbuffer.follow(raw, 0)
        kind, body = flatbuffer.field(raw, message, 1), flatbuffer.field(raw, message, 3)
        count = flatbuffer.int64(raw, body) if body is not None else 0
        if kind is not None and raw[kind] == _RECORD_BATCH:
            blocks.append((at, _PREFIX + length, 0, count))
        at += _PREFIX + length + count
    if at > size:
        raise UserError(f"{path}: ends at byte {size}, before byte {at}; it is truncated")
    return np.array(blocks, _BLOCK)


def _read_batches(descriptor: int, blocks: np.ndarray, target: Target, path: str) -> Batches:
    """The token column's numbers from every header, in chunks."""
    parts = [
        _read_headers(descriptor, blocks[start : start + _AT_ONCE], target, path)
        for start in range(0, len(blocks), _AT_ONCE)
    ] or [_empty(0, target)]
    return Batches(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _empty(count: int, target: Target) -> Batches:
    deep = 1 if target.offsets is None else 2
    shapes = ((count,), (count,), (count, deep, 2), (count, 2 * deep, 2))
    return Batches(*(np.zeros(shape, np.int64) for shape in shapes))


def _read_headers(descriptor: int, blocks: np.ndarray, target: Target, path: str) -> Batches:
    found = _empty(len(blocks), target)
    found.body[:] = blocks["offset"] + blocks["metadata"]
    found.end[:] = found.body + blocks["body"]
    for length in np.unique(blocks["metadata"]):
        rows = np.flatnonzero(blocks["metadata"] == length)
        starts = blocks["offset"][rows].tolist()
        raw = b"".join([read_exactly(descriptor, int(length), start, path) for start in starts])
        headers = np.frombuffer(raw, np.uint8).reshape(len(rows), int(length))
        while len(rows):  # as many rounds as there are layouts: one, and one more for empty documents
            rest = _cut_out(headers, rows, target, found, path)
            headers, rows = headers[rest], rows[rest]
    return found


def _cut_out(headers: np.ndarray, rows: np.ndarray, target: Target, found: Batches, path: str) -> np.ndarray:
    """Copy the numbers of all headers laid out like the first into `found`; the indices of the others."""
    nodes, buffers, variable = _positions(headers[0].tobytes(), path)
    fixed = np.ones(headers.shape[1], bool)
    for start, stop in variable:
        fixed[start:stop] = False
    alike = (headers[:, fixed] == headers[0, fixed]).all(axis=1)
    deep = found.nodes.shape[1]
    first = nodes + 16 * target.node
    found.nodes[rows[alike]] = _numbers(headers[alike], first, deep)
    found.buffers[rows[alike]] = _numbers(headers[alike], buffers + 16 * target.buffer, 2 * deep)
    return np.flatnonzero(~alike)


def _numbers(headers: np.ndarray, at: int, pairs: int) -> np.ndarray:
    """`pairs` pairs of int64 at byte `at` of every header: int64 [headers, pairs, 2]."""
    return np.ascontiguousarray(headers[:, at : at + 16 * pairs]).view("<i8").reshape(len(headers), pairs, 2)


def _positions(raw: bytes, path: str) -> tuple[int, int, list[tuple[int, int]]]:
    """(byte of the nodes, byte of the buffers, byte ranges that may differ from batch to batch) of one header."""
    raw = raw[_PREFIX:]
    message = flatbuffer.follow(raw, 0)
    kind, header = flatbuffer.field(raw, message, 1), flatbuffer.field(raw, message, 2)
    if kind is None or header is None or raw[kind] != _RECORD_BATCH:
        raise ValueError("not a record batch")
    batch = flatbuffer.follow(raw, header)
    if flatbuffer.field(raw, batch, 3) is not None:
        raise UserError(f"{path}: compressed buffers cannot be read in place; write the shard without compression")
    nodes, node_count = flatbuffer.vector(raw, batch, 1)
    buffers, buffer_count = flatbuffer.vector(raw, batch, 2)
    scalars = [at for at in (flatbuffer.field(raw, batch, 0), flatbuffer.field(raw, message, 3)) if at is not None]
    ranges = [(at, at + 8) for at in scalars]
    ranges += [(nodes, nodes + 16 * node_count), (buffers, buffers + 16 * buffer_count)]
    return nodes + _PREFIX, buffers + _PREFIX, [(start + _PREFIX, stop + _PREFIX) for start, stop in ranges]


# ---- Documents


def _check(batches: Batches, target: Target, size: int, path: str) -> None:
    """Every byte that will be read lies inside the file, and nothing is null."""
    if not len(batches.body):
        return
    if batches.nodes[:, :, 1].any():
        raise UserError(f"{path}: the token column has nulls; a document without tokens is an empty list")
    width = np.dtype(target.dtype).itemsize
    length, (offset, count) = batches.nodes[:, -1, 0], batches.buffers[:, -1].T
    inside = (length * width <= count) & (offset >= 0) & (batches.body + offset + count <= batches.end)
    if not inside.all() or int(batches.end.max()) > size:
        raise UserError(f"{path}: a record batch reaches beyond its end; the shard is truncated or damaged")


def _flat(batches: Batches) -> Documents:
    return Documents(batches.body + batches.buffers[:, 1, 0], batches.nodes[:, 0, 0].astype(np.int32))


def _lists(descriptor: int, batches: Batches, target: Target, path: str) -> Documents:
    """One document per list: the offsets are a buffer of their own in every batch."""
    width, kind = np.dtype(target.dtype).itemsize, np.dtype(target.offsets)
    starts: list[np.ndarray] = [np.zeros(0, np.int64)]
    lengths: list[np.ndarray] = [np.zeros(0, np.int64)]
    bodies, counts = batches.body.tolist(), batches.nodes[:, :, 0].tolist()
    for body, (lists, values), buffers in zip(bodies, counts, batches.buffers[:, :, 0].tolist(), strict=True):
        if not lists:
            continue
        raw = read_exactly(descriptor, (lists + 1) * kind.itemsize, body + buffers[1], path)
        edges = np.frombuffer(raw, kind).astype(np.int64)
        if edges[0] < 0 or edges[-1] > values or (len(edges) > 2 and int(np.diff(edges).min()) < 0):
            raise UserError(f"{path}: the offsets of a list column are damaged; write the shard again")
        starts.append(body + buffers[3] + edges[:-1] * width)
        lengths.append(np.diff(edges))
    return Documents(np.concatenate(starts), checked_lengths(np.concatenate(lengths), path))
