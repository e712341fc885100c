"""Pickles of tensors, read without running code of the file.

torch.load(weights_only=True) reads them and nothing else: objects of other classes become empty stand-ins. Every member
of a zip archive is compared with its checksum first, because torch compares none; then tensors are mapped, not read,
unless members are compressed.
"""

from __future__ import annotations

import pickletools
import struct
import sys
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch

from pretraining.checkpoint.files import UnreadableError

DEEPEST_TUPLES = 100  # tuples in tuples


class StandIn(dict[Any, Any]):
    """An object of a class that is not loaded."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def load_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle. Raises UnreadableError if it is none or cannot be read."""
    return named(unpickle(path), path)


def named(value: Any, path: Path) -> dict[str, Any]:
    """Return `value` if it is a dictionary with names. Raises UnreadableError with its `path`."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UnreadableError(f"{path}: holds {type(value).__name__}, not tensors by name")
    return value


# What torch and zipfile raise for malformed files; an unpickler's instructions fail in the ways of any program.
MALFORMED = (OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, AssertionError,
              ArithmeticError, MemoryError, BadZipFile, zlib.error, struct.error)  # fmt: skip


def unpickle(path: Path) -> Any:
    """Return what a file of torch.save holds. Raises UnreadableError."""
    if not path.is_file():  # a named pipe would be waited for
        raise UnreadableError(f"{path}: no such file")
    try:
        is_zip = _begins_like_zip(path) or is_zipfile(path)
        is_mapped = is_zip and check_archive(path)
        if not is_zip:
            with path.open("rb") as file:
                for _ in range(4):  # of a number, a version, the system's properties, the tensors
                    check_depth(file)
            print(f"note: {path}: in torch's format before 1.6, without checksums: damage is not seen", file=sys.stderr)
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
        with torch.serialization.safe_globals([(StandIn, name) for name in others]):
            return torch.load(path, map_location=lambda storage, _: storage, weights_only=True, mmap=is_mapped)  # host
    except UnpicklingError as error:  # torch's message advises weights_only=False
        raise UnreadableError(f"{path}: holds more than tensors and could execute a program: not read") from error
    except MALFORMED as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnreadableError(f"{path}: cannot be read as weights: {reason}") from error


def _begins_like_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def check_archive(file: Path | IO[bytes]) -> bool:
    """Return whether no member of the archive is compressed. Raises BadZipFile if one is not what was saved."""
    with ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise BadZipFile(f"{damaged} differs from its checksum: the file is damaged, fetch it again")
        for name in archive.namelist():
            if name.endswith("data.pkl"):
                check_depth(archive.open(name))
        return all(member.compress_type == ZIP_STORED for member in archive.infolist())


def check_depth(file: IO[bytes]) -> None:
    """Raise ValueError if the pickle has tuples in tuples that would exhaust the stack of the function that hashes one.

    That is a crash and no exception, because the function is C. Follows the pickle machine, with the depth of each
    object's tuples in the place of the object.
    """
    stack: list[int | None] = []  # None: a mark
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(file):
        name, taken = opcode.name, [0]
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1] or 0
            continue
        for kind in reversed(opcode.stack_before):
            if kind is pickletools.stackslice:
                while (depth := stack.pop()) is not None:
                    taken.append(depth)
            elif kind is not pickletools.markobject:
                taken.append(stack.pop() or 0)
        depth = max(taken) + 1 if name.startswith("TUPLE") else max(taken) if name == "REDUCE" else 0
        if depth > DEEPEST_TUPLES:
            raise ValueError(f"it has tuples in tuples, more than {DEEPEST_TUPLES} deep")
        results = [depth] * len(opcode.stack_after)
        stack += [None] if name == "MARK" else [memo.get(argument, 0)] if name.endswith("GET") else results
