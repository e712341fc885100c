"""What every store reports of one shard: the file of its tokens, and where each document begins and how long it is.

Does not depend on the order of the data, mixtures or sidecars. Files are read with pread and never mapped: a file
truncated while it is mapped kills the process with SIGBUS; a short pread is an error with a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretraining.config.errors import UserError

# Types of one token in a file. Batches hold int32, so the two types of 4 bytes are read without a conversion.
TOKEN_TYPES = ("int32", "uint32", "uint16", "int64", "uint64")


class Stamp(NamedTuple):
    """Size and modification time of a file: they differ when the file was changed after it was indexed."""

    size: int  # bytes
    modified: int  # nanoseconds

    @classmethod
    def of(cls, path: str | Path) -> Stamp:
        """Return the stamp of a file. UserError if it does not exist."""
        try:
            status = Path(path).stat()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: check that the data is still there") from error
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class DiskArray:
    """A one-dimensional array in a file: `length` elements of `dtype` from byte `offset` of `path`."""

    path: str
    offset: int
    dtype: str
    length: int

    def __len__(self) -> int:
        return self.length

    def read(self, descriptor: int, start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) through an open descriptor of `path`."""
        size = np.dtype(self.dtype).itemsize
        raw = read_exactly(descriptor, (stop - start) * size, self.offset + start * size, self.path)
        return np.frombuffer(raw, self.dtype)


@dataclass(frozen=True)
class ShardContents:
    """The documents of one shard, empty ones included, in memory or in a file that holds the same arrays."""

    tokens: str  # the file that holds the tokens: the shard itself, its .bin, or its decoded copy
    dtype: str  # one of TOKEN_TYPES
    starts: np.ndarray | DiskArray  # int64 [documents], byte offset of the first token
    lengths: np.ndarray | DiskArray  # int32 or int64 [documents], tokens
    trained: int | None = None  # tokens that are trained; None: all, and the ids have no marks (stores.labels)


def chunks(array: np.ndarray | DiskArray, size: int) -> Iterator[np.ndarray]:
    """Yield an array in consecutive pieces of at most `size` elements."""
    if isinstance(array, np.ndarray):
        for start in range(0, len(array), size):
            yield array[start : start + size]
        return
    with open_descriptor(array.path) as descriptor:
        for start in range(0, len(array), size):
            yield array.read(descriptor, start, min(start + size, len(array)))


def in_memory(array: np.ndarray | DiskArray, dtype: type[np.signedinteger]) -> np.ndarray:
    """Return the whole array as `dtype`, [len(array)]."""
    return next(chunks(array, max(1, len(array))), np.zeros(0, dtype)).astype(dtype)


@contextmanager
def open_descriptor(path: str) -> Iterator[int]:
    """Open a file for reading. UserError if it does not exist or may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: check that the data is still there") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, count: int, offset: int, path: str) -> bytes:
    """Return `count` bytes from byte `offset`. UserError if the file ends before or cannot be read there."""
    raw = b""
    while len(raw) < count:  # Linux reads at most 2 GiB at once
        try:
            more = os.pread(descriptor, count - len(raw), offset + len(raw))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror} at byte {offset + len(raw)}: copy the file again") from error
        if not more:
            end = offset + count
            raise UserError(f"{path}: truncated at byte {offset + len(raw)}, before byte {end}: copy the file again")
        raw = raw + more if raw else more
    return raw


def to_int32(tokens: np.ndarray, path: str) -> np.ndarray:
    """Return ids of 8 bytes as int32, other types as they are. UserError if an id is outside 0..2^31-1."""
    if tokens.itemsize != 8:
        return tokens
    low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if high >= 2**31 or low < 0:
        wrong = high if high >= 2**31 else low
        raise UserError(f"{path}: token id {wrong} is outside 0..2^31-1: write the shard again")
    return tokens.astype(np.int32)
