"""Arrow IPC shards: where each document lies in the file, and a safe way to read it.

One document per record batch in a flat column, as fms-fsdp writes, or lists, one document per row. The index is made
once per shard and kept beside the run; data folders are never written to.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pretraining.config.errors import UserError

SUFFIX = ".arrow"
INDEX_VERSION = 1
Index = npt.NDArray[np.int64]  # [documents, 2]: first byte, length in tokens


class Shard:
    """One file of documents, open for reading."""

    def __init__(self, path: Path, column: str, cache: Path) -> None:
        self.path = path
        self.dtype = _token_type(path, column)
        self.index = _cached_index(path, column, cache, self.dtype.itemsize)
        self.size = path.stat().st_size
        self._file = os.open(path, os.O_RDONLY)

    def read(self, first_byte: int, count: int) -> npt.NDArray[Any]:
        """`count` tokens from `first_byte` on. UserError if the file ends before them."""
        # pread, not mmap: a shard truncated while mapped kills the process with SIGBUS (180 against 278 M tokens/s).
        data = os.pread(self._file, count * self.dtype.itemsize, first_byte)
        if len(data) != count * self.dtype.itemsize:
            raise UserError(f"{self.path}: ends early; it has changed since training began")
        return np.frombuffer(data, self.dtype)

    def close(self) -> None:
        os.close(self._file)


def _open(path: Path) -> pa.ipc.RecordBatchFileReader:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a complete Arrow file ({error}); prepare this shard again") from error


def _token_type(path: Path, column: str) -> np.dtype[Any]:
    schema = _open(path).schema
    if column not in schema.names:
        raise UserError(f"{path}: no column {column!r} (it has {', '.join(schema.names)}); set --col_name")
    declared = schema.field(column).type
    value = declared.value_type if pa.types.is_list(declared) else declared
    if value not in (pa.uint16(), pa.int32(), pa.uint32(), pa.int64()):
        raise UserError(f"{path}: column {column!r} holds {declared}; token ids are uint16, int32, uint32 or int64")
    return np.dtype(value.to_pandas_dtype())


def _cached_index(path: Path, column: str, cache: Path, width: int) -> Index:
    """The index, mapped from its cache where that fits the shard's size and time."""
    stat = path.stat()
    identity = f"{INDEX_VERSION} {path.resolve()} {column} {stat.st_size} {stat.st_mtime_ns}"
    cached = cache / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.npy"
    if not cached.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = cached.with_suffix(f".{os.getpid()}.tmp")
        with fresh.open("wb") as file:
            np.save(file, _index(path, column, width))
        fresh.replace(cached)
    return np.load(cached, mmap_mode="r")


def _index(path: Path, column: str, width: int) -> Index:
    source = pa.memory_map(str(path))
    base = source.read_buffer(source.size()).address
    reader = _open(path)
    parts = [_batch_index(path, reader, i, column, base, source.size(), width) for i in range(reader.num_record_batches)]
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)


def _batch_index(
    path: Path, reader: pa.ipc.RecordBatchFileReader, number: int, column: str, base: int, size: int, width: int
) -> Index:
    try:
        array = reader.get_batch(number).column(column)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: record batch {number} is damaged ({error}); prepare this shard again") from error
    if pa.types.is_list(array.type):
        offsets, values = array.offsets.to_numpy().astype(np.int64), array.values
    else:
        offsets, values = np.array([0, len(array)], np.int64), array
    if array.null_count or values.null_count:
        raise UserError(f"{path}: record batch {number} holds nulls in {column!r}")
    if not len(values):
        return np.zeros((len(offsets) - 1, 2), np.int64)
    first = values.buffers()[1].address - base + values.offset * width
    if not 0 <= first <= size - len(values) * width:
        raise UserError(f"{path}: its buffers are compressed and cannot be read in place; write it uncompressed")
    return np.stack((first + offsets[:-1] * width, np.diff(offsets)), axis=1)
