"""Megatron's indexed datasets: tokens in NAME.bin, documents in NAME.idx (GPT-NeoX, NeMo and NxDT write the same).

A document is a run of sequences between two entries of the document index; nearly always it is one sequence, and
then the arrays of the .idx are used where they lie: nothing is copied, whatever the number of documents.
Source of the layout: Megatron-LM `core/datasets/indexed_dataset.py`, `_IndexWriter`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.shard import Column, Documents, Layout, Stamp, checked_lengths, opened, read_exactly

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"  # "lazy" and "cached" datasets of the first Megatron
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, entries of the document index
_TYPES = {4: "int32", 5: "int64", 8: "uint16"}
# Documents checked at once: 48 MB of lengths and pointers.
_AT_ONCE = 4_000_000


class _Index(NamedTuple):
    lengths: Column  # int32 [sequences], tokens
    pointers: Column  # int64 [sequences], byte of the first token
    documents: Column  # int64 [documents + 1], first sequence of each document
    dtype: str


def index_megatron(path: str) -> Layout:
    """The documents of NAME.idx. UserError names the path if it does not fit itself or its .bin."""
    tokens = str(Path(path).with_suffix(".bin"))
    size = Stamp.of(tokens).size
    with opened(path) as descriptor:
        index = _header(descriptor, path)
        plain = _check(descriptor, index, size, tokens)
        documents = None if plain else _join(descriptor, index, path)
    if plain:
        return Layout(tokens, index.dtype, None, index.pointers, index.lengths)
    return Layout(tokens, index.dtype, documents)


def _header(descriptor: int, path: str) -> _Index:
    size = os.fstat(descriptor).st_size
    if size < _HEADER.size:
        raise UserError(f"{path}: {size} bytes, too short for a Megatron index; copy or write it again")
    magic, version, kind, sequences, entries = _HEADER.unpack(read_exactly(descriptor, _HEADER.size, 0, path))
    if magic != MAGIC or version != 1:
        raise UserError(f"{path}: not a Megatron index of version 1; convert it with Megatron's current tools")
    if kind not in _TYPES:
        raise UserError(f"{path}: tokens of Megatron's type {kind}; want one of {_TYPES} (number: type)")
    lengths = Column(path, _HEADER.size, "<i4", sequences)
    pointers = Column(path, lengths.offset + 4 * sequences, "<i8", sequences)
    documents = Column(path, pointers.offset + 8 * sequences, "<i8", entries)
    if documents.offset + 8 * entries > size or not entries:
        raise UserError(f"{path}: {size} bytes do not hold its {sequences:,} sequences; it is truncated")
    return _Index(lengths, pointers, documents, _TYPES[kind])


def _check(descriptor: int, index: _Index, size: int, tokens: str) -> bool:
    """Whether every document is one sequence. UserError if the .idx and the .bin do not belong together."""
    width, plain = np.dtype(index.dtype).itemsize, index.documents.length == index.lengths.length + 1
    end = 0
    for start in range(0, index.lengths.length, _AT_ONCE):
        stop = min(start + _AT_ONCE, index.lengths.length)
        lengths = checked_lengths(index.lengths.read(descriptor, start, stop), index.lengths.path)
        ends = index.pointers.read(descriptor, start, stop) + lengths.astype(np.int64) * width
        end = max(end, int(ends.max()))
        plain = plain and np.array_equal(index.documents.read(descriptor, start, stop + 1), np.arange(start, stop + 1))
    if end > size:
        raise UserError(
            f"{tokens}: {size:,} bytes, but its .idx speaks of {end:,}; it is truncated or from another run"
        )
    return plain


def _join(descriptor: int, index: _Index, path: str) -> Documents:
    """Sequences joined into documents; they must lie one behind the other."""
    lengths = index.lengths.read(descriptor, 0, index.lengths.length).astype(np.int64)
    pointers = index.pointers.read(descriptor, 0, index.pointers.length)
    first = index.documents.read(descriptor, 0, index.documents.length)
    if first[0] != 0 or first[-1] != len(lengths) or (np.diff(first) < 0).any():
        raise UserError(f"{path}: the document index is damaged; write the dataset again")
    width = np.dtype(index.dtype).itemsize
    inside = np.ones(len(lengths), bool)
    inside[first[:-1][np.diff(first) > 0]] = False  # the first sequence of a document follows nothing
    follows = np.zeros(len(lengths), bool)
    follows[1:] = pointers[1:] == pointers[:-1] + lengths[:-1] * width
    if (inside & ~follows).any():
        raise UserError(f"{path}: the sequences of a document do not follow each other; write the dataset again")
    before = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.append(pointers, 0)[first[:-1]]  # an empty document at the end points anywhere
    return Documents(starts, checked_lengths(before[first[1:]] - before[first[:-1]], path))
