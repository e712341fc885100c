"""Files by path: read ranges, write durably, rename and remove folders, lock them.

`location` turns a setting into a path, and `store_of` returns what does the rest there: `Disk` for local paths, and for
schemes such as s3:// the store that an extension brought. A store's paths have the methods of a pathlib.Path that this
program uses (`StoredPath`); where a disk and another store differ in more, `Store` has a method for it. Every change to
the disk is a call of `os`, so that a test can stop the process between any two of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

from pretraining.config.errors import UserError
from pretraining.config.extension import Extension
from pretraining.config.grammar import OBJECT_STORAGE
from pretraining.config.script import TRY_AGAIN

PARTIAL = ".partial"  # folder that is being written
DELETED = ".deleted"  # folder that is being removed
DAMAGED = ".damaged"  # renamed, to be examined by a person
LOCK = "lock"
MARKER = "COMMITTED"  # the file that makes a folder a checkpoint
STEP = re.compile(r"step_(0|[1-9][0-9]*)")  # name of such a folder
# Bytes of a new file that wait in memory. Their pages are given back when they are on the disk, and the next bytes get
# the same ones: on a virtual machine, 0.8 GB in new pages took 1.2 CPU s more, and a checkpoint evicts no token shards.
UNSYNCED = 32 << 20
BUFFER = 1 << 20  # bytes to read ahead where a request takes as long as a MiB at 50 MB/s


class StorageError(UserError, OSError):
    """A store could not be reached, or refused a request; an OSError, as of a disk."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message


class UnreachableError(StorageError):
    """A store did not answer. scripts/train.sh tries again, if the run has made a step since its start."""

    code = TRY_AGAIN


class Stamp(NamedTuple):
    """Size and version of a file: they differ when the file was changed after it was indexed."""

    size: int  # bytes
    modified: int  # nanoseconds; of an object, a hash of its version


# ---- What a store has


