"""Documents of files of text, JSON lines and Parquet, divided into ranges that are read independently of each other."""

from __future__ import annotations

import codecs
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from pretraining.config.errors import UserError, counted

# Text per shard: small enough that a killed preparation loses seconds, large enough that a shard is worth its file.
SHARD_BYTES = 16 * 2**20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_JSON_LINES = (".jsonl", ".ndjson")
_ENCODINGS = {  # by byte order mark; UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_TRACE = 1000  # characters for each one that may be damaged: a text in Latin-1 has one in 20 to 50, of English in 2,000
_NAMED = 20  # unreadable files in a message


class FileRange(NamedTuple):
    """A range of one file."""

    path: str
    format: str  # "text": the file is one document; "jsonl": one per line; "parquet": one per row
    start: int  # bytes of plain JSON lines, row groups of Parquet; 0 otherwise
    stop: int


TextShard = tuple[FileRange, ...]  # the text of one shard


def format_of(path: Path, endings: Sequence[str]) -> str | None:
    """Return the format of a file, by its name; None if it is not known. endings: of plain text."""
    plain = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    if plain.suffix in _JSON_LINES:
        return "jsonl"
    if path.suffix == ".parquet":
        return "parquet"
    return "text" if plain.suffix in endings else None


def find_files(inputs: Sequence[str], endings: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the files to read and the ignored files of folders, sorted. UserError if an input is missing or empty."""
    chosen: list[Path] = []
    ignored: list[Path] = []
    for name in inputs:
        path = Path(name)
        if not path.exists():
            raise UserError(f"{name}: no such file or folder")
        if path.is_file() and path.suffix and format_of(path, endings) is None:
            raise UserError(
                f"{name}: files ending in {path.suffix} are not read as text: convert it to .txt, .jsonl or .parquet, "
                f"or read it as plain text with --endings={','.join([*endings, path.suffix])}"
            )
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            (chosen if path.is_file() or format_of(file, endings) else ignored).append(file)
    if not chosen:
        raise UserError(f"{', '.join(inputs)}: no text, .jsonl or .parquet files: --endings lists those of plain text")
    return chosen, ignored


def divide(files: Sequence[Path], endings: Sequence[str], shard_bytes: int = SHARD_BYTES) -> list[TextShard]:
    """Divide the files into shards of about `shard_bytes`, in order. Compressed JSON lines are not divided."""
    shards: list[TextShard] = []
    ranges: list[FileRange] = []
    left = shard_bytes
    for file in files:
        for part, size in _ranges(file, format_of(file, endings) or "text"):
            if ranges and size > left:
                shards.append(tuple(ranges))
                ranges, left = [], shard_bytes
            ranges.append(part)
            left -= size
    return [*shards, tuple(ranges)] if ranges else shards


def _ranges(file: Path, format: str) -> Iterator[tuple[FileRange, int]]:
    """Yield the ranges of a file with their sizes in bytes."""
    size = file.stat().st_size
    if format == "parquet":
        yield from _row_groups(file)
    elif format == "jsonl" and file.suffix not in _COMPRESSIONS:
        for start in range(0, max(size, 1), SHARD_BYTES):
            stop = min(start + SHARD_BYTES, size)
            yield FileRange(str(file), format, start, stop), stop - start
    else:
        yield FileRange(str(file), format, 0, 0), size


def _row_groups(file: Path) -> Iterator[tuple[FileRange, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a complete Parquet file ({error}): copy or write it again") from error
    for number in range(metadata.num_row_groups):
        yield FileRange(str(file), "parquet", number, number + 1), metadata.row_group(number).total_byte_size


def read_documents(shard: TextShard, key: str) -> Iterator[str]:
    """Yield the documents of a shard, in order. key: field of JSON lines, or column of Parquet, that holds the text."""
    for part in shard:
        if part.format == "text":
            yield _read_text(part.path)[0]
        elif part.format == "jsonl":
            yield from (_text_of(line, key, place) for place, line in _lines(part))
        else:
            yield from _rows(part, key)


def check_texts(files: Sequence[Path], endings: Sequence[str]) -> list[str]:
    """Read the files of plain text. Return a note for each that has damaged characters; UserError names the unreadable.

    Before a tokenizer is trained or a shard is written, so that all of them are known at once.
    """
    notes, unreadable = [], []
    for file in files:
        if (format_of(file, endings) or "text") != "text":
            continue
        try:
            _, encoding, replaced = _read_text(str(file))
        except UserError as error:
            unreadable.append(str(error))
            continue
        if replaced:
            notes.append(f"{file}: {counted(replaced, 'character')} not {encoding}, replaced by U+FFFD")
    if unreadable:
        more = [f"and {counted(len(unreadable) - _NAMED, 'more file')}"] if len(unreadable) > _NAMED else []
        raise UserError("\n".join([*unreadable[:_NAMED], *more]))
    return notes


def _read_text(path: str) -> tuple[str, str, int]:
    """Return the text of a file, its encoding, and how many characters were replaced. UserError if it is no text.

    The encoding is that of the byte order mark, or UTF-8.
    """
    with _open(path) as file:
        raw = file.read()
    encoding = next((name for mark, name in _ENCODINGS.items() if raw.startswith(mark)), "utf-8")
    text = raw.decode(encoding, errors="replace")
    replaced = text.count("\ufffd")
    name, remedy = encoding.removesuffix("-sig").upper(), "convert it to UTF-8 (iconv -t UTF-8), or leave it out"
    if "\0" in text:
        raise UserError(f"{path}: has NUL bytes, so it is binary, or UTF-16 without a byte order mark: {remedy}")
    if replaced * _TRACE > len(text):
        raise UserError(f"{path}: {replaced:,} of {len(text):,} characters are not {name}: {remedy}")
    return text, name, replaced


def read_records(shard: TextShard) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of JSON lines and the rows of Parquet, in order, each with its place for messages."""
    for part in shard:
        if part.format == "jsonl":
            yield from ((place, _record_of(line, place)) for place, line in _lines(part))
        elif part.format == "parquet":
            import pyarrow.parquet as pq

            with _naming(part.path), pq.ParquetFile(part.path, memory_map=False) as file:
                for number in range(part.start, part.stop):
                    rows = file.read_row_group(number).to_pylist()
                    yield from ((f"{part.path}, row {at} of group {number}", row) for at, row in enumerate(rows))
        else:
            raise UserError(f"{part.path}: plain text has no prompts: give .jsonl or .parquet files")


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn what pyarrow and the system say of a file that cannot be read into a UserError that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: cannot be read, it is truncated or damaged ({error}): copy or write it again"
        ) from error


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading; decompress it if its ending says so. UserError where reading it fails."""
    compression = _COMPRESSIONS.get(Path(path).suffix)
    with _naming(path):
        if compression is None:
            with Path(path).open("rb") as file:
                yield file
            return
        import pyarrow as pa

        stream: Any = pa.CompressedInputStream(pa.OSFile(path), compression)
        with io.BufferedReader(stream, 1 << 20) as lines:  # pyarrow's stream has no line iterator
            yield lines


def _lines(part: FileRange) -> Iterator[tuple[str, bytes]]:
    """Yield the lines that begin in [start, stop) bytes, with their places; of a compressed file, all lines."""
    compressed = Path(part.path).suffix in _COMPRESSIONS
    with _open(part.path) as file:
        at = part.start
        if at:  # a line that begins before belongs to the range before
            file.seek(at - 1, os.SEEK_SET)
            at += len(file.readline()) - 1
        for line in file:
            if not compressed and at >= part.stop:
                return
            if line.strip():
                yield f"{part.path}, byte {at}", line
            at += len(line)


def _record_of(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not a line of JSON ({error}): fix or remove it") from error
    return record if isinstance(record, dict) else {}


def _text_of(line: bytes, key: str, place: str) -> str:
    text = _record_of(line, place).get(key)
    if not isinstance(text, str):
        raise UserError(f"{place}: no text in field {key!r}: choose the field with --text_key")
    return text


def _rows(part: FileRange, key: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _naming(part.path), pq.ParquetFile(part.path, memory_map=False) as file:
        names = file.schema_arrow.names
        if key not in names:
            raise UserError(f"{part.path}: no column {key!r}, it has {', '.join(names)}: choose with --text_key")
        for number in range(part.start, part.stop):
            column = file.read_row_group(number, columns=[key]).column(0)
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) or column.null_count:
                raise UserError(
                    f"{part.path}: column {key!r} holds {column.type} with {column.null_count} nulls: it must hold text"
                )
            yield from column.to_pylist()
