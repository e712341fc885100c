"""A look at all input before a tokenizer is trained or a shard is written: what cannot be read is known together.

Files at a URL are opened, and not loaded a second time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np

from pretraining.config.errors import UserError, counted
from pretraining.data.hashing import short_hash
from pretraining.tools.prepare.instructions import Example, Reader, check_record
from pretraining.tools.prepare.text import (
    Document,
    FileRange,
    OnError,
    TextShard,
    read_documents,
    read_records,
    read_text,
    skip_unreadable,
)
from pretraining.tools.prepare.urls import is_url

if TYPE_CHECKING:
    from pretraining.extensions.tokenizers.tokenizer import Tokenizer

_SHOWN, _ENCODED = 40, 100_000  # tokens and characters of a document
_NAMED = 20  # mistakes or files in a message
_MOST = 1000  # mistakes of one shard, after which it is not read on: a wrong --text_key makes one of every row


class _TooManyError(Exception):
    """Ends the reading of a shard."""


@dataclass
class Survey:
    """What was found in the input of one shard."""

    bad: list[str] = field(default_factory=list)  # what cannot be read, and why
    is_complete: bool = True  # whether it was read to its end
    documents: Counter[str] = field(default_factory=Counter)  # with text, by file; 0 of a file without
    characters: int = 0
    crlf: set[str] = field(default_factory=set)  # files of plain text
    replaced: list[str] = field(default_factory=list)  # files of plain text with damaged characters
    hashes: array[int] = field(default_factory=lambda: array("Q"))  # of the documents with text, in order
    limit: int = _MOST  # of mistakes

    def add_error(self, error: UserError) -> None:
        """Keep a mistake; the same one in several row groups of a file counts once."""
        if str(error) not in self.bad[-1:]:
            self.bad.append(str(error))
        if len(self.bad) == self.limit:
            raise _TooManyError

    def add(self, document: Document) -> None:
        """Count a document."""
        text, place = document
        self.documents[place.path] += bool(text)
        self.characters += len(text)
        if text:
            self.hashes.append(int(short_hash(text), 16))
        if place.format == "text":
            if "\r\n" in text:
                self.crlf.add(place.path)
            if "\ufffd" in text and (damaged := read_text(place.path))[2]:
                self.replaced.append(f"{place.path}: {counted(damaged[2], 'character')} not {damaged[1]}, "
                                     "replaced by U+FFFD")  # fmt: skip


def survey(shard: TextShard, key: str, is_sft: bool, skip_bad: int) -> Survey:
    """Return what the input of a shard holds."""
    local = [part for part in shard if not is_url(part.path)]
    found = Survey(documents=Counter({part.path: 0 for part in local}), limit=max(_MOST, skip_bad + 1))
    try:
        for part in shard:
            documents = read_texts((part,), key, is_sft, found.add_error)
            if part in local:
                for document in documents:
                    found.add(document)
            else:  # the first document shows whether the field is there
                next(documents, None)
    except _TooManyError:
        found.is_complete = False
    return found


def read_texts(shard: TextShard, key: str, is_sft: bool, on_error: OnError) -> Iterator[Document]:
    """Yield the documents of a shard, or its records of instruction data as text."""
    return _examples(shard, on_error) if is_sft else read_documents(shard, key, on_error)


def _examples(shard: TextShard, on_error: OnError) -> Iterator[Document]:
    """Yield the records of instruction data as text."""
    for record, place in read_records(shard, on_error):
        try:
            check_record(record)
        except UserError as error:
            on_error(UserError(f"{place}: {error}"))
        else:
            yield Document(repr(record), place)


def report(found: Sequence[Survey], skip_bad: int) -> None:
    """Print what was found. UserError with all mistakes if they are more than `skip_bad`."""
    bad = list(dict.fromkeys(line for each in found for line in each.bad))
    if len(bad) > skip_bad:
        is_complete = all(each.is_complete for each in found)
        title = f"{'' if is_complete else 'at least '}{counted(len(bad), 'problem')} with the input:"
        remedy = f"fix them, or leave them out with --skip_bad={len(bad)}" if is_complete else "fix them"
        raise UserError("\n".join([title, *_first(bad), remedy]))
    files = Counter[str]()
    for each in found:
        files.update(each.documents)
    characters = counted(sum(each.characters for each in found), "character")
    print(f"looked at {counted(len(files), 'file')}: {counted(files.total(), 'document')}, {characters}")
    if files and not files.total() and not bad:
        raise UserError("the input has no text: every file is empty")
    notes = {
        "without text, left out": [name for name in files if not files[name] and not any(name in line for line in bad)],
        "lines end in CRLF, which stays": [name for each in found for name in each.crlf],
        "damaged characters": [line for each in found for line in each.replaced],
        "exact copies of earlier documents, kept": _copies(found),
        "left out": bad,
    }
    for title, lines in notes.items():
        if lines:
            print("\n".join([f"{title}:", *_first(lines)]))


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, indented, and how many there are besides."""
    more = [f"  and {len(lines) - _NAMED:,} more"] if len(lines) > _NAMED else []
    return [*(f"  {line}" for line in lines[:_NAMED]), *more]


