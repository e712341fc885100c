"""The index of a shard: where each document lies, built once and kept as a sidecar in the index folder.

The sidecar holds 12 bytes a document and 16 a cell of 64 documents, and is read with pread like the data, so nothing
in memory grows with the number of documents. It is used only while size, time and a fingerprint of the content are
those it was built from. Never written beside the data: that folder may be read-only or shared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.hashing import short_hash
from pretraining.data.stores import find
from pretraining.data.stores.shard import Column, Documents, Layout, Stamp, opened, read_exactly

# Documents whose tokens are summed up in the sidecar; the unit that blocks of the shuffled order are made of.
CELL = 64
_MAGIC = b"tokidx01"
_ALIGN = 64
# Bytes hashed at the beginning, the middle and the end of a file; Arrow's and Parquet's footers are at the end.
_SAMPLE = 65_536
# Documents summed at once: 16 MB of lengths.
_AT_ONCE = 65_536 * CELL


class Source(NamedTuple):
    """What is indexed: the same file read in another way is another index."""

    path: str
    kind: str  # a name of stores.find.KINDS
    column: str  # --col_name
    strip: tuple[int, ...]  # --strip_tokens


@dataclass(frozen=True)
class ShardIndex:
    """One shard, ready to be read. Offsets in bytes, lengths in tokens."""

    path: str
    stamp: Stamp
    tokens: str  # the file that holds the tokens
    token_stamp: Stamp
    dtype: str
    documents: int
    filled: int  # documents with at least one token
    token_count: int
    longest: int
    fingerprint: str
    starts: Column  # int64 [documents]
    lengths: Column  # int32 [documents]
    cells: Column  # int64 [(documents / 64, rounded up) + 1, 2]: tokens and filled documents before each cell


def index_folder(configured: str) -> Path:
    """Where sidecars are kept: `configured`, or a folder of the user's cache."""
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretraining" / "token_index"


def open_indexes(sources: Sequence[Source], folder: Path) -> list[ShardIndex]:
    """The indexes of all shards, in order; what is missing or stale is built, several at a time.

    UserError names the first shard that cannot be used.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda source: open_index(source, folder), sources))


def open_index(source: Source, folder: Path) -> ShardIndex:
    """The index of one shard, from its sidecar if that still fits."""
    sidecar = sidecar_path(source, folder)
    return _load(source, sidecar) or _build(source, sidecar)


def sidecar_path(source: Source, folder: Path) -> Path:
    """The sidecar of a shard; where the shard lies is part of its name."""
    parts = (str(Path(source.path).resolve()), source.kind, source.column, *map(str, source.strip))
    return folder / f"{Path(source.path).stem[:40]}-{short_hash(*parts)}.idx"


def fingerprint(path: str) -> str:
    """A hash of a file's size and of its beginning, middle and end: cheap, and another file has another one."""
    size = Stamp.of(path).size
    with opened(path) as descriptor:
        count = min(_SAMPLE, size)
        samples = [read_exactly(descriptor, count, at, path) for at in (0, (size - count) // 2, size - count)]
    return short_hash(str(size), *samples)


# ---- Reading a sidecar


def _load(source: Source, sidecar: Path) -> ShardIndex | None:
    """The index, or None if there is none or it is of another content."""
    header = _header(sidecar)
    if header is None:
        return None
    index = _from_header(header, sidecar)
    if index.stamp != Stamp.of(source.path) or not Path(index.tokens).exists():
        return None
    fresh = index.token_stamp == Stamp.of(index.tokens) and index.fingerprint == _fingerprint(source, index.tokens)
    return index if fresh else None


def _fingerprint(source: Source, tokens: str) -> str:
    """Of the shard; where a .bin stands beside the .idx, of both."""
    both = fingerprint(source.path)
    return both if source.kind != "megatron" else short_hash(both, fingerprint(tokens))


def _header(sidecar: Path) -> dict[str, Any] | None:
    """The header of a complete sidecar; None for anything else, which is then built again."""
    try:
        with sidecar.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), sidecar.stat().st_size)))
        return header if sidecar.stat().st_size == header["size"] else None
    except (OSError, ValueError, KeyError):
        return None


def _from_header(header: dict[str, Any], sidecar: Path) -> ShardIndex:
    values: dict[str, Any] = dict(header["facts"])
    for name, (path, offset, dtype, length) in header["columns"].items():
        values[name] = Column(path or str(sidecar), offset, dtype, length)
    values["stamp"], values["token_stamp"] = Stamp(*values["stamp"]), Stamp(*values["token_stamp"])
    return ShardIndex(**values)


# ---- Building one


def _build(source: Source, sidecar: Path) -> ShardIndex:
    """Index the shard and write its sidecar under its final name in one step."""
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        decoded = sidecar.with_suffix(".tokens")
        before = Stamp.of(source.path)
        layout = find.read_layout(source.path, source.kind, source.column, str(decoded))
        if source.strip:
            layout = _stripped(layout, source)
        if Stamp.of(source.path) != before:
            raise UserError(f"{source.path}: changed while it was being read; start again when it is complete")
        return _write(source, layout, sidecar, before)
    except OSError as error:
        message = f"{error.filename or sidecar}: {error.strerror}; the indexes of the data are written to"
        raise UserError(f"{message} {sidecar.parent}: choose another folder with --index_dir") from error


