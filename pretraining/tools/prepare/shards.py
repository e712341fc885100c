"""Arrow shards of documents or rows, and the checksums by which the loader finds damage to them.

How many documents make a block follows from those of all shards together, so a shard is summed up for every number that
a dataset may have, while its bytes are in memory: the merge of many parts reads no token again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.data.corpus import documents_per_block
from pretraining.data.files import file_hash
from pretraining.data.index import GROUP
from pretraining.data.stores.find import shard_formats
from pretraining.data.stores.labels import LABELS, POSITIONS
from pretraining.data.stores.shard import Readable, in_memory
from pretraining.extensions.checksums import byte_sum
from pretraining.extensions.files import temporary_of
from pretraining.storage import opened
from pretraining.tools.prepare.instructions import PackedRow

COLUMNS = ("tokens", LABELS, POSITIONS)  # of shards; text has only the first
_AT_ONCE = 64  # rows written together
# Documents of a block: see documents_per_block in data/corpus.py. More have datasets of a billion documents alone.
BLOCKS = range(2 * GROUP, 64 * GROUP + 1, GROUP)


class ShardWriter:
    """One Arrow shard: list columns, at most 64 documents to a record batch. It appears when it is complete."""

    def __init__(self, path: Path, vocab_size: int, columns: Sequence[str]) -> None:
        import pyarrow as pa

        self._path, self._temporary = path, temporary_of(path)
        # 2 bytes where they suffice: half the disk and half the reading, for a conversion of 1 us a sequence
        tokens = pa.uint16() if vocab_size <= 1 << 16 else pa.int32()
        self._schema = pa.schema([(name, pa.list_(pa.int32() if number else tokens))
                                  for number, name in enumerate(columns)])  # fmt: skip
        self._file = pa.OSFile(os.fsencode(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._rows: list[PackedRow] = []
        self.documents = self.tokens = 0  # so far

    def write(self, columns: Sequence[Sequence[list[int]]]) -> None:
        """Append documents as one record batch."""
        import pyarrow as pa

        if columns[0]:
            arrays = [pa.array(lists, kind) for lists, kind in zip(columns, self._schema.types, strict=True)]
            with _named(self._path):
                self._writer.write(pa.record_batch(arrays, schema=self._schema))
        self.documents += len(columns[0])
        self.tokens += sum(map(len, columns[0]))

    def write_row(self, row: PackedRow) -> None:
        """Append a row of examples, with the next ones in one record batch."""
        self._rows.append(row)
        if len(self._rows) == _AT_ONCE:
            self._write_rows()

    def _write_rows(self) -> None:
        rows, self._rows = self._rows, []
        self.write([[row.tokens for row in rows], [row.labels for row in rows], [row.positions for row in rows]])

    def close(self) -> dict[str, Any]:
        """Rename the shard into place and return its record; without documents there is no shard."""
        self._write_rows()
        with _named(self._path):
            self._writer.close()
            self._file.close()
        record = {"name": self._path.name, "documents": self.documents, "tokens": self.tokens}
        if not self.documents:
            self._temporary.unlink()
            return record
        with self._temporary.open("rb") as file:
            os.fsync(file.fileno())
        record["sha256"] = file_hash(self._temporary)
        record["blocks"] = block_sums(self._temporary)
        self._temporary.replace(self._path)
        return record


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to an error of the system: pyarrow's do not have it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def block_sums(path: Path) -> list[str]:
    """Return the checksums of the blocks of a shard, in hexadecimal digits, for each of BLOCKS documents to a block.

    They are those of `Corpus`, and take 1 % of the time in which the shard was encoded. The last element holds for more
    documents, too, because it is the first with all documents in one block.
    """
    sums: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        contents = shard_formats()["arrow"].open(str(path), COLUMNS[0], str(Path(folder, "tokens")))
        starts, lengths = (in_memory(array, np.int64) for array in (contents.starts, contents.lengths))
        with opened(contents.tokens) as file:
            for count in BLOCKS:
                blocks = (slice(first, first + count) for first in range(0, len(starts), count))
                width = np.dtype(contents.dtype).itemsize
                values = [_block_sum(file, starts[block], lengths[block], width) for block in blocks]
                sums.append(np.array(values, "<u8").tobytes().hex())
                if len(values) <= 1:
                    break
    return sums


def _block_sum(file: Readable, starts: np.ndarray, lengths: np.ndarray, width: int) -> int:
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if not len(starts):
        return 0
    total = byte_sum(file, int(starts.min()), int((starts + lengths * width).max()))
    return (total + int(np.dot(starts, lengths))) % 2**64


def merged_sums(shards: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return "blocks" of meta.json from the records of all shards; None if the number is in no record."""
    count = documents_per_block(*(sum(shard[name] for shard in shards) for name in ("documents", "tokens")))
    if count not in BLOCKS or not all("blocks" in shard for shard in shards):  # of an earlier version
        return None
    at = BLOCKS.index(count)
    return {"documents": count, "sums": {each["name"]: each["blocks"][min(at, len(each["blocks"]) - 1)]
                                         for each in shards}}  # fmt: skip
