"""Files that extensions and tools read and write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pretraining.checkpoint.files import parse_json, read_file
from pretraining.storage import Location


def temporary_of(path: Path) -> Path:
    """Return a name for a file that becomes `path`.

    Others may write it at the same time: processes of containers often have the same number.
    """
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file that appears under its name only when it is complete."""
    temporary = temporary_of(path)
    temporary.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
    temporary.replace(path)


def read_json(path: Location) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnreadableError if it cannot be read or contains something else."""
    return parse_json(read_file(path), path)
