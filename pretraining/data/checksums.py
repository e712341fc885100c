"""Whether shards still hold the bytes they were written with.

Flipped bytes inside a document are valid token ids more often than not, so only a checksum finds them. meta.json
of prepare.py lists sha256 sums; of other shards the sum is recorded in the index folder when they are verified for the
first time, and compared from then on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretraining.config.errors import UserError
from pretraining.data.files import file_hash, write_atomically
from pretraining.data.hashing import short_hash
from pretraining.data.index import ShardIndex


def verify(shards: Iterable[ShardIndex], listed: dict[str, str], folder: Path) -> tuple[int, int]:
    """Return (files compared, files whose sum was recorded for the first time). UserError names all damaged files.

    listed: sha256 of shards by file name, as meta.json lists them. folder: of the indexes. Reads every byte.
    """
    files = [file for shard in shards for file in _files(shard)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = list(pool.map(file_hash, files))
    damaged, recorded = [], 0
    for file, checksum in zip(files, sums, strict=True):
        record = folder / f"{file.stem[:40]}-{short_hash(str(file.resolve()))}.sha256"
        expected = listed.get(file.name)
        if expected is None and record.is_file():
            expected = json.loads(record.read_text())["sha256"]
        if expected is None:
            write_atomically(record, json.dumps({"path": str(file), "sha256": checksum}))
            recorded += 1
        elif expected != checksum:
            damaged.append(f"{file}: its checksum is not the recorded one: restore the file or prepare it again")
    if damaged:
        raise UserError("\n".join(damaged))
    return len(files) - recorded, recorded


def _files(shard: ShardIndex) -> list[Path]:
    """Return the user's files of one shard: an index and its tokens for Megatron; decoded Parquet is ours."""
    path = Path(shard.path)
    return [path, Path(shard.tokens)] if path.suffix == ".idx" else [path]
