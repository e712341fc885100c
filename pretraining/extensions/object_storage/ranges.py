"""Ranges of shards in object storage: requested ahead by threads of their own, kept in memory or in a local folder.

The order of the data does not depend on what is kept. Memory and folder are bounded; a range that is not kept is
requested again. A range is returned only when its object is known to have had the indexed version after the range was
read: one request for the version proves that for all ranges of the object that were read before the request.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from pretraining.data.hashing import short_hash
from pretraining.extensions.files import write_atomically
from pretraining.extensions.object_storage.objects import ObjectFile
from pretraining.extensions.object_storage.store import StoredFile

# Requests at once, for all datasets of a stream: 64 of 300 KiB, 50 ms each, are 400 MB/s.
REQUESTS = 64
# Requests at once for versions, in threads of their own: behind the requests for ranges they would be late.
_VERSION_REQUESTS = 16
# Seconds after a range was read until the version is requested, or earlier if a reader waits for it. At 10 M tokens/s a
# range is used 0.4 s after it was requested (512 batches of 8192 tokens), and each of the two requests takes 50 ms.
_CONFIRM_AFTER = 0.1
# Bytes in memory for what is read ahead.
_IN_FLIGHT = 64 << 20
# Documents with at most so many bytes between them are read with one request, which takes as long as 1 MiB.
_GAP = 64 << 10


class Ranges(NamedTuple):
    """Ranges of a file, read. They are in order and do not overlap."""

    starts: Sequence[int]
    data: Sequence[bytes]

    def pread(self, count: int, start: int) -> bytes:
        """Return up to `count` bytes from `start` on, like os.pread; they are in one range."""
        place = bisect_right(self.starts, start) - 1
        begin = start - self.starts[place]
        return self.data[place][begin : begin + count]

    def read_at(self, start: int, count: int) -> bytes:
        return self.pread(count, start)


def joined(starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges to request for documents from `starts` to `ends`, without those that are empty."""
    order = np.argsort(starts)
    starts, ends = starts[order], ends[order]
    starts, ends = starts[ends > starts], np.maximum.accumulate(ends)[ends > starts]
    breaks = np.flatnonzero(starts[1:] - ends[:-1] > _GAP)
    if not len(breaks):
        return [(int(starts[0]), int(ends[-1]))]
    return list(zip(starts[np.r_[0, breaks + 1]].tolist(), ends[np.r_[breaks, len(ends) - 1]].tolist(), strict=True))


RangeKey = tuple[str, int, int]  # path, first byte, the byte after the last


class RangeData(NamedTuple):
    """The bytes of a range, and when they were read (time.monotonic())."""

    data: bytes
    object: ObjectFile | None  # to be confirmed before the bytes are used; None: they are
    read: float


