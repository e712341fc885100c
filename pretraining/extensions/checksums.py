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
from typing import TYPE_CHECKING, Any

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.shard import Readable
from pretraining.storage import location

if TYPE_CHECKING:
    from pretraining.data.corpus import DocumentBlock
    from pretraining.data.index import ShardIndex

_RECORD_BYTES = 24  # first document, last document + 1 and checksum of a block, 64-bit numbers


class BlockSums:
    """The checksums of the blocks of one dataset: a data.corpus.BlockCheck."""

    def __init__(self, description: Mapping[str, Any], *, is_repeated: bool = False) -> None:
        """description: contents of meta.json, {} without one."""
        blocks = description.get("blocks")
        self._blocks: dict[str, Any] = blocks if isinstance(blocks, dict) else {}
        self._records: dict[str, np.ndarray] = {}  # shard -> its records, uint64 [blocks, 3]
        self.is_repeated = is_repeated

    def compare(self, block: DocumentBlock, source: Readable, documents: range, length: int) -> bool:
        """Compare the checksum of a block with its record, or record it; return whether it was there.

        UserError if they differ. Records that cannot be written are not kept.
        """
        shard, checksum = block.shard, block_sum(block, source)
        records = self._records.get(shard.path)
        if records is None:
            self._records[shard.path] = records = self._read(shard, length)
        number = documents.start // length
        first, last, recorded = records[number].tolist()
        if (first, last) != (documents.start, documents.stop):
            records[number] = (documents.start, documents.stop, checksum)
            _write(_path(shard, length), number, records[number].tobytes())
            return False
        if recorded != checksum:
            subject = f"{shard.path}: the bytes of documents {first:,} to {last - 1:,} changed since they were"
            if location(shard.path).name in self._listed(length):
                raise UserError(f"{subject} written: restore the shard, or prepare the dataset again")
            remedy = f"restore the shard, or remove {_path(shard, length)} if the change is intended"
            if shard.tokens.endswith(".tokens"):  # restoring the shard does not decode it again
                remedy = f"remove {shard.tokens}, which is decoded again, or {remedy}"
            raise UserError(f"{subject} first read: {remedy}")
        return True

    def _listed(self, length: int) -> dict[str, Any]:
        """Return the records that meta.json has of blocks of so many documents, by the name of the shard."""
        sums = self._blocks.get("sums") if self._blocks.get("documents") == length else None
        return sums if isinstance(sums, dict) else {}

    def _read(self, shard: ShardIndex, length: int) -> np.ndarray:
        """Return the records of a shard; zeros for blocks that were never read."""
        path = _path(shard, length)
        raw = path.read_bytes() if path.is_file() else b""
        size = -(-shard.documents // length) * _RECORD_BYTES
        records = np.frombuffer(raw[:size].ljust(size, b"\0"), "<u8").reshape(-1, 3).copy()
        listed = self._listed(length).get(location(shard.path).name)
        if listed is not None:
            try:
                records[:, 2] = np.frombuffer(bytes.fromhex(listed), "<u8")
            except (ValueError, TypeError) as error:
                raise UserError(f"{shard.path}: its blocks are not those of meta.json: prepare it again") from error
            records[:, 0] = np.arange(len(records)) * length
            records[:, 1] = np.minimum(records[:, 0] + length, shard.documents)
        return records


def _path(shard: ShardIndex, length: int) -> Path:
    """Return the file of a shard's records, next to its sidecar. Tokens of another size are another shard."""
    return Path(shard.groups.path).with_suffix(f".{shard.token_stamp.size}-{length}.blocks")


def _write(path: Path, number: int, record: bytes) -> None:
    with suppress(OSError):  # the index folder may be read-only or full
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            os.pwrite(descriptor, record, number * _RECORD_BYTES)
        finally:
            os.close(descriptor)


def block_sum(block: DocumentBlock, source: Readable) -> int:
    """Return the checksum of a block: of its bytes, and of where its documents are."""
    documents, lengths = len(block.lengths), np.asarray(block.lengths)
    if block.high - block.low <= 2 * int(lengths.sum()) * block.width + 1024 * documents:
        total = byte_sum(source, block.low, block.high)
    else:  # documents of Megatron may be anywhere in the .bin
        ranges = zip(block.starts, block.lengths, strict=True)
        total = sum(byte_sum(source, at, at + length * block.width) for at, length in ranges)
    places = int(np.dot(block.starts, lengths))  # of the documents: a block may hold its bytes in any order
    return (total + places) % 2**64


def byte_sum(file: Readable, low: int, high: int) -> int:
    """Return the sum of bytes [low, high) of a file as 64-bit numbers, times 1, 3, 5, ..., modulo 2^64."""
    raw = file.read_at(low, high - low)
    words = len(raw) // 8
    total = int(np.dot(np.frombuffer(raw, "<u8", words), _odd_numbers(1 << words.bit_length())[:words]))
    return (total + int.from_bytes(raw[8 * words :], "little") * (2 * words + 1)) % 2**64


@cache
def _odd_numbers(count: int) -> np.ndarray:
    return np.arange(1, 2 * count, 2, dtype=np.uint64)
