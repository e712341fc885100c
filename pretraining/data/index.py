"""The index of a shard: where each document is, built once and kept as a sidecar in the index folder.

The sidecar holds 12 bytes a document and 16 a group of 64 documents, and is read with pread like the data, so nothing
in memory grows with the number of documents. It is used only while size, time and a fingerprint of the content are
those it was built from. It is never written next to the data: that folder may be read-only or shared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from glob import escape
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.files import file_hash
from pretraining.data.hashing import short_hash
from pretraining.data.layouts import read_dataset_json
from pretraining.data.stores.find import shard_formats
from pretraining.data.stores.labels import unmark
from pretraining.data.stores.shard import DiskArray, ShardContents, chunks, in_memory
from pretraining.storage import (
    Location,
    OpenFile,
    Stamp,
    StorageError,
    is_remote,
    location,
    opened,
    size_of,
    stamp_of,
    store_of,
)

# Documents whose tokens are summed in the sidecar; blocks of the shuffled order consist of whole groups.
GROUP = 64
# Counted up where a shard that has an index may be refused now, and is looked at again (7: a .bin of another size).
_MAGIC = b"tokidx07"
_ALIGN = 64
# Bytes that the header has, unless its paths are longer. Constant: a run may open a sidecar that another start has
# replaced since, by another path of the shard, and reads its own offsets in it.
_HEADER = 65_536
# Bytes hashed at the beginning, the middle and the end of a file; the footers of Arrow and Parquet are at the end.
_SAMPLE = 65_536
# Seconds without a write after which a file that is not complete was left by a start that was killed: a day.
_LONGEST_BUILD = 86_400
# Documents summed at once: 50 MB of starts and lengths.
_AT_ONCE = 65_536 * GROUP


class TokenShard(NamedTuple):
    """A shard and how it is read: the same file read in another way has another index."""

    path: str
    format: str  # see stores.find.shard_formats
    column: str  # --col_name
    strip: tuple[int, ...]  # --strip_tokens


@dataclass(frozen=True)
class ShardIndex:
    """One shard, ready to be read."""

    path: str
    stamp: Stamp
    tokens: str  # the file that holds the tokens
    token_stamp: Stamp
    dtype: str
    documents: int
    nonempty: int  # documents with at least one token
    token_count: int
    trained: int | None  # see ShardContents
    fingerprint: str
    starts: DiskArray  # int64 [documents], bytes
    lengths: DiskArray  # int32 [documents], tokens
    groups: DiskArray  # int64 [(documents / 64, rounded up) + 1, 2]: tokens and non-empty documents before each group


def index_folder(configured: str) -> Path:
    """Return the folder of sidecars: `configured`, or a folder of the user's cache."""
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretraining" / "token_index"


def open_indexes(files: Sequence[TokenShard], folder: Path) -> list[ShardIndex]:
    """Return the indexes of all shards, in order; missing and stale ones are built, several at a time.

    UserError names the first shard that cannot be used.
    """
    requests = store_of(files[0].path).requests if files else 1
    threads = max(requests, min(8, os.cpu_count() or 1))
    _remove_left(folder)
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda file: open_index(file, folder), files))


@cache
def _remove_left(folder: Path) -> None:
    """Remove what builds that were killed have left, once a process: a mixture may have hundreds of datasets."""
    for temporary in folder.glob("*.tmp"):
        with suppress(OSError):  # another start may have removed it, or the folder is read-only
            if temporary.stat().st_mtime < time.time() - _LONGEST_BUILD:
                temporary.unlink()


def open_index(file: TokenShard, folder: Path) -> ShardIndex:
    """Return the index of one shard, from its sidecar if that is up to date."""
    sidecar = sidecar_path(file, folder)
    return _load(file, sidecar) or _build(file, sidecar)


def sidecar_path(file: TokenShard, folder: Path) -> Path:
    """Return the sidecar of a shard; the folder of the shard is part of its name."""
    return folder / f"{_unique_name(file.path, file.format, file.column, *map(str, file.strip))}.idx"


def _unique_name(path: str, *parts: str) -> str:
    """Return a name that only this file has, under whatever path, and parts that tell its uses apart."""
    real = str(location(path)) if is_remote(path) else os.path.realpath(path)
    return f"{PurePath(path).stem[:40]}-{short_hash(real, *parts)}"


def user_files(path: str) -> list[Location]:
    """Return the user's files of one shard: an index and its tokens for Megatron; decoded Parquet is ours."""
    file = location(path)
    return [file, file.with_suffix(".bin")] if file.suffix == ".idx" else [file]


def hash_record(file: Location, folder: Path) -> Path:
    """Return the file that has the sha256 of a file of a shard, from its first verification on."""
    return folder / f"{_unique_name(str(file))}.sha256"


