"""The store of objects: what a run does with s3:// and gs:// paths besides the methods of a path.

There is no rename and there are no locks: the files of a checkpoint are written to its name, and its marker last.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING

from pretraining.extensions.object_storage.objects import ObjectFile, ObjectPath
from pretraining.extensions.object_storage.settings import ObjectStorageConfig
from pretraining.storage import DAMAGED, LOCK, MARKER, Stamp

if TYPE_CHECKING:
    from pretraining.extensions.object_storage.ahead import RequestedAhead


class StoredFile:
    """See pretraining.storage.OpenFile. The object is opened at its first use, and compared with its stamp."""

    is_local = False

    def __init__(self, path: ObjectPath, stamp: Stamp | None = None) -> None:
        """stamp: that the object must have; None: any."""
        self.path, self.stamp, self._location = str(path), stamp, path
        self._object: ObjectFile | None = None
        self._lock = Lock()

    @property
    def object(self) -> ObjectFile:
        """The open object."""
        with self._lock:
            self._object = self._object or ObjectFile(self._location, self.stamp)
            return self._object

    @property
    def size(self) -> int:
        return self.object.stamp.size

    def read_at(self, start: int, count: int) -> bytes:
        return self.object.read_at(start, count)

    def pread(self, count: int, start: int) -> bytes:
        return self.read_at(start, count)

    def preadv(self, targets: Sequence[memoryview], start: int) -> int:
        targets[0][:] = self.read_at(start, len(targets[0]))
        return len(targets[0])

    def in_order(self) -> Callable[[int, int], bytes]:
        """See OpenFile: a MiB is requested at a time."""
        buffered = self._location.open()

        def read_at(start: int, count: int) -> bytes:
            buffered.seek(start)
            return buffered.read(count)

        return read_at

    def check(self) -> None:
        """Do nothing: every read proves the version."""

    def close(self) -> None:
        """Forget the object."""
        self._object = None


class Upload:
    """An object that is written from its beginning to its end, and exists from then on.

    Parts are not sent in the background, because pyarrow keeps all that wait in memory. Parts of an upload that was
    never ended are invisible, and pyarrow cannot list them: a rule of the S3 bucket removes them
    (AbortIncompleteMultipartUpload); Google's storage does by itself.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._stream = path.output()

    def write_at(self, data: memoryview, start: int) -> None:
        """Append. Raises OSError."""
        self._stream.write(data)

    def finish(self) -> None:
        """End the object. Raises OSError if any of it was not stored."""
        self._stream.close()


class ObjectStore:
    """See pretraining.storage.Store."""

    is_remote, writes_in_order = True, True
    requests = 16  # threads wait for the network most of the time
    open_files = 4096  # 2 KB of memory each and no descriptor, but opening one again takes a request

    def location(self, path: str) -> ObjectPath:
        return ObjectPath(path.rstrip("/"))

    def stamp(self, path: str | ObjectPath) -> Stamp:
        return (self.location(path) if isinstance(path, str) else path).stamp()

    def size(self, path: ObjectPath) -> int:
        return path.size()

    def head(self, path: ObjectPath, count: int) -> bytes:
        return path.head(count)

    def open(self, path: str | ObjectPath, stamp: Stamp | None = None, name: str = "") -> StoredFile:
        return StoredFile(self.location(path) if isinstance(path, str) else path, stamp)

    def read_ahead(self, config: object) -> RequestedAhead:
        from pretraining.extensions.object_storage.ahead import RequestedAhead  # needs numpy
        from pretraining.extensions.object_storage.ranges import RangeCache

        settings = config if isinstance(config, ObjectStorageConfig) else ObjectStorageConfig()
        return RequestedAhead(RangeCache(settings.data_cache_dir, int(settings.data_cache_gib * 2**30)))

    @contextmanager
    def create(self, path: ObjectPath) -> Iterator[Upload]:
        upload = Upload(path)
        try:
            yield upload
        finally:  # after an error, too: pyarrow would end it when it is collected, while no other thread may run
            with suppress(OSError):
                upload.finish()

    def write_file(self, path: ObjectPath, data: bytes) -> None:
        path.write_bytes(data)

    def sync(self, folder: ObjectPath) -> None:
        """Do nothing: an object has its name from the beginning."""

    def lock(self, folder: ObjectPath, setting: str) -> None:
        """Write down who uses the folder: nothing can be locked."""
        (folder / LOCK).write_bytes(f"last used from {socket.gethostname()}\n".encode())

    def unfinished(self, final: ObjectPath) -> ObjectPath:
        return final

    def make_folder(self, folder: ObjectPath) -> None:
        """Do nothing: a folder is there with its first object."""

    def complete(self, partial: ObjectPath, final: ObjectPath) -> None:
        """Do nothing: the marker has completed it."""

    def left_over(self, folder: ObjectPath) -> list[ObjectPath]:
        from pretraining.checkpoint.folder import find_checkpoints  # imports torch, which a start does later

        uncommitted = [folder / path.name for path in find_checkpoints(folder).uncommitted]
        return [path for path in uncommitted if not (path / (MARKER + DAMAGED)).is_file()]

    def remove_folder(self, folder: ObjectPath) -> None:
        if (folder / MARKER).is_file():
            (folder / MARKER).unlink()
        folder.remove_all()

    def set_aside(self, folder: ObjectPath) -> None:
        (folder / MARKER).replace(folder / (MARKER + DAMAGED))


OBJECTS = ObjectStore()
