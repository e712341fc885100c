"""Documents of files of text, JSON lines and Parquet, divided into ranges that are read independently of each other.

What cannot be read is handed to a function as a UserError that names the file and the line. If it returns, reading goes
on without that row, or without the rest of that file.
"""

from __future__ import annotations

import codecs
import io
import json
import lzma
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote

from pretraining.config.errors import UserError
from pretraining.tools.prepare.urls import Url, expand, is_url, source, unreachable

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# Text per shard: small enough that a killed preparation loses seconds, large enough that a shard is worth its file.
SHARD_BYTES = 16 * 2**20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}  # pyarrow's names; it lacks xz
_TEXT_TYPES = ("string", "large_string", "string_view")  # of Parquet, or of the categories of pandas
_JSON_LINES = (".jsonl", ".ndjson")
_ENCODINGS = {  # by byte order mark; UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
# Half of a pair of surrogates, as an escape of JSON or in bytes: Python reads it, and no tokenizer does.
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Folders in which Spark and Hive write files until they are complete, and Delta's description of a table.
_NO_DATA = re.compile(r"/(_temporary|_delta_log|\.(spark|hive)-staging[^/]*)/")
_TRACE = 1000  # characters for each one that may be damaged: a text in Latin-1 has one in 20 to 50, of English in 2,000


class FileRange(NamedTuple):
    """A range of one file."""

    path: str
    format: str  # "text": the file is one document; "jsonl": one per line; "parquet": one per row
    start: int  # bytes of plain JSON lines, row groups of Parquet; 0 otherwise
    stop: int


TextShard = tuple[FileRange, ...]  # the text of one shard
Input = Path | Url
T = TypeVar("T")
OnError = Callable[[UserError], None]  # gets what cannot be read; raises, or returns to go on without it


class Document(NamedTuple):
    """One document and where it comes from."""

    text: str
    place: SourceLocation


class SourceLocation(NamedTuple):
    """The place of a document, in words when a message needs it."""

    path: str
    format: str
    start: int  # of the part of a file that is read: the byte of a plain line, the row of Parquet
    number: int  # of the row in the part, from 0

    def __str__(self) -> str:
        if self.format == "text":
            return self.path
        first = 1 + (_lines_before(self.path, self.start) if self.format == "jsonl" else self.start)
        return f"{self.path}, {'line' if self.format == 'jsonl' else 'row'} {first + self.number}"


@cache
def _lines_before(path: str, stop: int) -> int:
    """Return the lines that end in the first `stop` bytes of a plain file."""
    lines, left = 0, stop
    with _open(path) as file:
        while left:
            raw = file.read(min(left, 1 << 22))
            lines, left = lines + raw.count(b"\n"), left - len(raw) if raw else 0
    return lines


def raise_unreadable(error: UserError) -> NoReturn:
    """Raise what cannot be read."""
    raise error


def skip_unreadable(error: UserError) -> None:
    """Go on without what cannot be read, because the look at all files has reported it."""


def text_format(path: Input, endings: Sequence[str]) -> str | None:
    """Return the format of a file, by its name; None if it is not known. endings: of plain text."""
    plain = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    if plain.suffix in _JSON_LINES:
        return "jsonl"
    if path.suffix == ".parquet":
        return "parquet"
    return "text" if plain.suffix in endings else None


def find_files(inputs: Sequence[str], endings: Sequence[str]) -> tuple[list[Input], list[Input]]:
    """Return the files to read and the ignored files of folders, and links to folders, sorted.

    UserError if an input is missing or empty.
    """
    files: list[Input]
    chosen: list[Input] = []
    ignored: list[Input] = []
    for name in inputs:
        if not name.strip():  # Path("") is the working directory
            raise UserError(f"--input={','.join(inputs)}: an empty name: leave a comma out, or write . for this folder")
        if is_url(name):
            urls, is_folder = expand(name)
            files = [*urls]
        elif not (path := Path(name)).exists():
            raise UserError(f"{path.absolute()}: no such file or folder")
        else:
            is_folder = path.is_dir()
            inside = sorted(file for file in path.rglob("*") if file.is_file() or file.is_symlink())
            files = [*inside] if is_folder else [path]
            _refuse_removed(files)
        for file in files:
            if not is_folder and file.suffix and text_format(file, endings) is None:
                raise UserError(
                    f"{name}: files ending in {file.suffix} are not read as text: convert it to .txt, .jsonl or "
                    f".parquet, or read it as plain text with --endings={','.join([*endings, file.suffix])}"
                )
            outside = name if is_url(name) else str(Path(name))  # the folder itself may be in one of that name
            is_data = text_format(file, endings) is not None and not _NO_DATA.search(str(file).removeprefix(outside))
            if isinstance(file, Path) and not file.is_file():  # a link to a folder, or to nothing
                if is_data and not file.exists():
                    raise UserError(f"{file}: a link to nothing: restore what it names, or remove it")
                is_data = False
            (ignored if is_folder and not is_data else chosen).append(file)
    if not chosen:
        remedy = "--endings lists those of plain text"
        if any(file.suffix == ".arrow" for file in ignored):
            remedy = "write a table in Arrow as Parquet, a folder of save_to_disk() with the dataset's to_parquet()"
        raise UserError(f"{', '.join(inputs)}: no text, .jsonl or .parquet files: {remedy}")
    return chosen, ignored


def _refuse_removed(files: Sequence[Input]) -> None:
    """Raise UserError for a file that its Delta table has removed, and which a reader of plain Parquet still finds."""
    found = set(files)
    for log in (file for file in files if isinstance(file, Path) and file.match("_delta_log/*.json")):
        try:
            actions = [json.loads(line) for line in log.read_text().splitlines()]
            removed = [log.parents[1] / unquote(action["remove"]["path"]) for action in actions if "remove" in action]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{log}: not a log of a Delta table ({error}): copy the table again") from error
        if gone := found.intersection(removed):
            remedy = "write the table as plain Parquet, or vacuum it"
            raise UserError(f"{min(gone, key=str)}: its Delta table has removed it: {remedy}")


def divide(files: Sequence[Input], endings: Sequence[str], shard_bytes: int = SHARD_BYTES) -> list[TextShard]:
    """Divide the files into shards of about `shard_bytes`, in order. Compressed JSON lines are not divided."""
    shards: list[TextShard] = []
    ranges: list[FileRange] = []
    left = shard_bytes
    for file in files:
        for part, size in _ranges(file, text_format(file, endings) or "text"):
            if ranges and size > left:
                shards.append(tuple(ranges))
                ranges, left = [], shard_bytes
            ranges.append(part)
            left -= size
    return [*shards, tuple(ranges)] if ranges else shards


def _ranges(file: Input, format: str) -> Iterator[tuple[FileRange, int]]:
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


def _row_groups(file: Input) -> Iterator[tuple[FileRange, int]]:
    """Yield the row groups; of a file that is damaged or has no rows, one range, which is reported when it is read."""
    try:
        with _open_parquet(str(file)) as opened:
            groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
    except UserError:
        groups = []
    for number, group in enumerate(groups):
        yield FileRange(str(file), "parquet", number, number + 1), group.total_byte_size
    if not groups:
        yield FileRange(str(file), "parquet", 0, 0), 0


def read_documents(shard: TextShard, key: str, on_error: OnError = raise_unreadable) -> Iterator[Document]:
    """Yield the documents of a shard, in order. key: field of JSON lines, or column of Parquet, that holds the text."""
    for part in shard:
        if part.format == "text":
            documents = _file(part.path)
        elif part.format == "jsonl":
            documents = _texts(part, key, on_error)
        else:
            documents = _rows(part, key, on_error)
        yield from _until_error(documents, on_error)


def read_records(
    shard: TextShard, on_error: OnError = raise_unreadable
) -> Iterator[tuple[dict[str, Any], SourceLocation]]:
    """Yield the objects of JSON lines and the rows of Parquet, in order."""
    for part in shard:
        if part.format == "text":
            on_error(UserError(f"{part.path}: plain text has no prompts: give .jsonl or .parquet files"))
        else:
            yield from _until_error(_objects(part, on_error) if part.format == "jsonl" else _tables(part), on_error)


def _until_error(items: Iterator[T], on_error: OnError) -> Iterator[T]:
    """Yield the items, up to an error that ends them."""
    try:
        yield from items
    except UserError as error:
        on_error(error)


def read_text(path: str) -> tuple[str, str, int]:
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


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn what pyarrow and the system say of a file that cannot be read into a UserError that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(
            f"{path}: cannot be read, it is truncated or damaged ({error}): copy or write it again"
        ) from error
    except Exception as error:  # a client's own
        if isinstance(error, UserError) or not is_url(path):
            raise
        raise unreachable(path, error) from error


class XzReader(io.RawIOBase):
    """What a file of xz streams holds. lzma.open takes whatever is no stream behind the first one for the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._decoder = file, lzma.LZMADecompressor()

    def readable(self) -> bool:  # what io.RawIOBase declares
        return True

    def readinto(self, target: Any) -> int:
        """Raises LZMAError for what is no stream, and EOFError where one is not complete."""
        data = b""
        while not data:
            raw = b""
            if self._decoder.eof:
                raw = self._decoder.unused_data
                while not (raw := raw.lstrip(b"\0")):  # padding between streams
                    if not (raw := self._file.read(1 << 16)):
                        return 0
                self._decoder = lzma.LZMADecompressor()
            elif self._decoder.needs_input and not (raw := self._file.read(1 << 16)):
                raise EOFError("it ends within a stream")
            data = self._decoder.decompress(raw, len(target))
        target[: len(data)] = data
        return len(data)


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading; decompress it if its ending says so. UserError where reading it fails."""
    file = source(path)
    compression = _COMPRESSIONS.get(file.suffix)
    with _naming(path), file.open("rb") as raw:
        if compression is None:
            yield raw
            return
        if compression == "xz":
            with io.BufferedReader(XzReader(raw), 1 << 20) as lines:
                yield lines
            return
        import pyarrow as pa

        stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)
        with io.BufferedReader(stream, 1 << 20) as buffered:  # pyarrow's stream has no line iterator
            yield buffered