def _copies(found: Sequence[Survey]) -> list[str]:
    """Return a line for each file that has documents which came before."""
    hashes = np.concatenate([np.zeros(0, np.uint64), *(np.array(each.hashes, np.uint64) for each in found)])
    _, first, place = np.unique(hashes, return_index=True, return_inverse=True)
    copies = np.flatnonzero(first[place] != np.arange(len(hashes)))
    names = [name for each in found for name in each.documents]
    ends = np.cumsum([number for each in found for number in each.documents.values()])
    numbers, earlier, counts = np.unique(np.searchsorted(ends, copies, "right"), return_index=True, return_counts=True)
    firsts = np.searchsorted(ends, first[place][copies[earlier]], "right")
    return [
        f"{names[number]}: {counted(int(count), 'document')}, such as one of {names[origin]}"
        for number, origin, count in zip(numbers, firsts, counts, strict=True)
    ]


# ---- A preview


def preview(parts: Sequence[FileRange], key: str, tokenizer: Tokenizer, reader: Reader | None) -> list[str]:
    """Return three documents of different places as tokens. reader: of instruction data."""
    lines = [f"three documents as tokens, divided by |{'; what is not trained, in brackets' if reader else ''}:"]
    for at, count in Counter(number * len(parts) // 3 for number in range(3)).items():
        lines += islice(_previews(tuple(parts[at:]), key, tokenizer, reader), count)
    return lines


def _previews(parts: TextShard, key: str, tokenizer: Tokenizer, reader: Reader | None) -> Iterator[str]:
    if reader is None:
        for text, place in read_documents(parts, key, skip_unreadable):
            if text:
                (tokens,) = tokenizer.encode([text[:_ENCODED]])
                size = f"{counted(len(tokens), 'token')} in {counted(min(len(text), _ENCODED), 'character')}"
                yield _shown(f"{place}, {size}", tokenizer, Example(tokens, [True] * len(tokens)))
        return
    for record, place in read_records(parts, skip_unreadable):
        with suppress(UserError):
            example = reader.example(record, str(place))
            yield _shown(f"{place}, {counted(len(example.tokens), 'token')}", tokenizer, example)


def _shown(title: str, tokenizer: Tokenizer, example: Example) -> str:
    text = ""
    pairs = zip(example.tokens[:_SHOWN], example.trained, strict=False)
    for is_trained, group in groupby(pairs, key=lambda pair: pair[1]):
        pieces = "|".join(tokenizer.decode([token]) for token, _ in group)
        text += ("|" if text else "") + (pieces if is_trained else f"[{pieces}]")
    line = text.replace("\n", "\\n").replace("\r", "\\r")
    return f"  {title}: {line}{'|...' if len(example.tokens) > _SHOWN else ''}"
