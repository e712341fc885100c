"""Durable writes, checked reads, atomic renames and a lock: what a function has written is on the disk on return.

Does not depend on tensors or on the content of a checkpoint. Every change to the disk is a call of `os`, so that a test
can stop the process between any two of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.storage import Location, ObjectFile, ObjectPath, StorageError, Upload

PARTIAL = ".partial"  # being written
DELETED = ".deleted"  # being removed
DAMAGED = ".damaged"  # renamed, to be examined by a person
LOCK = "lock"
# One digest per block, so a reader checks what it reads and nothing else, and hashing goes on in several threads.
BLOCK = 8 << 20
MARKER = "COMMITTED"  # the file that makes a folder a checkpoint


class UnreadableError(UserError):
    """A checkpoint is incomplete or corrupt; the message names the file and what is wrong with it."""


def digest(data: bytes | memoryview) -> str:
    """Return 32 hex digits of SHA-256: 1.03 GB/s a core with SHA instructions (BLAKE2b: 0.78, CRC-32: 2.2)."""
    return hashlib.sha256(data).hexdigest()[:32]


@contextlib.contextmanager
def writing_to(flag: str, folder: Location, remedy: str = "give another folder") -> Iterator[None]:
    """Raise UserError that names the flag of `folder` where the body cannot write there."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--{flag}={folder}: cannot be written ({error.strerror or error}); {remedy}") from error


@contextlib.contextmanager
def descriptor(path: Path, flags: int) -> Iterator[int]:
    """Open a file descriptor and close it on leaving. A named pipe in the place of a file is not waited for."""
    opened = os.open(path, flags | os.O_NONBLOCK, 0o644)
    try:
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def create(path: Location) -> Iterator[int | Upload]:
    """Create a file; `finish` puts it on the disk. An object exists when it is finished."""
    if isinstance(path, Path):
        with descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as opened:
            yield opened
    else:
        upload = Upload(path)
        try:
            yield upload
        finally:  # after an error, too: pyarrow would end it when it is collected, while no other thread may run
            with contextlib.suppress(OSError):
                upload.close()


def finish(target: int | Upload) -> None:
    """Put a created file on the disk. Raises the errors of earlier writes, too."""
    target.close() if isinstance(target, Upload) else os.fsync(target)


def write_at(opened: int | Upload, data: memoryview, start: int) -> None:
    """Write all of `data` at byte `start`, which for an object is its end so far."""
    if isinstance(opened, Upload):
        opened.write(data)
        return
    while data:  # the kernel may take less than it is offered
        written = os.pwrite(opened, data, start)
        data, start = data[written:], start + written


def write_file(path: Location, data: bytes) -> None:
    """Create `path` with this content, on the disk on return; its name is only after the folder's sync."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    with descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as opened:
        write_at(opened, memoryview(data), 0)
        os.fsync(opened)


def sync_folder(path: Location) -> None:
    """Flush the folder's list of names to the disk; an object has its name from the beginning."""
    if isinstance(path, ObjectPath):
        return
    with descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as opened:
        os.fsync(opened)


def read_into(opened: int | ObjectFile, target: memoryview, start: int, path: Location) -> None:
    """Fill `target` from byte `start` on. Raises UnreadableError if the file ends before or the disk fails."""
    if isinstance(opened, ObjectFile):
        target[:] = opened.read_at(start, len(target))
        return
    while target:
        try:
            count = os.preadv(opened, [target], start)
        except OSError as error:
            raise unreadable(error, path, f" at byte {start}") from error
        if count == 0:
            raise UnreadableError(f"{path}: ends at byte {start}, before the saved data does")
        target, start = target[count:], start + count


def read_file(path: Location) -> bytes:
    """Return the content of a small file. Raises UnreadableError if it cannot be read.

    Object storage that cannot be reached is another error: what is there may be complete.
    """
    try:
        if not isinstance(path, Path):
            return path.read_bytes()
        with descriptor(path, os.O_RDONLY) as opened, open(opened, "rb", closefd=False) as file:
            return file.read() or b""  # None of a pipe
    except OSError as error:
        raise unreadable(error, path) from error


def unreadable(error: OSError, path: Location, place: str = "") -> Exception:
    """Return the error to raise where a checkpoint is not readable; another one if the checkpoint may be sound."""
    if isinstance(error, StorageError) and not isinstance(error, FileNotFoundError):
        return error
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return OSError(error.errno, error.strerror, str(path))
    return UnreadableError(f"{path}: {error.strerror}{place}")


def read_json(path: Location) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnreadableError if it cannot be read or contains something else."""
    return parse_json(read_file(path), path)


def parse_json(text: bytes, path: Location) -> dict[str, Any]:
    """Return the object that `text`, which is from `path`, represents. Raises UnreadableError if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: does not contain valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UnreadableError(f"{path}: does not contain a JSON object")
    return value


def rename(old: Path, new: Path) -> None:
    """Rename a folder atomically, on the disk on return."""
    old.rename(new)
    sync_folder(new.parent)


def remove_folder(path: Location) -> None:
    """Remove a folder that may be a committed checkpoint: rename it atomically, then remove its files.

    In object storage the marker is removed first. Of a symbolic link only the link is removed.
    """
    if isinstance(path, ObjectPath):
        if (path / MARKER).is_file():
            (path / MARKER).unlink()
        path.remove_all()
        return
    if path.is_symlink():
        path.unlink()
        sync_folder(path.parent)
        return
    doomed = path if path.suffix in (PARTIAL, DELETED) else path.with_name(path.name + DELETED)
    if doomed != path:
        _clear(doomed)  # left by a removal that was interrupted
        rename(path, doomed)
    shutil.rmtree(doomed)


def set_aside(path: Location) -> None:
    """Rename a corrupt checkpoint, or in object storage its marker, so that it does not count as committed."""
    if isinstance(path, ObjectPath):
        (path / MARKER).replace(path / (MARKER + DAMAGED))
        return
    aside = path.with_name(path.name + DAMAGED)
    _clear(aside)  # of the same step, once before
    rename(path, aside)


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
        path = folder / LOCK
        self._opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # EAGAIN or EACCES, as POSIX leaves open
            holder = os.pread(self._opened, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(self._opened)
            raise UserError(
                f"{folder}: used by {holder}, which is still running; stop it, or set another --{setting}"
            ) from error
        os.ftruncate(self._opened, 0)
        os.pwrite(self._opened, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._opened)