def _write(source: Source, layout: Layout, sidecar: Path, stamp: Stamp) -> ShardIndex:
    cells, longest = _cells(layout, source.path)
    facts = {
        "path": source.path,
        "stamp": stamp,
        "tokens": layout.tokens,
        "token_stamp": Stamp.of(layout.tokens),
        "dtype": layout.dtype,
        "documents": _count(layout),
        "filled": int(cells[-1, 1]),
        "token_count": int(cells[-1, 0]),
        "longest": longest,
        "fingerprint": _fingerprint(source, layout.tokens),
    }
    arrays = {"cells": cells.reshape(-1)}
    if layout.documents is not None:
        arrays |= {"starts": layout.documents.starts, "lengths": layout.documents.lengths}
    references = {} if layout.documents is not None else {"starts": layout.starts, "lengths": layout.lengths}
    temporary = sidecar.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        header = _write_arrays(file, facts, arrays, references)
    temporary.replace(sidecar)
    return _from_header(header, sidecar)


def _write_arrays(
    file: BinaryIO, facts: dict[str, Any], arrays: dict[str, np.ndarray], references: dict[str, Column | None]
) -> dict[str, Any]:
    """Header, then the arrays at multiples of 64 bytes. The header's own length is settled by padding it."""
    room = 4096 + len(json.dumps(facts))
    columns: dict[str, Any] = {name: list(column) for name, column in references.items() if column is not None}
    end = room
    for name, array in arrays.items():
        end += -end % _ALIGN
        columns[name] = ["", end, array.dtype.str, len(array)]
        end += array.nbytes
    header = {"facts": facts, "columns": columns, "size": end}
    raw = json.dumps(header).encode()
    file.write(_MAGIC + (room - 16).to_bytes(8, "little") + raw.ljust(room - 16))
    for name, array in arrays.items():
        file.seek(columns[name][1])
        array.tofile(file)
    file.truncate(end)
    return header


def _count(layout: Layout) -> int:
    if layout.documents is not None:
        return len(layout.documents.lengths)
    assert layout.lengths is not None
    return layout.lengths.length


def _lengths(layout: Layout) -> Iterator[np.ndarray]:
    """The documents' lengths, in chunks of a multiple of 64."""
    count = _count(layout)
    if layout.documents is not None:
        for start in range(0, count, _AT_ONCE):
            yield layout.documents.lengths[start : start + _AT_ONCE]
        return
    assert layout.lengths is not None
    with opened(layout.lengths.path) as descriptor:
        for start in range(0, count, _AT_ONCE):
            yield layout.lengths.read(descriptor, start, min(start + _AT_ONCE, count))


def _cells(layout: Layout, path: str) -> tuple[np.ndarray, int]:
    """Tokens and filled documents before each cell, int64 [cells + 1, 2], and the longest document's tokens."""
    parts, longest = [np.zeros((1, 2), np.int64)], 0
    for lengths in _lengths(layout):
        longest = max(longest, int(lengths.max()))
        padded = np.zeros(-(-len(lengths) // CELL) * CELL, np.int64)
        padded[: len(lengths)] = lengths
        table = padded.reshape(-1, CELL)
        parts.append(np.stack([table.sum(axis=1), (table > 0).sum(axis=1)], axis=1))
    return np.cumsum(np.concatenate(parts), axis=0), longest


def _stripped(layout: Layout, source: Source) -> Layout:
    """The same documents without a first and a last token that is to be stripped (one each, as fms-fsdp does)."""
    documents = layout.documents or _read_documents(layout)
    width = np.dtype(layout.dtype).itemsize
    starts, lengths = documents.starts.astype(np.int64), documents.lengths.astype(np.int32)
    with opened(layout.tokens) as descriptor:
        first = _tokens_at(descriptor, starts, lengths > 0, layout)
        cut = np.isin(first, source.strip) & (lengths > 0)
        starts, lengths = starts + cut * width, lengths - cut.astype(np.int32)
        last = _tokens_at(descriptor, starts + (lengths.astype(np.int64) - 1) * width, lengths > 0, layout)
        lengths = lengths - (np.isin(last, source.strip) & (lengths > 0)).astype(np.int32)
    return Layout(layout.tokens, layout.dtype, Documents(starts, lengths))


def _read_documents(layout: Layout) -> Documents:
    assert layout.starts is not None and layout.lengths is not None
    with opened(layout.starts.path) as descriptor:
        count = layout.lengths.length
        return Documents(layout.starts.read(descriptor, 0, count), layout.lengths.read(descriptor, 0, count))


def _tokens_at(descriptor: int, offsets: np.ndarray, wanted: np.ndarray, layout: Layout) -> np.ndarray:
    """The token at each byte offset where one is wanted, -1 elsewhere; int64."""
    width = np.dtype(layout.dtype).itemsize
    raw = b"".join([read_exactly(descriptor, width, at, layout.tokens) for at in offsets[wanted].tolist()])
    found = np.full(len(offsets), -1, np.int64)
    found[wanted] = np.frombuffer(raw, layout.dtype)
    return found
