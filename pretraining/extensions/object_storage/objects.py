"""Objects of S3 and of Google's storage as paths and open files, by pyarrow's client.

The credentials are those that the clouds' own tools find (environment, shared files, roles of the machine). A request
that fails in passing is repeated with growing pauses and counted, and an object that vanished, changed or may not be
read is one error that names it.

obstore 0.12.1 would prove the version with every read (if_match: 412 from S3 where the object was replaced), but it
reads no credentials of shared files, such as ~/.aws/credentials, without boto3, and for Google's storage it speaks the
XML API, of which the emulator in the tests has neither HEAD nor listings (both 501).
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from pretraining.config.flags import first_rank
from pretraining.storage import BUFFER, Stamp, StorageError, Store, UnreachableError

if TYPE_CHECKING:
    from pyarrow import fs

T = TypeVar("T")

# A request that fails in passing is repeated for so long, s: the restart of a storage node takes less than a minute.
RETRY_FOR = 90.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # s, before jitter; each pause is twice as long as the one before
# Process 0 prints what is waited for from the first pause of this length on, and again after as many seconds.
SHOWN_PAUSE, SHOWN_EVERY = 1.0, 8.0
# Errors in pyarrow's messages that no repetition cures.
_NO_BUCKET = ("NO_SUCH_BUCKET", "InvalidBucketName")
_PERMANENT = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "EXPIRED_TOKEN",
              "INVALID_CLIENT_TOKEN_ID", "PERMISSION_DENIED", "HTTP status 403", *_NO_BUCKET)  # fmt: skip
_BEYOND_END = "HTTP status 416"  # of a range in an object that became shorter than it was when it was opened
_CHANGED = "changed while it is read: restore the indexed object, or start again"
GOOGLE = "gs://"
# Bytes of the smallest read, where the object has as many: the client puts the storage's answer to a read that fails
# (of about 400 bytes) where the data would be, and reports a network error instead of it if there is no room.
SMALLEST_READ = 4 << 10


class Retries:
    """How many requests had to be repeated in this process. Threads may share it."""

    def __init__(self) -> None:
        self.count, self._shown, self._lock = 0, -SHOWN_EVERY, Lock()

    def add(self, waiting: str, pause: float) -> None:
        """Count one, before a pause of some seconds; print `waiting` if nothing was printed lately."""
        with self._lock:
            self.count += 1
            if pause >= SHOWN_PAUSE and time.monotonic() >= self._shown + SHOWN_EVERY and first_rank():
                self._shown = time.monotonic()
                print(waiting, flush=True)


RETRIES = Retries()


class MissingObjectError(StorageError, FileNotFoundError):
    """There is no such object."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object, or the objects whose names begin with `uri`/, with the methods of a pathlib.Path."""

    uri: str  # without a slash at the end
    info: Any = field(default=None, compare=False)  # pyarrow's FileInfo if a listing returned it

    def __str__(self) -> str:
        return self.uri

    def __reduce__(self) -> tuple[type[ObjectPath], tuple[str]]:
        return ObjectPath, (self.uri,)  # processes send each other paths, and pyarrow's FileInfo cannot be pickled

    @property
    def _parts(self) -> tuple[str, PurePosixPath]:
        scheme, _, rest = self.uri.partition("://")
        return scheme, PurePosixPath(rest)

    @property
    def store(self) -> Store:
        """See StoredPath."""
        from pretraining.extensions.object_storage.store import OBJECTS  # which imports this module

        return OBJECTS

    @property
    def name(self) -> str:
        """See pathlib.Path, as for the methods below."""
        return self._parts[1].name

    @property
    def stem(self) -> str:
        return self._parts[1].stem

    @property
    def suffix(self) -> str:
        return self._parts[1].suffix

    @property
    def parent(self) -> ObjectPath:
        return self._with(self._parts[1].parent)

    def __truediv__(self, name: str) -> ObjectPath:
        return self._with(self._parts[1] / name)

    def with_suffix(self, suffix: str) -> ObjectPath:
        return self._with(self._parts[1].with_suffix(suffix))

    def with_name(self, name: str) -> ObjectPath:
        return self._with(self._parts[1].with_name(name))

    def resolve(self) -> ObjectPath:
        return self

    def _with(self, path: PurePosixPath) -> ObjectPath:
        return ObjectPath(f"{self._parts[0]}://{path}")

    # ---- Requests

    def request(self, act: Callable[[fs.FileSystem, str], T]) -> T:
        """Return what `act` does with the client and the name of the object there; see the top of the module.

        Raises MissingObjectError or StorageError.
        """
        scheme, name = self._parts
        began, pause = time.monotonic(), FIRST_PAUSE
        until = time.strftime("%X", time.localtime(time.time() + RETRY_FOR))
        while True:
            try:
                return act(client_of(scheme, name.parts[0]), str(name))
            except FileNotFoundError as error:
                raise MissingObjectError(f"{self}: no such object: check that it is still there") from error
            except OSError as error:
                reason = str(error).splitlines()[0]
                if _BEYOND_END in reason:
                    raise StorageError(f"{self}: {_CHANGED}") from error
                if isinstance(error, PermissionError) or any(text in reason for text in _PERMANENT):
                    remedy = "check the credentials that the environment gives, and what they may do"
                    if any(text in reason for text in _NO_BUCKET):
                        remedy = f"check the name of the bucket, {name.parts[0]}, and its region"
                    raise StorageError(f"{self}: refused ({reason}): {remedy}") from error
                if time.monotonic() - began + pause > RETRY_FOR:
                    tried = f"tried for {RETRY_FOR:.0f} s ({reason})"
                    raise UnreachableError(f"{self}: cannot be reached, {tried}: check the network") from error
            RETRIES.add(f"waiting: {self} cannot be reached ({reason}), tried until {until}", pause)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _type(self) -> str:
        info = self.info or self.request(lambda client, name: client.get_file_info(name))
        return str(info.type.name)

    def exists(self) -> bool:
        return self._type() != "NotFound"

    def is_file(self) -> bool:
        return self._type() == "File"

    def is_dir(self) -> bool:
        return self._type() == "Directory"

    def iterdir(self) -> Iterator[ObjectPath]:
        return self._list(recursive=False)

    def rglob(self, pattern: str) -> Iterator[ObjectPath]:
        assert pattern == "*"
        return self._list(recursive=True)

    def _list(self, recursive: bool) -> Iterator[ObjectPath]:
        from pyarrow import fs

        def act(client: fs.FileSystem, name: str) -> list[fs.FileInfo]:
            listed: list[fs.FileInfo] = client.get_file_info(fs.FileSelector(name, recursive=recursive or is_google))
            return listed if recursive or not is_google else _direct(listed, name)

        is_google = self.uri.startswith(GOOGLE)
        for info in self.request(act):
            yield ObjectPath(f"{self._parts[0]}://{info.path}", info)

    def stamp(self) -> Stamp:
        """Return size and version. Raises MissingObjectError if there is no such object."""
        with ObjectFile(self) as file:
            return file.stamp

    def size(self) -> int:
        """Return the bytes of the object, as a listing or the storage reports them."""
        return int(self.info.size) if self.info else self.stamp().size

    def head(self, count: int) -> bytes:
        """Return the first bytes; those of a version that a listing returned are kept."""
        return _listed_head(self, count, self.info.size, self.info.mtime_ns) if self.info else _head(self, count)

    def open(self, mode: str = "rb", buffering: int = BUFFER) -> io.BufferedReader:
        """Open for reading; buffering: bytes that are requested at once."""
        assert mode == "rb"
        return io.BufferedReader(ObjectFile(self), buffering)

    def read_bytes(self) -> bytes:
        with ObjectFile(self) as file:
            return file.read_at(0, file.stamp.size)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> None:
        def act(client: fs.FileSystem, name: str) -> None:
            with client.open_output_stream(name) as stream:
                stream.write(data)

        self.request(act)

    def output(self) -> Any:
        """Return a stream that writes the object; the client sends a part again that could not be sent."""
        scheme, path = self._parts
        client = client_of(scheme, path.parts[0], attempts=8)
        return self.request(lambda _, name: client.open_output_stream(name))

    def replace(self, target: ObjectPath) -> None:
        self.request(lambda client, name: client.move(name, str(target._parts[1])))

    def unlink(self) -> None:
        self.request(lambda client, name: client.delete_file(name))

    def remove_all(self) -> None:
        """Remove every object below this name."""
        with suppress(MissingObjectError):
            self.request(lambda client, name: client.delete_dir(name))


