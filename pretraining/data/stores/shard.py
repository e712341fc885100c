"""What every store reports of one shard: the file of its tokens, and where each document begins and how long it is.

Does not depend on the order of the data, mixtures or sidecars. Files are read with pread and never mapped: a file
truncated while it is mapped kills the process with SIGBUS; a short pread is an error with a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pretraining.config.errors import UserError
from pretraining.storage import opened

# Types of one token in a file. Batches hold int32, so the two types of 4 bytes are read without a conversion.
TOKEN_TYPES = ("int32", "uint32", "uint16", "int64", "uint64")


class Readable(Protocol):
    """A file that is open for reading, or ranges of one."""

    def read_at(self, start: int, count: int) -> bytes:
        """Return `count` bytes from byte `start` on. UserError names the file if it does not hold them."""


@dataclass(frozen=True)
class DiskArray:
    """A one-dimensional array in a file: `length` elements of `dtype` from byte `offset` of `path`."""

    path: str
    offset: int
    dtype: str
    length: int

    def __len__(self) -> int:
        return self.length

    def read(self, file: Readable, start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) from the opened `path`."""
        size = np.dtype(self.dtype).itemsize
        return np.frombuffer(file.read_at(self.offset + start * size, (stop - start) * size), self.dtype)


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
    with opened(array.path) as file:
        for start in range(0, len(array), size):
            yield array.read(file, start, min(start + size, len(array)))


def in_memory(array: np.ndarray | DiskArray, dtype: type[np.signedinteger]) -> np.ndarray:
    """Return the whole array as `dtype`, [len(array)]."""
    return next(chunks(array, max(1, len(array))), np.zeros(0, dtype)).astype(dtype)


def to_int32(tokens: np.ndarray, path: str) -> np.ndarray:
    """Return ids of 8 bytes as int32, other types as they are. UserError if an id is outside 0..2^31-1."""
    if tokens.itemsize != 8:
        return tokens
    low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if high >= 2**31 or low < 0:
        wrong = high if high >= 2**31 else low
        raise UserError(f"{path}: token id {wrong} is outside 0..2^31-1: write the shard again")
    return tokens.astype(np.int32)
