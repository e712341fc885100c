"""Documents out of files of text, JSON lines and Parquet, in parts that can be read independently of each other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from pretraining.config.errors import UserError

# Text per part: small enough that a killed preparation loses seconds, large enough that a shard is worth its file.
PART_BYTES = 16 * 2**20
_PACKED = {".gz": "gzip", ".zst": "zstd"}
_JSON_LINES = (".jsonl", ".ndjson")


class Piece(NamedTuple):
    """A stretch of one file."""

    path: str
    kind: str  # "text": the file is one document; "jsonl": one per line; "parquet": one per row
    start: int  # bytes of plain JSON lines, row groups of Parquet; 0 otherwise
    stop: int


Part = tuple[Piece, ...]  # what one worker turns into one shard


def kind_of(path: Path, endings: Sequence[str]) -> str | None:
    """How a file is read, by its name; None if it is none of ours. endings: of plain text."""
    plain = path.with_suffix("") if path.suffix in _PACKED else path
    if plain.suffix in _JSON_LINES:
        return "jsonl"
    if path.suffix == ".parquet":
        return "parquet"
    return "text" if plain.suffix in endings else None


def find_files(inputs: Sequence[str], endings: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """(files to read, files of folders that are left aside), sorted. UserError if an input is missing or empty."""
    taken: list[Path] = []
    aside: list[Path] = []
    for name in inputs:
        path = Path(name)
        if not path.exists():
            raise UserError(f"{name}: no such file or folder")
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            (taken if path.is_file() or kind_of(file, endings) else aside).append(file)
    if not taken:
        raise UserError(f"{', '.join(inputs)}: no text, .jsonl or .parquet files; --endings names those of plain text")
    return taken, aside


def cut_into_parts(files: Sequence[Path], endings: Sequence[str], part_bytes: int = PART_BYTES) -> list[Part]:
    """The files in parts of about `part_bytes`, in order. Compressed JSON lines cannot be cut."""
    parts: list[Part] = []
    open_part: list[Piece] = []
    room = part_bytes
    for file in files:
        for piece, size in _pieces(file, kind_of(file, endings) or "text"):
            if open_part and size > room:
                parts.append(tuple(open_part))
                open_part, room = [], part_bytes
            open_part.append(piece)
            room -= size
    return [*parts, tuple(open_part)] if open_part else parts


def _pieces(file: Path, kind: str) -> Iterator[tuple[Piece, int]]:
    """The stretches of a file with their sizes in bytes."""
    size = file.stat().st_size
    if kind == "parquet":
        yield from _row_groups(file)
    elif kind == "jsonl" and file.suffix not in _PACKED:
        for start in range(0, max(size, 1), PART_BYTES):
            stop = min(start + PART_BYTES, size)
            yield Piece(str(file), kind, start, stop), stop - start
    else:
        yield Piece(str(file), kind, 0, 0), size


def _row_groups(file: Path) -> Iterator[tuple[Piece, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: not a complete Parquet file ({error}); copy or write it again") from error
    for number in range(metadata.num_row_groups):
        yield Piece(str(file), "parquet", number, number + 1), metadata.row_group(number).total_byte_size


def documents(part: Part, key: str) -> Iterator[str]:
    """The documents of a part, in order. key: field of JSON lines, or column of Parquet, that holds the text."""
    for piece in part:
        if piece.kind == "text":
            with _opened(piece.path) as file:
                yield file.read().decode(errors="replace")
        elif piece.kind == "jsonl":
            yield from _lines(piece, key)
        else:
            yield from _rows(piece, key)


def _opened(path: str) -> IO[bytes]:
    """A file for reading, decompressed by its ending."""
    packing = _PACKED.get(Path(path).suffix)
    if packing is None:
        return Path(path).open("rb")
    import pyarrow as pa

    stream: IO[bytes] = pa.CompressedInputStream(pa.OSFile(path), packing)
    return stream


def _lines(piece: Piece, key: str) -> Iterator[str]:
    """Documents of the lines that begin in [start, stop) bytes; of a compressed file, of all lines."""
    whole = Path(piece.path).suffix in _PACKED
    with _opened(piece.path) as file:
        at = piece.start
        if at:  # a line that begins before belongs to the part before
            file.seek(at - 1, os.SEEK_SET)
            at += len(file.readline()) - 1
        for line in file if not whole else _split_lines(file):
            if not whole and at >= piece.stop:
                return
            if line.strip():
                yield _text_of(line, key, f"{piece.path}, byte {at}")
            at += len(line)


def _split_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines of a decompressing stream, which has no line iterator of its own."""
    rest = b""
    while block := file.read(1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: not a line of JSON ({error}); mend or remove it") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{place}: no text in field {key!r}; name the field with --text_key")
    return text


def _rows(piece: Piece, key: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(piece.path, memory_map=False) as file:
        names = file.schema_arrow.names
        if key not in names:
            raise UserError(f"{piece.path}: no column {key!r}, it has {', '.join(names)}; choose with --text_key")
        for number in range(piece.start, piece.stop):
            column = file.read_row_group(number, columns=[key]).column(0)
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) or column.null_count:
                raise UserError(
                    f"{piece.path}: column {key!r} holds {column.type} with {column.null_count} nulls, no text"
                )
            yield from column.to_pylist()