def _check_verified(path: str, folder: Path) -> None:
    """Raise UserError if a file of a shard was verified, and has another content of the same size now."""
    for file in user_files(path):
        record = hash_record(file, folder)
        known = read_dataset_json(record) if record.is_file() else {}
        if known.get("size") == size_of(file) and known.get("sha256") != file_hash(file):
            remedy = f"restore the file, or remove {record} if the change is intended"
            raise UserError(f"{file}: its checksum is not the recorded one: {remedy}")


def _fingerprint(path: str, tokens: str, content: str = "") -> str:
    """Return the fingerprint of a shard; of a Megatron shard, of its index and its tokens. content: the file's own."""
    content = content or _file_fingerprint(path)
    return short_hash(content, _file_fingerprint(tokens)) if path.endswith(".idx") else content


def _file_fingerprint(path: str) -> str:
    """Return a hash of a file's size and of its beginning, middle and end: cheap, and different for another file."""
    with opened(path) as file:
        count = min(_SAMPLE, size := file.size)
        samples = [file.read_at(at, count) for at in (0, (size - count) // 2, size - count)]
    return short_hash(str(size), *samples)


# ---- Reading a sidecar


def _load(file: TokenShard, sidecar: Path) -> ShardIndex | None:
    """Return the index, or None if there is none, it is damaged, or it describes another content."""
    try:
        index = _read_header(sidecar) if sidecar.is_file() else None  # opening a named pipe would wait for its writer
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if index is None or index.stamp != stamp_of(file.path):
        return None
    is_other = index.tokens != file.path
    if is_other and not (location(index.tokens).exists() and index.token_stamp == stamp_of(index.tokens)):
        return None
    # the version of an object is that of its content; the time of a file is not
    if not is_remote(file.path) and index.fingerprint != _fingerprint(file.path, index.tokens):
        return None
    # the sidecar may have been built under another path of the shard: relative, or through a link
    tokens = file.path if index.tokens == index.path else index.tokens
    return replace(index, path=file.path, tokens=tokens)


def _read_header(sidecar: Path) -> ShardIndex | None:
    """Return what the header of a complete sidecar describes; None or an error for anything else."""
    size = sidecar.stat().st_size
    with sidecar.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return None
        header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), size)))
    return _from_header(header, sidecar) if size == header["size"] else None


def _from_header(header: dict[str, Any], sidecar: Path) -> ShardIndex:
    arrays = {name: DiskArray(path or str(sidecar), *place) for name, (path, *place) in header["arrays"].items()}
    if {array.dtype for array in arrays.values()} - {"<i4", "<i8"}:
        raise ValueError(f"{sidecar}: is damaged")
    stamps = {name: Stamp(*header["facts"][name]) for name in ("stamp", "token_stamp")}
    return ShardIndex(**{**header["facts"], **stamps, **arrays})


# ---- Building a sidecar


def _build(file: TokenShard, sidecar: Path) -> ShardIndex:
    """Index a shard and write its sidecar, which appears under its name when it is complete."""
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        _check_verified(file.path, sidecar.parent)
        before = stamp_of(file.path)
        content = _file_fingerprint(file.path)
        decoded = sidecar.with_suffix(f".{before.size}-{before.modified}-{content}.tokens")
        contents = shard_formats()[file.format].open(file.path, file.column, str(decoded))
        groups = _sum_groups(contents, file.path)
        if file.strip:
            contents = _strip(contents, file.strip)
            groups = _sum_groups(contents, file.path)
        if stamp_of(file.path) != before:
            raise UserError(f"{file.path}: changed while it was being read: start again when it is complete")
        # Files of an earlier content. To list the folder for each of 10 thousand new shards takes half a minute.
        if sidecar.is_file():
            for old in set(sidecar.parent.glob(f"{escape(sidecar.stem)}.*.tokens")) - {decoded}:
                old.unlink(missing_ok=True)
        fingerprint = _fingerprint(file.path, contents.tokens, content)
        return _write(contents, groups, sidecar, {"path": file.path, "stamp": before, "fingerprint": fingerprint})
    except StorageError:
        raise
    except OSError as error:
        path, indexes = error.filename or sidecar, "indexes are written there, choose another folder with --index_dir"
        is_shard = Path(path).with_suffix("") == Path(file.path).with_suffix("")  # or its .bin
        raise UserError(f"{path}: {error.strerror}: {'copy it or write it again' if is_shard else indexes}") from error


