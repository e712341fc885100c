"""What the stream needs to know of one shard, whatever its format: where each document lies and how long it is.

Knows nothing of order, mixtures or sidecars. Columns are read with pread and never mapped: a file truncated under a
mapping kills the process with SIGBUS, a short pread is an error with a path.
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

# What a file may hold of one token. Ids are delivered as int32, so the two of 4 bytes are read without a copy.
TOKEN_TYPES = ("int32", "uint32", "uint16", "int64")


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A file descriptor for reading. UserError if the file is gone or may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; is the data still in its place?") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, count: int, offset: int, path: str) -> bytes:
    """`count` bytes at `offset`. UserError if the file ends before."""
    raw = os.pread(descriptor, count, offset)
    while len(raw) < count:  # Linux reads at most 2 GiB at once
        more = os.pread(descriptor, count - len(raw), offset + len(raw))
        if not more:
            raise UserError(f"{path}: ends at byte {offset + len(raw)}, before byte {offset + count}; it is truncated")
        raw += more
    return raw


class Column(NamedTuple):
    """An array on disk: `length` elements of `dtype` at byte `offset` of `path`."""

    path: str
    offset: int
    dtype: str
    length: int

    def read(self, descriptor: int, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) through an open descriptor of `path`."""
        size = np.dtype(self.dtype).itemsize
        raw = read_exactly(descriptor, (stop - start) * size, self.offset + start * size, self.path)
        return np.frombuffer(raw, self.dtype)


class Documents(NamedTuple):
    """The documents of one shard in memory, as a store hands them to the index. Byte offsets, lengths in tokens."""

    starts: np.ndarray  # int64 [documents], byte offset of the first token
    lengths: np.ndarray  # int32 [documents], empty documents included


@dataclass(frozen=True)
class Layout:
    """One shard as its store found it: either `documents`, or columns of the user's own files that hold the same."""

    tokens: str  # the file that holds the tokens: the shard itself, or its decoded copy
    dtype: str  # one of TOKEN_TYPES
    documents: Documents | None
    starts: Column | None = None
    lengths: Column | None = None


class Stamp(NamedTuple):
    """What tells a changed file from the one that was indexed."""

    size: int  # bytes
    modified: int  # nanoseconds

    @classmethod
    def of(cls, path: str | Path) -> Stamp:
        """The stamp of a file. UserError if it is gone."""
        try:
            found = Path(path).stat()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; is the data still in its place?") from error
        return cls(found.st_size, found.st_mtime_ns)


def checked_lengths(lengths: np.ndarray, path: str) -> np.ndarray:
    """Lengths as int32. UserError if one is negative or has 2^31 tokens or more."""
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) >= 2**31):
        raise UserError(f"{path}: a document has {int(lengths.max()):,} tokens (or fewer than none); it is damaged")
    return lengths.astype(np.int32, copy=False)