@contextmanager
def _open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _open(path) as file:
        try:
            opened = pq.ParquetFile(file)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a complete Parquet file ({error}): copy or write it again") from error
        yield opened


def _lines(part: FileRange) -> Iterator[tuple[bytes, SourceLocation]]:
    """Yield the lines that begin in [start, stop) bytes; of a compressed file, all lines."""
    compressed = source(part.path).suffix in _COMPRESSIONS
    with _open(part.path) as file:
        at = part.start
        if at:  # a line that begins before belongs to the range before
            file.seek(at - 1, os.SEEK_SET)
            at += len(file.readline()) - 1
        first = at
        for number, line in enumerate(file):
            if not compressed and at >= part.stop:
                return
            if line.strip():
                yield line, SourceLocation(part.path, "jsonl", first, number)
            at += len(line)


def _file(path: str) -> Iterator[Document]:
    yield Document(read_text(path)[0], SourceLocation(path, "text", 0, 0))


def _objects(part: FileRange, on_error: OnError) -> Iterator[tuple[dict[str, Any], SourceLocation]]:
    for line, place in _lines(part):
        try:
            record = json.loads(line.decode("utf-8-sig", "surrogatepass"))  # of bytes, it would try UTF-16, too
            if _MAY_BE_SURROGATE.search(line):
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start : error.end])
            on_error(UserError(f"{place}: has {half}, half of a character (a surrogate): fix or remove it"))
        except (ValueError, RecursionError) as error:
            on_error(UserError(f"{place}: not a line of JSON ({getattr(error, 'msg', error)}): fix or remove it"))
        else:
            yield record if isinstance(record, dict) else {}, place