def _sum_groups(contents: ShardContents, path: str) -> np.ndarray:
    """Return tokens and non-empty documents before each group, int64 [groups + 1, 2].

    UserError if a document is not inside the file of tokens, or has 2^31 tokens or more.
    """
    size, width = stamp_of(contents.tokens).size, np.dtype(contents.dtype).itemsize
    parts = [np.zeros((1, 2), np.int64)]
    for starts, lengths in zip(chunks(contents.starts, _AT_ONCE), chunks(contents.lengths, _AT_ONCE), strict=True):
        counts = lengths.astype(np.int64)
        if int(counts.min()) < 0 or int(counts.max()) >= 2**31:
            raise UserError(f"{path}: a document has {int(counts.min()):,} or {int(counts.max()):,} tokens: it is "
                            "damaged, write the shard again")  # fmt: skip
        end = int((starts + counts * width).max(where=counts > 0, initial=0))
        if end > size or int(starts.min(where=counts > 0, initial=0)) < 0:
            raise UserError(f"{path}: its documents end at byte {end:,}, but {contents.tokens} has {size:,} bytes: "
                            "it is truncated or damaged, write the shard again")  # fmt: skip
        groups = np.arange(0, len(counts), GROUP)
        tokens, nonempty = (np.add.reduceat(each, groups, dtype=np.int64) for each in (counts, counts > 0))
        parts.append(np.stack([tokens, nonempty], axis=1))
    return np.cumsum(np.concatenate(parts), axis=0)


def _write(contents: ShardContents, groups: np.ndarray, sidecar: Path, facts: dict[str, Any]) -> ShardIndex:
    """Write the header, then the arrays at multiples of 64 bytes; those in a local file already are referred to."""
    facts |= {
        "tokens": contents.tokens,
        "token_stamp": stamp_of(contents.tokens),
        "dtype": contents.dtype,
        "documents": len(contents.lengths),
        "nonempty": int(groups[-1, 1]),
        "token_count": int(groups[-1, 0]),
        "trained": contents.trained,
    }
    arrays = {"groups": ("<i8", groups.reshape(-1)), "starts": ("<i8", contents.starts)}
    arrays["lengths"] = ("<i4", contents.lengths)
    places: dict[str, tuple[str, int, str, int]] = {}
    temporary = sidecar.with_suffix(f".{os.urandom(8).hex()}.tmp")
    with temporary.open("wb") as written:
        written.seek(max(_HEADER, 4096 + 24 * len(facts["path"] + contents.tokens)))  # twice, 12 bytes a character
        for name, (dtype, array) in arrays.items():
            if isinstance(array, DiskArray) and not is_remote(array.path):
                places[name] = (array.path, array.offset, array.dtype, array.length)
                continue
            written.seek(-written.tell() % _ALIGN, os.SEEK_CUR)
            places[name] = ("", written.tell(), dtype, len(array))
            for part in chunks(array, _AT_ONCE):
                written.write(np.ascontiguousarray(part, dtype).data)
        written.truncate()
        raw = json.dumps(header := {"facts": facts, "arrays": places, "size": written.tell()}).encode()
        written.seek(0)
        written.write(_MAGIC + len(raw).to_bytes(8, "little") + raw)
    temporary.replace(sidecar)
    return _from_header(header, sidecar)


def _strip(contents: ShardContents, tokens: tuple[int, ...]) -> ShardContents:
    """Return the documents without a first and a last token that is in `tokens` (one each, as fms-fsdp does)."""
    width = np.dtype(contents.dtype).itemsize
    starts, lengths = in_memory(contents.starts, np.int64), in_memory(contents.lengths, np.int64)
    with opened(contents.tokens) as file:
        cut = _is_one_of(tokens, file, starts, lengths, contents)
        starts, lengths = starts + cut * width, lengths - cut
        cut = _is_one_of(tokens, file, starts + (lengths - 1) * width, lengths, contents)
    return replace(contents, starts=starts, lengths=lengths - cut)


def _is_one_of(
    tokens: tuple[int, ...], file: OpenFile, offsets: np.ndarray, lengths: np.ndarray, contents: ShardContents
) -> np.ndarray:
    """Whether the token at each byte offset is in `tokens`, bool [documents]; False for empty documents."""
    nonempty = lengths > 0
    result = np.zeros(len(offsets), bool)
    result[nonempty] = np.isin(_tokens_at(file, offsets[nonempty], contents), tokens)
    return result


def last_tokens(shard: ShardIndex, count: int) -> np.ndarray:
    """Return the last token of the first non-empty documents, of at most `count` documents."""
    starts, lengths = (next(chunks(array, count), np.zeros(0, np.int64)) for array in (shard.starts, shard.lengths))
    nonempty = lengths > 0
    ends = starts[nonempty] + (lengths[nonempty].astype(np.int64) - 1) * np.dtype(shard.dtype).itemsize
    with opened(shard.tokens) as file:
        return _tokens_at(file, ends, shard)


def _tokens_at(file: OpenFile, offsets: np.ndarray, shard: ShardContents | ShardIndex) -> np.ndarray:
    """Return the token at each byte offset, in the dtype of the shard."""
    width = np.dtype(shard.dtype).itemsize
    read = file.in_order()
    tokens = np.frombuffer(b"".join([read(at, width) for at in offsets.tolist()]), shard.dtype).copy()
    if shard.trained is not None:
        unmark(tokens)
    return tokens
