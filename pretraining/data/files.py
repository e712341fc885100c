"""Open files of shards: few at a time, closed when nobody reads them, checked for change while they are read."""

from __future__ import annotations

import os
from threading import Lock

from pretraining.config.errors import UserError
from pretraining.data.index import ShardIndex
from pretraining.data.stores.shard import Column, Stamp

# Files kept open for the whole stream, whatever the number of shards or logical_shards; the usual limit is 1024.
_OPEN_FILES = 128


class OpenFile:
    """A file descriptor that lives as long as somebody holds this object."""

    def __init__(self, path: str, stamp: Stamp | None, shard: str) -> None:
        self.path, self.stamp, self.shard = path, stamp, shard
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.descriptor = -1
            raise UserError(f"{shard}: {error.strerror} ({path}); it was there when the run began") from error

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def check(self) -> None:
        """UserError if the file is no longer the one that was indexed."""
        if self.stamp is None:
            return
        found = os.fstat(self.descriptor)
        if found.st_nlink == 0:
            raise UserError(f"{self.shard}: removed or replaced while the run reads it; put the indexed file back")
        if found.st_size != self.stamp.size or found.st_mtime_ns != self.stamp.modified:
            raise UserError(f"{self.shard}: changed while the run reads it; put the indexed file back, or start anew")


class OpenFiles:
    """The files opened last. Threads may share it: a file that leaves is closed by its last reader."""

    def __init__(self) -> None:
        self._files: dict[str, OpenFile] = {}
        self._lock = Lock()

    def tokens(self, index: ShardIndex) -> OpenFile:
        """The file that holds the tokens of a shard."""
        return self._get(index.tokens, index.token_stamp, index.path)

    def column(self, column: Column, index: ShardIndex) -> OpenFile:
        """The file that holds a column of a shard's index; our own sidecars are not watched."""
        return self._get(column.path, None, index.path)

    def _get(self, path: str, stamp: Stamp | None, shard: str) -> OpenFile:
        file = self._files.get(path)
        if file is not None:
            return file
        with self._lock:
            file = OpenFile(path, stamp, shard)
            file.check()
            while len(self._files) >= _OPEN_FILES:
                del self._files[next(iter(self._files))]
            self._files[path] = file
            return file

    def close(self) -> None:
        """Let go of every file."""
        with self._lock:
            self._files.clear()