def _head(path: ObjectPath, count: int) -> bytes:
    with path.open("rb", buffering=16) as file:
        return file.read(count)


@functools.cache
def _listed_head(path: ObjectPath, count: int, size: int, modified: int) -> bytes:
    return _head(path, count)


def _direct(listed: list[fs.FileInfo], folder: str) -> list[fs.FileInfo]:
    """Return the objects directly in `folder`, and its folders, of a recursive listing.

    pyarrow 26's own listing of one level lacks the folders of Google's storage, unless each has an object "name/".
    """
    from pyarrow import fs

    found = {}
    for info in listed:
        first, _, rest = info.path.removeprefix(f"{folder}/").partition("/")
        path = f"{folder}/{first}"
        found[path] = fs.FileInfo(path, fs.FileType.Directory) if rest else info
    return list(found.values())


class ObjectFile(io.RawIOBase):
    """An object that is open for reading at any place. Threads may share `read_at`."""

    def __init__(self, path: ObjectPath, stamp: Stamp | None = None) -> None:
        """stamp: that the object must have, if given. Raises MissingObjectError if there is no such object."""
        super().__init__()
        self.path, self._position, self._lock = path, 0, Lock()
        self._input, self.stamp = self._open()
        self._checked = time.monotonic()  # when the last request for the object's version began
        if stamp is not None:
            self._compare(stamp)

    def _open(self) -> tuple[Any, Stamp]:
        """Request size and version."""
        opened = self.path.request(lambda client, name: client.open_input_file(name))
        facts = {key.lower(): value for key, value in (opened.metadata() or {}).items()}
        version = repr([facts.get(key) for key in ("etag", "last-modified", "generation")])
        digest = hashlib.blake2b(version.encode(), digest_size=8).digest()
        return opened, Stamp(int(opened.size()), int.from_bytes(digest, "little") >> 1)

    def _compare(self, stamp: Stamp) -> None:
        if self.stamp != stamp:
            raise StorageError(f"{self.path}: {_CHANGED}")

    def is_confirmed(self, since: float) -> bool:
        """Whether the object is known to have been the same at the time `since` (time.monotonic()) or later.

        Always in Google's storage, where pyarrow requests the version (generation) that was opened and no other.
        """
        return self._checked > since or self.path.uri.startswith(GOOGLE)

    def confirm(self, since: float) -> None:
        """Raise StorageError if the object was not the same at the time `since` or later.

        Its version is requested, once for all threads, unless that is known.
        """
        with self._lock:
            if not self.is_confirmed(since):
                began = time.monotonic()
                self._compare(self._open()[1])
                self._checked = began

    def read_at(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start` on. Raises StorageError if the object ends before or has changed."""
        data = self.read_unconfirmed(start, count)
        self.confirm(time.monotonic())
        return data

    def read_unconfirmed(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start` on, not to be used before `confirm` has proved them with a later time.

        Of an object that was replaced by a shorter one, pyarrow 26 returns the bytes that are left and, without an
        error, whatever was in memory after them.
        """
        if start + count > self.stamp.size:
            end = self.stamp.size
            raise StorageError(f"{self.path}: truncated at byte {end}, before byte {start + count}: copy it again")
        first = min(start, max(0, self.stamp.size - SMALLEST_READ))
        size = max(start + count - first, min(SMALLEST_READ, self.stamp.size))
        data = self.path.request(lambda client, name: self._input.read_at(size, first)) if count else b""
        return data[start - first : start - first + count]

    # ---- io.RawIOBase

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.stamp.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        count = min(len(view), max(0, self.stamp.size - self._position))
        view[:count] = self.read_at(self._position, count)
        self._position += count
        return count


@functools.cache
def client_of(scheme: str, bucket: str, attempts: int = 1) -> fs.FileSystem:
    """Return pyarrow's client of a bucket. attempts: of a request; `ObjectPath.request` repeats those of one."""
    from datetime import timedelta

    from pyarrow import fs

    environment = os.environ
    if f"{scheme}://" == GOOGLE:
        limit = timedelta(seconds=1 if attempts == 1 else RETRY_FOR)
        if emulator := environment.get("STORAGE_EMULATOR_HOST"):  # as Google's own clients
            host = emulator.removeprefix("http://")
            return fs.GcsFileSystem(anonymous=True, scheme="http", endpoint_override=host, retry_time_limit=limit)
        return fs.GcsFileSystem(retry_time_limit=limit)
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return fs.S3FileSystem(
        endpoint_override=endpoint,
        region=region or (None if endpoint else fs.resolve_s3_region(bucket)),
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        background_writes=False,
        allow_delayed_open=True,  # one request for an object that is smaller than a part
        connect_timeout=10,
        request_timeout=30,
    )
