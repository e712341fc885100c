"""What of shards in object storage is requested, and how long before a step needs it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from threading import Lock

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.corpus import DocumentBlock
from pretraining.extensions.object_storage.ranges import RangeCache, Ranges, joined
from pretraining.extensions.object_storage.store import StoredFile

# Groups of batches whose ranges are requested ahead (4 million tokens with 8 batches of [2, 4096] in a group), until
# they have half of the bytes that memory keeps in any case; and groups at once, so that a start is early.
FETCH_AHEAD, FETCH_BYTES, FETCH_AT_ONCE = 64, 32 << 20, 4


class RequestedAhead:
    """See pretraining.storage.ReadAhead."""

    def __init__(self, cache: RangeCache) -> None:
        self._cache = cache
        self._keeps_blocks = True  # whether a block is kept until it is read to its end
        # steps that were not read when ranges were requested last, in order, and the bytes that were requested for each
        self._fetched: deque[tuple[int, int]] = deque()
        self._fetched_bytes, self._lock = 0, Lock()

    def expect(self, size: int) -> None:
        """See ReadAhead: without room for all of these blocks, none is kept."""
        self._keeps_blocks = size <= self._cache.limit

    def joined(self, starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
        return joined(starts, ends)

    def begin(self, file: StoredFile, block: DocumentBlock, documents: tuple[int, int], *, is_whole: bool) -> int:
        return self._cache.begin(file, self._needed(file, block, documents, is_whole))

    def read(self, file: StoredFile, block: DocumentBlock, documents: tuple[int, int], *, is_whole: bool) -> Ranges:
        """See ReadAhead. StorageError names a file that cannot be read, or has changed."""
        return self._cache.read(file, self._needed(file, block, documents, is_whole))

    def follow(self, fetch: Callable[[int], int], first: int, length: int) -> None:
        end = first + FETCH_AHEAD * length
        with self._lock:
            while self._fetched and not first <= self._fetched[0][0] < end:
                self._fetched_bytes -= self._fetched.popleft()[1]
            begin = self._fetched[-1][0] + 1 if self._fetched else first
            for step in range(begin, min(begin + FETCH_AT_ONCE * length, end)):
                if self._fetched_bytes >= FETCH_BYTES:
                    return
                size = 0
                with contextlib.suppress(UserError):  # it is raised again at the batch that it belongs to
                    size = fetch(step)
                self._fetched.append((step, size))
                self._fetched_bytes += size

    def close(self) -> None:
        self._cache.close()

    def _needed(
        self, file: StoredFile, block: DocumentBlock, documents: tuple[int, int], is_whole: bool
    ) -> list[tuple[int, int]]:
        """Return the ranges to read: of the whole block also if it is kept, or is on its way."""
        if is_whole or self._keeps_blocks or self._cache.has(file, block.ranges):
            return block.ranges
        first, last = documents
        starts = np.asarray(block.starts[first:last])
        return joined(starts, starts + np.asarray(block.lengths[first:last]) * block.width)