class StoredPath(Protocol):
    """A path of another store than the disk, with methods of pathlib.Path."""

    @property
    def store(self) -> Store: ...
    @property
    def name(self) -> str: ...
    @property
    def stem(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> Any: ...  # a StoredPath, as of the methods below
    def __lt__(self, other: Any) -> bool: ...
    def __truediv__(self, name: str) -> Any: ...
    def with_suffix(self, suffix: str) -> Any: ...
    def resolve(self) -> Any: ...
    def exists(self) -> bool: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def iterdir(self) -> Iterator[Any]: ...
    def rglob(self, pattern: str) -> Iterator[Any]: ...
    def open(self, mode: str = "rb", buffering: int = BUFFER) -> BufferedReader: ...
    def read_bytes(self) -> bytes: ...
    def read_text(self) -> str: ...
    def write_bytes(self, data: bytes) -> object: ...


Location = Path | StoredPath


class OpenFile(Protocol):
    """A file that is open for reading at any place. Threads may share it."""

    path: str
    is_local: bool

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read_at(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start` on. UserError if the file ends before or cannot be read there."""

    def preadv(self, targets: Sequence[memoryview], start: int) -> int:
        """Read into `targets`, like os.preadv, which may read less. Raises OSError."""

    def pread(self, count: int, start: int) -> bytes:
        """Return up to `count` bytes from `start` on, like os.pread. Raises OSError."""

    def in_order(self) -> Callable[[int, int], bytes]:
        """Return `read_at` for small reads at increasing places."""

    def check(self) -> None:
        """Raise UserError if the file has no longer the stamp that it was opened with."""

    def close(self) -> None:
        """Close the file, which may be done more than once."""


class NewFile(Protocol):
    """A file that is being written. Threads may share it."""

    def write_at(self, data: memoryview, start: int) -> None:
        """Write all of `data` at byte `start`; where a store writes in order, at the end so far."""

    def finish(self) -> None:
        """Put the file on the disk. Raises the errors of earlier writes, too."""


class ReadAhead(Protocol):
    """Ranges of files that are read before they are needed, by threads of their own. Threads may share it."""

    def expect(self, size: int) -> None:
        """Take note that blocks of `size` bytes are read at the same time."""

    def joined(self, starts: Any, ends: Any) -> list[tuple[int, int]]:
        """Return the ranges to read for documents from `starts` to `ends`, int64 [documents]: those of a block."""

    def begin(self, file: Any, block: Any, documents: tuple[int, int], *, is_whole: bool) -> int:
        """Begin to read what is not in memory; return its bytes. See `read` for the arguments."""

    def read(self, file: Any, block: Any, documents: tuple[int, int], *, is_whole: bool) -> Any:
        """Return an object with the methods pread and read_at of an OpenFile for documents [first, last) of a block, a
        data.corpus.DocumentBlock; for all of the block if `is_whole`."""

    def follow(self, fetch: Callable[[int], int], first: int, length: int) -> None:
        """Let `fetch` begin to read steps from `first` on, which are read in groups of `length`; it returns bytes."""

    def close(self) -> None:
        """Stop reading ahead and forget what is in memory."""


class Store(Protocol):
    """A place of files: what its paths cannot do by themselves."""

    is_remote: bool  # whether a read is a request: fewer and larger ones, several at once
    requests: int  # files that are looked at at once
    open_files: int  # most files of shards that are kept open
    writes_in_order: bool  # whether a file is written from its beginning to its end

    def location(self, path: str) -> Location:
        """Return the path of a file or folder."""

    def stamp(self, path: Any) -> Stamp:
        """Return size and version. UserError if there is no such file."""

    def size(self, path: Any) -> int:
        """Return the bytes of a file."""

    def head(self, path: Any, count: int) -> bytes:
        """Return the first bytes of a file, which a start asks for several times."""

    def open(self, path: Any, stamp: Stamp | None = None, name: str = "") -> OpenFile:
        """Open for reading. Raises OSError. stamp: that the file must keep; None: any. name: in messages."""

    def read_ahead(self, config: Any) -> ReadAhead | None:
        """Return what reads shards ahead for a configuration (None: the defaults); None where the system does."""

    def create(self, path: Any) -> AbstractContextManager[NewFile]:
        """Create a file."""

    def write_file(self, path: Any, data: bytes) -> None:
        """Create a file with this content, on the disk on return; its name is only after the folder's `sync`."""

    def sync(self, folder: Any) -> None:
        """Flush the folder's list of names to the disk."""

    # ---- Folders that are there completely or not at all: the marker in them is written last

    def lock(self, folder: Any, setting: str) -> FolderLock | None:
        """Keep other runs out of a folder that `setting` can change, where the store has locks. Raises UserError."""

    def unfinished(self, final: Any) -> Any:
        """Return the folder in which the files of `final` are written."""

    def make_folder(self, folder: Any) -> None:
        """Make a folder for new files."""

    def complete(self, partial: Any, final: Any) -> None:
        """Give a folder that has its marker its name."""

    def left_over(self, folder: Any) -> list[Any]:
        """Return what interrupted saves and removals have left in a folder of checkpoints."""

    def remove_folder(self, folder: Any) -> None:
        """Remove a folder: first at once its marker or its name, then its files."""

    def set_aside(self, folder: Any) -> None:
        """Rename a corrupt checkpoint, or its marker, so that it does not count as committed."""


class CheckpointFormat(NamedTuple):
    """Checkpoints of another program."""

    recognizes: Callable[[Location], bool]
    open: Callable[[Location], Any]  # returns a checkpoint.manifest.Checkpoint, or raises UserError


class ShardFormat(NamedTuple):
    """Token shards of one format."""

    magics: tuple[bytes, ...]  # what their files begin with
    open: Callable[[str, str, str], Any]  # (path, column, file for decoded tokens) -> data.stores.shard.ShardContents


CHECKPOINT_FORMATS: list[CheckpointFormat] = []  # see use_files_of
SHARD_FORMATS: dict[str, ShardFormat] = {}  # besides Arrow's, by the values of file_type; see use_files_of
STORES: dict[str, Store] = {}  # by the beginning of their paths; see use_files_of


def use_files_of(extensions: Iterable[Extension]) -> None:
    """Let the stores of these extensions read and write the paths that are theirs, and their formats be opened."""
    for extension in extensions:
        STORES.update(extension.stores)
        SHARD_FORMATS.update(extension.shard_formats)
        CHECKPOINT_FORMATS.extend(each for each in extension.checkpoint_formats if each not in CHECKPOINT_FORMATS)


def store_of(path: str | Location) -> Store:
    """Return the store of a path. UserError if no extension brought it."""
    if not isinstance(path, str):
        return DISK if isinstance(path, Path) else path.store
    scheme = path[: path.index("://") + 3] if path.startswith(OBJECT_STORAGE) else ""
    if scheme and scheme not in STORES:
        remedy = "add the folder pretraining/extensions/object_storage, and its name to NAMES of main_training.py"
        raise UserError(f"{path}: nothing here reads {scheme}: {remedy}")
    return STORES[scheme] if scheme else DISK


def location(path: str | Location) -> Location:
    """Return the path of a file or folder as an object."""
    return store_of(path).location(path) if isinstance(path, str) else path


def is_remote(path: str | Location) -> bool:
    """Whether a read of the path is a request to another machine."""
    return store_of(path).is_remote


def stamp_of(path: str | Location) -> Stamp:
    """Return the stamp of a file. UserError if it does not exist."""
    return store_of(path).stamp(path)


def size_of(path: Location) -> int:
    """Return the bytes of a file."""
    return store_of(path).size(path)


@contextmanager
def opened(path: str | Location) -> Iterator[OpenFile]:
    """Open a file for reading at any place. UserError if it does not exist or may not be read."""
    try:
        file = store_of(path).open(path)
    except StorageError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: check that the data is still there") from error
    with contextlib.closing(file):
        yield file


# ---- The disk


class LocalFile:
    """See OpenFile. The last reference closes it."""

    is_local = True

    def __init__(self, path: str | Path, stamp: Stamp | None = None, name: str = "") -> None:
        """See Store.open."""
        self.path, self._stamp, self._name, self._descriptor = str(path), stamp, name or str(path), -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe is not waited for
        self.pread, self.preadv = partial(os.pread, self._descriptor), partial(os.preadv, self._descriptor)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_at(self, start: int, count: int) -> bytes:
        raw = b""
        while len(raw) < count:  # Linux reads at most 2 GiB at once
            place = f"at byte {start + len(raw)}"
            try:
                more = self.pread(count - len(raw), start + len(raw))
            except OSError as error:
                raise UserError(f"{self._name}: {error.strerror} {place}: copy the file again") from error
            if not more:
                end = start + count
                raise UserError(f"{self._name}: truncated {place}, before byte {end}: copy the file again")
            raw = raw + more if raw else more
        return raw

    def in_order(self) -> Callable[[int, int], bytes]:
        return self.read_at

    def check(self) -> None:
        if self._stamp is None:
            return
        status = os.fstat(self._descriptor)
        if status.st_nlink == 0:
            raise UserError(f"{self._name}: removed or replaced while the run reads it: restore the indexed file")
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise UserError(f"{self._name}: changed while the run reads it: restore the indexed file, or start again")


class NewLocalFile:
    """See NewFile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unsynced, self._lock = descriptor, 0, Lock()

    def write_at(self, data: memoryview, start: int) -> None:
        self._unsynced += len(data)
        while data:  # the kernel may take less than it is offered
            written = os.pwrite(self._descriptor, data, start)
            data, start = data[written:], start + written
        with self._lock:
            if self._unsynced >= UNSYNCED:
                self._unsynced = 0
                os.fdatasync(self._descriptor)
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        os.fsync(self._descriptor)


@contextmanager
def descriptor(path: Path, flags: int) -> Iterator[int]:
    """Open a file descriptor and close it on leaving. A named pipe in the place of a file is not waited for."""
    opened = os.open(path, flags | os.O_NONBLOCK, 0o666)
    try:
        yield opened
    finally:
        os.close(opened)


class Disk:
    """A local or shared disk. A folder is written under another name and renamed when it is complete."""

    is_remote, writes_in_order = False, False
    requests = 1
    open_files = 128  # for the whole stream, whatever the number of shards or logical_shards; the usual limit is 1024

    def location(self, path: str) -> Path:
        return Path(path)

    def stamp(self, path: str | Path) -> Stamp:
        try:
            status = os.stat(path)  # noqa: PTH116 (a Path for each of 10 thousand shards takes longer)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: check that the data is still there") from error
        return Stamp(status.st_size, status.st_mtime_ns)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def head(self, path: Path, count: int) -> bytes:
        with descriptor(path, os.O_RDONLY) as opened:
            return os.pread(opened, count, 0)

    def open(self, path: str | Path, stamp: Stamp | None = None, name: str = "") -> LocalFile:
        return LocalFile(path, stamp, name)

    def read_ahead(self, config: object) -> None:
        return None

    @contextmanager
    def create(self, path: Path) -> Iterator[NewLocalFile]:
        with descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as opened:
            yield NewLocalFile(opened)

    def write_file(self, path: Path, data: bytes) -> None:
        with self.create(path) as file:
            file.write_at(memoryview(data), 0)
            file.finish()

    def sync(self, folder: Path) -> None:
        with descriptor(folder, os.O_RDONLY | os.O_DIRECTORY) as opened:
            os.fsync(opened)

    def lock(self, folder: Path, setting: str) -> FolderLock:
        return FolderLock(folder, setting)

    def unfinished(self, final: Path) -> Path:
        return final.with_name(final.name + PARTIAL)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def complete(self, partial: Path, final: Path) -> None:
        self.sync(partial)
        if final.exists() or final.is_symlink():  # a stray that was never committed: not ours to delete
            self.set_aside(final)
        rename(partial, final)

    def left_over(self, folder: Path) -> list[Path]:
        paths = (path for path in folder.glob("step_*") if path.suffix in (PARTIAL, DELETED) and path.is_dir())
        return [path for path in paths if STEP.fullmatch(path.stem)]

    def remove_folder(self, folder: Path) -> None:
        """See Store. Of a symbolic link only the link is removed."""
        if folder.is_symlink():
            folder.unlink()
            self.sync(folder.parent)
            return
        doomed = folder if folder.suffix in (PARTIAL, DELETED) else folder.with_name(folder.name + DELETED)
        if doomed != folder:
            _clear(doomed)  # left by a removal that was interrupted
            rename(folder, doomed)
        shutil.rmtree(doomed)

    def set_aside(self, folder: Path) -> None:
        aside = folder.with_name(folder.name + DAMAGED)
        _clear(aside)  # of the same step, once before
        rename(folder, aside)


DISK = Disk()


def rename(old: Path, new: Path) -> None:
    """Rename a folder atomically, on the disk on return."""
    old.rename(new)
    DISK.sync(new.parent)


def _clear(path: Path) -> None:
    """Make room for a folder of this name."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


class FolderLock:
    """A lock that keeps a second run out of a folder while this process lives.

    A POSIX record lock and not flock: a forked child would inherit flock's and keep the folder locked after the run
    was killed. The kernel releases it with the process, so there is no stale lock to clean up.
    """

    def __init__(self, folder: Path, setting: str = "run_name") -> None:
        """Lock the folder, which `setting` can change.

        Raises UserError if another process holds the lock, OSError if it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # EAGAIN or EACCES, as POSIX leaves open
            holder = os.pread(self._opened, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(self._opened)
            remedy = f"stop it, or set another --{setting}"
            raise UserError(f"{folder}: used by {holder}, which is still running; {remedy}") from error
        os.ftruncate(self._opened, 0)
        os.pwrite(self._opened, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._opened)
