"""Open files of shards: few at a time, closed when nobody reads them, checked for change while they are read."""

from __future__ import annotations

import hashlib
from threading import Lock

from pretraining.config.errors import UserError
from pretraining.storage import Location, OpenFile, Stamp, StorageError, store_of


class OpenFiles:
    """The files opened last. Threads may share it: a file that is evicted is closed by its last reader."""

    def __init__(self) -> None:
        self._files: dict[str, OpenFile] = {}
        self._remote: dict[str, OpenFile] = {}
        self._lock = Lock()

    def get(self, path: str, stamp: Stamp | None, shard: str) -> OpenFile:
        """Return the open file at `path`. UserError names the shard if it is not there, or not as `stamp` says."""
        file = self._files.get(path) or self._remote.get(path)
        if file is not None:
            return file
        store = store_of(path)
        files = self._remote if store.is_remote else self._files
        with self._lock:
            if path in files:  # opened by another thread in between
                return files[path]
            try:
                file = store.open(path, stamp, shard)
            except StorageError:
                raise
            except OSError as error:
                raise UserError(f"{shard}: {error.strerror} ({path}): restore it, it was there at the start") from error
            file.check()
            while len(files) >= store.open_files:
                del files[next(iter(files))]
            files[path] = file
            return file

    def close(self) -> None:
        """Close every file that nobody is reading."""
        with self._lock:
            self._files.clear()
            self._remote.clear()


def file_hash(path: Location) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
