"""Whether shards still hold the bytes they were written with.

Flipped bytes inside a document are valid token ids more often than not, so nothing but a checksum finds them. What
prepare.py wrote carries sha256 sums in meta.json; of other shards the sum is recorded in the index folder when they
are verified for the first time, and compared from then on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretraining.config.errors import UserError
from pretraining.data.hashing import short_hash
from pretraining.data.index import ShardIndex
from pretraining.data.tokenizer import file_hash


def verify(indexes: Iterable[ShardIndex], described: dict[str, str], folder: Path) -> tuple[int, int]:
    """(shards compared, shards whose sum was recorded for the first time). UserError names all that are damaged.

    described: sha256 of shards by file name, as meta.json lists them. folder: of the indexes. Reads every byte.
    """
    files = [file for index in indexes for file in files_of(index)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = list(pool.map(file_hash, files))
    damaged, recorded = [], 0
    for file, found in zip(files, sums, strict=True):
        wanted = described.get(file.name) or _recorded(file, folder)
        if wanted is None:
            _record(file, folder, found)
            recorded += 1
        elif wanted != found:
            damaged.append(f"{file}: its bytes are not those it was written with; restore it or prepare it again")
    if damaged:
        raise UserError("\n".join(damaged))
    return len(files) - recorded, recorded


def files_of(index: ShardIndex) -> list[Path]:
    """The user's files of one shard: a Megatron index and its tokens are two, decoded Parquet is ours."""
    path = Path(index.path)
    return [path, Path(index.tokens)] if path.suffix == ".idx" else [path]


def _record_path(file: Path, folder: Path) -> Path:
    return folder / f"{file.stem[:40]}-{short_hash(str(file.resolve()))}.sha256"


def _recorded(file: Path, folder: Path) -> str | None:
    path = _record_path(file, folder)
    return str(json.loads(path.read_text())["sha256"]) if path.is_file() else None


def _record(file: Path, folder: Path, found: str) -> None:
    path = _record_path(file, folder)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"path": str(file), "sha256": found}))
    temporary.replace(path)