class RangeCache:
    """The ranges requested last, for all datasets of a stream together. Threads may share it."""

    def __init__(self, folder: str, limit: int) -> None:
        """folder: that keeps at most `limit` bytes; if empty, memory does, and what is read ahead in any case."""
        self.limit, self._folder = limit, RangeFolder(Path(folder), limit) if folder else None
        self._memory = _IN_FLIGHT if folder else max(limit, _IN_FLIGHT)
        self._ranges: dict[RangeKey, Future[RangeData]] = {}  # the one used least lately first
        self._unconfirmed: dict[ObjectFile, float] = {}  # when a range was read that no version was requested after
        self._confirm_at = math.inf  # when `begin` requests the versions of all of these
        self._bytes, self._requested, self._lock = 0, 0, Lock()
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="storage")
        self._versions = ThreadPoolExecutor(_VERSION_REQUESTS, thread_name_prefix="versions")

    def has(self, file: StoredFile, ranges: list[tuple[int, int]]) -> bool:
        """Return whether all ranges are in memory or on their way."""
        return all((file.path, *range) in self._ranges for range in ranges)

    def begin(self, file: StoredFile, ranges: list[tuple[int, int]]) -> int:
        """Begin to read ranges that are not in memory; return their bytes."""
        with self._lock:
            before = self._requested
            for start, stop in ranges:
                self._begin(file, start, stop)
            size = self._requested - before
        if time.monotonic() > self._confirm_at:
            self._confirm_all()
        return size

    def read(self, file: StoredFile, ranges: list[tuple[int, int]]) -> Ranges:
        """Return ranges of a file. StorageError names a file that cannot be read, or has changed."""
        with self._lock:
            futures = [self._begin(file, start, stop) for start, stop in ranges]
        try:
            results = [future.result() for future in futures]
            for result in results:
                if result.object and not result.object.is_confirmed(result.read):
                    self._confirm_all(result.object)
                    result.object.confirm(result.read)
            return Ranges([start for start, _ in ranges], [result.data for result in results])
        except Exception:
            with self._lock:
                for start, stop in ranges:  # the next attempt requests them again
                    if self._ranges.pop((file.path, start, stop), None):
                        self._bytes -= stop - start
            raise

    def close(self) -> None:
        """Stop reading ahead and forget what is in memory."""
        with self._lock:
            for future in self._ranges.values():
                future.cancel()
            self._ranges.clear()
            self._unconfirmed.clear()
            self._bytes = 0

    def _confirm_all(self, besides: ObjectFile | None = None) -> None:
        """Begin to request the versions of all objects with unconfirmed ranges, besides one."""
        with self._lock:
            unconfirmed, self._unconfirmed, self._confirm_at = self._unconfirmed, {}, math.inf
        for file, read in unconfirmed.items():
            if file is not besides:
                self._versions.submit(file.confirm, read)  # an error is raised again where a range is needed

    def _begin(self, file: StoredFile, start: int, stop: int) -> Future[RangeData]:
        key = (file.path, start, stop)
        future = self._ranges.pop(key, None)
        if future is None or future.cancelled():
            future = self._pool.submit(self._fetch, file, start, stop)
            self._bytes += stop - start
            self._requested += stop - start
            while self._bytes > self._memory and self._ranges:
                oldest = next(iter(self._ranges))
                self._ranges.pop(oldest)
                self._bytes -= oldest[2] - oldest[1]
        self._ranges[key] = future
        return future

    def _fetch(self, file: StoredFile, start: int, stop: int) -> RangeData:
        if self._folder is None:
            opened = file.object
            data, read = opened.read_unconfirmed(start, stop - start), time.monotonic()
            with self._lock:
                self._unconfirmed[opened] = read
                self._confirm_at = min(self._confirm_at, read + _CONFIRM_AFTER)
            return RangeData(data, opened, read)
        name = f"{short_hash(file.path, str(file.stamp))}-{start}-{stop}"
        kept = self._folder.read(name, stop - start)
        if kept is None:
            kept = file.read_at(start, stop - start)
            self._folder.write(name, kept)
        return RangeData(kept, None, -math.inf)


class RangeFolder:
    """A local folder of ranges, one file each, that several processes may share.

    When it is full, ranges that no run has used since this one began make room for new ones; if there are none, nothing
    is added. Removing what was used least lately would keep nothing of data that are larger than the folder, because
    every epoch reads them all.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit, self._began, self._lock = folder, limit, time.time(), Lock()
        found = [(entry.stat(), entry.path) for entry in os.scandir(folder) if not entry.name.startswith(".")]
        self._bytes = sum(status.st_size for status, _ in found)
        self._old = [path for _, path in sorted(found, key=lambda pair: -pair[0].st_mtime)]  # the oldest last

    def read(self, name: str, size: int) -> bytes | None:
        """Return the content of a file and mark it as used; None if there is none, or not of this size."""
        path = self._folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data if len(data) == size else None

    def write(self, name: str, data: bytes) -> None:
        """Add a file if there is room, or room can be made. A folder that cannot be written keeps what it has."""
        with self._lock:
            while self._old and self._bytes + len(data) > self._limit:
                self._remove(Path(self._old.pop()))
            if self._bytes + len(data) > self._limit:
                return
            self._bytes += len(data)
        try:
            write_atomically(self._folder / name, data)
        except OSError:
            return

    def _remove(self, path: Path) -> None:
        try:
            status = path.stat()
            if status.st_mtime < self._began:
                path.unlink()
                self._bytes -= status.st_size
        except OSError:  # another process has removed it
            return
