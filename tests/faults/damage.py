"""Damage to a file, decided by chance: what disks, people and other programs do to files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Attack:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: str) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _flip(data: bytes, chance: random.Random) -> bytes:
    """Flip one bit."""
    spoilt = bytearray(data or b"\0")
    spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
    return bytes(spoilt)


def fill_disk(*_: object) -> None:
    """Fail as a call does whose disk is full; to stand in its place."""
    raise OSError(28, "No space left on device")


def flip_bit_at(path: Path, at: int = -1) -> None:
    """Flip the lowest bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path, keep: float) -> None:
    """Keep this part of a file."""
    os.truncate(path, int(path.stat().st_size * keep))


def _overwrite(data: bytes, chance: random.Random) -> bytes:
    """Replace a range by zeros, ones or noise."""
    start, size = chance.randrange(len(data) + 1), chance.randrange(1, 600)
    noise = chance.choice([bytes(size), b"\xff" * size, chance.randbytes(size)])
    return data[:start] + noise + data[start + size :]


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.choice([0, 1, max(0, len(data) - 1), chance.randrange(len(data) + 1)])]


def _remove_range(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + data[start + chance.randrange(1, 40) :]


def _tear(data: bytes, chance: random.Random) -> bytes:
    """The length is on the disk, the last pages are not."""
    start = chance.randrange(len(data) + 1)
    return data[:start] + bytes(len(data) - start)


def _replace_text(data: bytes, chance: random.Random) -> bytes:
    """Exchange a number, word or bracket of a text for another one."""
    old, new = (chance.choice([b"0", b"1", b"2", b'"', b"[", b"{", b"}", b"null", b"-", b"9" * 30]) for _ in "ab")
    places = data.count(old)
    start = -1
    for _ in range(chance.randrange(places) + 1 if places else 0):
        start = data.index(old, start + 1)
    return data[:start] + new + data[start + len(old) :] if places else new + data


CONTENTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    _flip,
    _overwrite,
    _cut,
    _remove_range,
    _tear,
    _replace_text,
    lambda data, chance: data + chance.choice([b"\n", b"\0", b"{}", data]),
    lambda data, chance: chance.choice([b"", b"{}", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe"]),
)
KINDS: tuple[Callable[[Path], None], ...] = (
    lambda file: None,  # it is gone
    lambda file: file.mkdir(),
    os.mkfifo,
    lambda file: file.symlink_to(file.name),  # a loop
    lambda file: file.symlink_to(os.devnull),
)


def damage(file: Path, others: list[Path], chance: random.Random) -> str:
    """Damage a file in one way and return its description. others: files that it may be exchanged with."""
    number = chance.randrange(len(CONTENTS) + len(CONTENTS) // 2)
    if number < len(CONTENTS):
        times, data = file.stat(), file.read_bytes()
        file.write_bytes(CONTENTS[number](data, chance))
        if chance.random() < 0.5:  # a disk changes no times
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return f"content {number}"
    if others and chance.random() < 0.4:
        other = chance.choice(others)
        spare = other.read_bytes()
        shutil.copy2(file, other)
        file.write_bytes(spare)
        return f"exchanged with {other.name}"
    file.unlink()
    kind = chance.randrange(len(KINDS))
    KINDS[kind](file)
    return f"kind {kind}"
