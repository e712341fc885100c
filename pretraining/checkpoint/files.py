"""Checked reads of a checkpoint's files, and the errors that name them. Does not depend on tensors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from pretraining.config.errors import UserError
from pretraining.storage import Location, OpenFile, StorageError, store_of

# One checksum per block, so a reader checks what it reads and nothing else, and several threads compute them.
BLOCK = 8 << 20


class UnreadableError(UserError):
    """A checkpoint is incomplete or corrupt; the message names the file and what is wrong with it."""


def digest(data: bytes | memoryview) -> str:
    """Return 32 hex digits of SHA-256, for the small files and headers; blocks of tensors have `checksum`."""
    return hashlib.sha256(data).hexdigest()[:32]


def checksum(block: bytes | memoryview) -> str:
    """Return 24 hex digits: CRC-32 of the bytes, and the sum of their whole 64-bit words.

    CRC-32 finds every damage within 32 neighbouring bits and any two flipped bits, the sum every damage within one
    word; other damage escapes both in 1 of 2^96 cases, exchanged words in 1 of 2^32. 4.9 GB/s a core, where SHA-256 has
    2.0 and took two thirds of the CPU time of a load.
    """
    return f"{zlib.crc32(block):08x}{int(np.frombuffer(block, '<u8', len(block) // 8).sum()):016x}"


def is_intact(block: memoryview, recorded: str) -> bool:
    """Return whether a block has the recorded checksum; checkpoints of format 1 recorded SHA-256."""
    return recorded == (digest(block) if len(recorded) == 32 else checksum(block))


@contextlib.contextmanager
def writing_to(flag: str, folder: Location, remedy: str = "give another folder") -> Iterator[None]:
    """Raise UserError that names the flag of `folder` where the body cannot write there."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--{flag}={folder}: cannot be written ({error.strerror or error}); {remedy}") from error


def read_into(opened: OpenFile, target: memoryview, start: int) -> None:
    """Fill `target` from byte `start` on. Raises UnreadableError if the file ends before or the disk fails."""
    while target:
        try:
            count = opened.preadv([target], start)
        except StorageError:
            raise
        except OSError as error:
            raise unreadable(error, opened.path, f" at byte {start}") from error
        if count == 0:
            raise UnreadableError(f"{opened.path}: ends at byte {start}, before the saved data does")
        target, start = target[count:], start + count


def read_file(path: Location) -> bytes:
    """Return the content of a small file. Raises UnreadableError if it cannot be read.

    Object storage that cannot be reached is another error: what is there may be complete.
    """
    try:
        with contextlib.closing(store_of(path).open(path)) as file:
            return file.pread(file.size, 0)
    except OSError as error:
        raise unreadable(error, path) from error


def unreadable(error: OSError, path: Location | str, place: str = "") -> Exception:
    """Return the error to raise where a checkpoint is not readable; another one if the checkpoint may be sound."""
    if isinstance(error, StorageError) and not isinstance(error, FileNotFoundError):
        return error
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return OSError(error.errno, error.strerror, str(path))
    return UnreadableError(f"{path}: {error.strerror}{place}")


def parse_json(text: bytes, path: Location) -> dict[str, Any]:
    """Return the object that `text`, which is from `path`, represents. Raises UnreadableError if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: does not contain valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UnreadableError(f"{path}: does not contain a JSON object")
    return value
