"""Open files of shards: few at a time, closed when nobody reads them, checked for change while they are read."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from threading import Lock

from pretraining.config.errors import UserError
from pretraining.storage import Location, ObjectFile, ObjectPath, Stamp, is_remote, read_exactly

# Local files kept open for the whole stream, whatever the number of shards or logical_shards; the usual limit is 1024.
_OPEN_FILES = 128
# Objects kept open: 2 KB of memory each and no descriptor, but opening one again takes a request.
_OPEN_OBJECTS = 4096


class OpenFile:
    """A file that is closed with the last reference to it, or an object: only `read_at` and `object` can be used."""

    def __init__(self, path: str, stamp: Stamp | None, shard: str) -> None:
        """stamp: of the file when it was indexed; None: changes are not checked. shard: named in messages."""
        self.path, self.stamp, self.shard = path, stamp, shard
        self.descriptor, self.is_local = -1, not is_remote(path)
        self._object: ObjectFile | None = None
        self._lock = Lock()
        if not self.is_local:
            return
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{shard}: {error.strerror} ({path}): restore it, it was there at the start") from error
        self.pread, self.preadv = partial(os.pread, self.descriptor), partial(os.preadv, self.descriptor)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def read_at(self, start: int, count: int) -> bytes:
        if not self.is_local:
            return self.object.read_at(start, count)
        return read_exactly(self.descriptor, start, count, self.shard)

    @property
    def object(self) -> ObjectFile:
        """The object. The first use opens it and compares it with its stamp."""
        with self._lock:
            self._object = self._object or ObjectFile(ObjectPath(self.path), self.stamp)
            return self._object

    def check(self) -> None:
        """Raise UserError if a local file is no longer the one that was indexed."""
        if self.stamp is None or not self.is_local:
            return
        status = os.fstat(self.descriptor)
        if status.st_nlink == 0:
            raise UserError(f"{self.shard}: removed or replaced while the run reads it: restore the indexed file")
        if status.st_size != self.stamp.size or status.st_mtime_ns != self.stamp.modified:
            raise UserError(f"{self.shard}: changed while the run reads it: restore the indexed file, or start again")


class OpenFiles:
    """The files opened last. Threads may share it: a file that is evicted is closed by its last reader."""

    def __init__(self) -> None:
        self._files: dict[str, OpenFile] = {}
        self._objects: dict[str, OpenFile] = {}
        self._lock = Lock()

    def get(self, path: str, stamp: Stamp | None, shard: str) -> OpenFile:
        """Return the open file at `path`. The other parameters: see OpenFile."""
        file = self._files.get(path) or self._objects.get(path)
        if file is not None:
            return file
        files, limit = (self._objects, _OPEN_OBJECTS) if is_remote(path) else (self._files, _OPEN_FILES)
        with self._lock:
            if path in files:  # opened by another thread in between
                return files[path]
            file = OpenFile(path, stamp, shard)
            file.check()
            while len(files) >= limit:
                del files[next(iter(files))]
            files[path] = file
            return file

    def close(self) -> None:
        """Close every file that nobody is reading."""
        with self._lock:
            self._files.clear()
            self._objects.clear()


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file that appears under its name only when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
    temporary.replace(path)


def file_hash(path: Location) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
