"""Whether shards still hold the bytes they were written with.

Flipped bytes inside a document are valid token ids more often than not, so only a checksum finds them. There are two:

- Of a block, the sum of its bytes as 64-bit numbers and of start x length of its documents. It finds every flipped bit
  (but no exchanged numbers) at the speed of memory: 3 us for the 32 KiB of a batch of 8192 tokens, where crc32 takes
  10. It adds 4 % to the CPU time of the first epoch (benchmarks/RESULTS.md). It is recorded in the index folder
  when a block is read for the first time, and compared when a later run reads it first; a shard that was written again
  in another size has new ones.
- Of a file, sha256, on request. meta.json of prepare.py lists them; of other shards they are recorded in the index
  folder when they are verified for the first time, and compared from then on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.files import file_hash, write_atomically
from pretraining.data.hashing import short_hash
from pretraining.data.index import ShardIndex
from pretraining.data.layouts import read_json
from pretraining.data.stores.shard import Readable
from pretraining.storage import Location, location

_RECORD_BYTES = 24  # first document, last document + 1 and checksum of a block, 64-bit numbers


class BlockSums:
    """The checksums of the blocks of one dataset. Threads may share it."""

    def __init__(self, documents: int) -> None:
        """documents: of a block that does not end with its shard; the record of a block is number first / documents."""
        self._documents = documents
        self._records: dict[str, np.ndarray] = {}  # shard -> its records, uint64 [blocks, 3]

    def check(self, shard: ShardIndex, first: int, last: int, checksum: int) -> None:
        """Compare the checksum of documents [first, last) with its record, or record it.

        UserError if they differ. Records that cannot be written are not kept.
        """
        records = self._records.get(shard.path)
        if records is None:
            self._records[shard.path] = records = self._read(shard)
        number = first // self._documents
        recorded_first, recorded_last, recorded = records[number].tolist()
        if (recorded_first, recorded_last) != (first, last):
            records[number] = (first, last, checksum)
            self._write(shard, number, records[number].tobytes())
        elif recorded != checksum:
            raise UserError(
                f"{shard.path}: the bytes of documents {first:,} to {last - 1:,} changed since they were first read: "
                f"restore the shard, or remove {self._path(shard)} if the change is intended"
            )

    def _path(self, shard: ShardIndex) -> Path:
        """Return the file of a shard's records, next to its sidecar. Tokens of another size are another shard."""
        return Path(shard.groups.path).with_suffix(f".{shard.token_stamp.size}-{self._documents}.sums")

    def _read(self, shard: ShardIndex) -> np.ndarray:
        """Return the records of a shard; zeros for blocks that were never read."""
        raw = self._path(shard).read_bytes() if self._path(shard).is_file() else b""
        size = -(-shard.documents // self._documents) * _RECORD_BYTES
        return np.frombuffer(raw[:size].ljust(size, b"\0"), "<u8").reshape(-1, 3).copy()

    def _write(self, shard: ShardIndex, number: int, record: bytes) -> None:
        with suppress(OSError):  # the index folder may be read-only or full
            descriptor = os.open(self._path(shard), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                os.pwrite(descriptor, record, number * _RECORD_BYTES)
            finally:
                os.close(descriptor)


def byte_sum(file: Readable, low: int, high: int) -> int:
    """Return the sum of bytes [low, high) of a file as 64-bit numbers, modulo 2^64."""
    raw = file.read_at(low, high - low)
    words = len(raw) // 8
    total = int(np.frombuffer(raw, "<u8", words).sum(dtype=np.uint64))
    return (total + int.from_bytes(raw[8 * words :], "little")) % 2**64


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
            expected = read_json(record).get("sha256")
        if expected is None:
            write_atomically(record, json.dumps({"path": str(file), "sha256": checksum}))
            recorded += 1
        elif expected != checksum:
            damaged.append(f"{file}: its checksum is not the recorded one: restore the file or prepare it again")
    if damaged:
        raise UserError("\n".join(damaged))
    return len(files) - recorded, recorded


def _files(shard: ShardIndex) -> list[Location]:
    """Return the user's files of one shard: an index and its tokens for Megatron; decoded Parquet is ours."""
    path = location(shard.path)
    return [path, location(shard.tokens)] if path.suffix == ".idx" else [path]