def _texts(part: FileRange, key: str, on_error: OnError) -> Iterator[Document]:
    for record, place in _objects(part, on_error):
        if isinstance(text := record.get(key), str):
            yield Document(text, place)
        else:
            on_error(UserError(f"{place}: no text in field {key!r}: choose the field with --text_key"))


def _tables(part: FileRange) -> Iterator[tuple[dict[str, Any], SourceLocation]]:
    """Yield the rows of row groups of Parquet, whose objects have no value for the keys that only others have."""
    with _open_parquet(part.path) as file:
        before = _rows_before(file, part.start)
        for group in range(part.start, part.stop):
            for number, row in enumerate(file.read_row_group(group).to_pylist()):
                yield _without_nulls(row), SourceLocation(part.path, "parquet", before, number)
            before += file.metadata.row_group(group).num_rows


def _without_nulls(value: Any) -> Any:
    """Return a value without keys that have none, but for a message's content, which is null where tools are called."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        kept = ("content",) if "role" in value else ()
        return {key: _without_nulls(each) for key, each in value.items() if each is not None or key in kept}
    return value


def _rows(part: FileRange, key: str, on_error: OnError) -> Iterator[Document]:
    import pyarrow as pa

    with _open_parquet(part.path) as file:
        if (names := file.schema_arrow.names).count(key) != 1:
            raise UserError(f"{part.path}: no single column {key!r} among {', '.join(names)}: choose with --text_key")
        kind, before = file.schema_arrow.field(key).type, _rows_before(file, part.start)
        if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in _TEXT_TYPES:
            raise UserError(f"{part.path}: column {key!r} holds {kind}: it must hold text")
        for group in range(part.start, part.stop):
            for number, text in enumerate(file.read_row_group(group, columns=[key]).column(0).to_pylist()):
                place = SourceLocation(part.path, "parquet", before, number)
                if text is None:
                    on_error(UserError(f"{place}: null in column {key!r}: fill or remove it"))
                else:
                    yield Document(text, place)
            before += file.metadata.row_group(group).num_rows


def _rows_before(file: pq.ParquetFile, group: int) -> int:
    return sum(file.metadata.row_group(number).num_rows for number in range(group))
