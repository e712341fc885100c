"""Whether shards still hold the bytes they were written with.

Flipped bytes inside a document are valid token ids more often than not, so only a checksum finds them. There are two:

- Of a block, the sum of its bytes as 64-bit numbers, each times its odd number in the block, and of start x length of
  its documents. It finds flipped bits and exchanged numbers: 4 us for the 32 KiB of a batch of 8192 tokens, where
  crc32 takes 10 and a plain sum, which exchanges escape, 2. Of the CPU time of the first epoch, that is 11 to 21 %, and
  1 to 8 % more than a plain sum takes. meta.json lists those of shards that prepare wrote; of other shards they are
  recorded in the index folder when a block is read for the first time, or by inspect_data --verify, and compared when
  a later run reads it first; a shard that was written again in another size has new ones.
- Of a file, sha256, on request and when a verified shard is indexed again. meta.json lists them; of other shards they
  are recorded in the index folder when they are verified for the first time, and compared from then on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.index import ShardIndex
from pretraining.data.stores.shard import Readable
from pretraining.storage import location

_RECORD_BYTES = 24  # first document, last document + 1 and checksum of a block, 64-bit numbers


class BlockSums:
    """The checksums of the blocks of one dataset. Threads may share it."""

    def __init__(self, documents: int, listed: Mapping[str, Any]) -> None:
        """documents: of a block that does not end with its shard; the record of a block is number first / documents.

        listed: "blocks" of meta.json, {} without one.
        """
        self._documents = documents
        sums = listed.get("sums") if listed.get("documents") == documents else None
        self._listed: dict[str, Any] = sums if isinstance(sums, dict) else {}
        self._records: dict[str, np.ndarray] = {}  # shard -> its records, uint64 [blocks, 3]

    def check(self, shard: ShardIndex, first: int, last: int, checksum: int) -> bool:
        """Compare the checksum of documents [first, last) with its record, or record it; return whether it was there.

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
            return False
        if recorded != checksum:
            subject = f"{shard.path}: the bytes of documents {first:,} to {last - 1:,} changed since they were"
            if location(shard.path).name in self._listed:
                raise UserError(f"{subject} written: restore the shard, or prepare the dataset again")
            remedy = f"restore the shard, or remove {self._path(shard)} if the change is intended"
            raise UserError(f"{subject} first read: {remedy}")
        return True

    def _path(self, shard: ShardIndex) -> Path:
        """Return the file of a shard's records, next to its sidecar. Tokens of another size are another shard."""
        return Path(shard.groups.path).with_suffix(f".{shard.token_stamp.size}-{self._documents}.blocks")

    def _read(self, shard: ShardIndex) -> np.ndarray:
        """Return the records of a shard; zeros for blocks that were never read."""
        raw = self._path(shard).read_bytes() if self._path(shard).is_file() else b""
        size = -(-shard.documents // self._documents) * _RECORD_BYTES
        records = np.frombuffer(raw[:size].ljust(size, b"\0"), "<u8").reshape(-1, 3).copy()
        listed = self._listed.get(location(shard.path).name)
        if listed is not None:
            try:
                records[:, 2] = np.frombuffer(bytes.fromhex(listed), "<u8")
            except (ValueError, TypeError) as error:
                raise UserError(f"{shard.path}: its blocks are not those of meta.json: prepare it again") from error
            records[:, 0] = np.arange(len(records)) * self._documents
            records[:, 1] = np.minimum(records[:, 0] + self._documents, shard.documents)
        return records

    def _write(self, shard: ShardIndex, number: int, record: bytes) -> None:
        with suppress(OSError):  # the index folder may be read-only or full
            descriptor = os.open(self._path(shard), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                os.pwrite(descriptor, record, number * _RECORD_BYTES)
            finally:
                os.close(descriptor)


def byte_sum(file: Readable, low: int, high: int) -> int:
    """Return the sum of bytes [low, high) of a file as 64-bit numbers, times 1, 3, 5, ..., modulo 2^64."""
    raw = file.read_at(low, high - low)
    words = len(raw) // 8
    total = int(np.dot(np.frombuffer(raw, "<u8", words), _odd_numbers(1 << words.bit_length())[:words]))
    return (total + int.from_bytes(raw[8 * words :], "little") * (2 * words + 1)) % 2**64


@cache
def _odd_numbers(count: int) -> np.ndarray:
    return np.arange(1, 2 * count, 2, dtype=np.uint64)
