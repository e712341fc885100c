"""Megatron's indexed datasets: tokens in NAME.bin, documents in NAME.idx (GPT-NeoX, NeMo and NxDT write the same).

A document is a run of sequences between two entries of the document index; nearly always it is one sequence, and
then the arrays of the .idx are used in place: nothing is copied, whatever the number of documents.
Source of the format: Megatron-LM `core/datasets/indexed_dataset.py`, `_IndexWriter`.
"""

from __future__ import annotations

import struct

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.shard import DiskArray, ShardContents, chunks, in_memory
from pretraining.extensions.shard_formats import MEGATRON
from pretraining.storage import location, opened, stamp_of

_HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, entries of the document index
_TYPES = {4: "int32", 5: "int64", 8: "uint16"}
# Entries of the document index checked at once: 32 MB.
_AT_ONCE = 4_000_000


def index_megatron(path: str) -> ShardContents:
    """Return the documents of NAME.idx. UserError names the path if it is no complete index, or has no .bin."""
    size = stamp_of(path).size
    if size < _HEADER.size:
        raise UserError(f"{path}: {size} bytes are too short for a Megatron index: copy or write it again")
    with opened(path) as file:
        magic, version, kind, sequences, entries = _HEADER.unpack(file.read_at(0, _HEADER.size))
    if magic != MEGATRON or version != 1:
        raise UserError(f"{path}: not a Megatron index of version 1: convert it with Megatron's current tools")
    if size == _HEADER.size - 8 + 12 * sequences:
        raise UserError(f"{path}: an index of fairseq, which names no documents: write its sequences as lists in Arrow")
    if kind not in _TYPES:
        raise UserError(f"{path}: tokens of Megatron's type {kind}; the types that can be read are {_TYPES}")
    lengths = DiskArray(path, _HEADER.size, "<i4", sequences)  # tokens of each sequence
    pointers = DiskArray(path, lengths.offset + 4 * sequences, "<i8", sequences)  # byte of its first token
    first = DiskArray(path, pointers.offset + 8 * sequences, "<i8", entries)  # first sequence of each document
    if first.offset + 8 * entries > size or not entries:
        raise UserError(f"{path}: {size} bytes do not hold its {sequences:,} sequences: copy the file again")
    _check_modes(path, first.offset + 8 * entries, sequences, size)
    tokens = str(location(path).with_suffix(".bin"))
    _check_size(path, tokens, lengths, pointers, _TYPES[kind])
    if _one_sequence_each(first, sequences):
        return ShardContents(tokens, _TYPES[kind], pointers, lengths)
    starts, joined = _join(in_memory(lengths, np.int64), in_memory(pointers, np.int64), first, _TYPES[kind])
    return ShardContents(tokens, _TYPES[kind], starts, joined)


def _check_modes(path: str, place: int, sequences: int, size: int) -> None:
    """Raise UserError if sequences are no text: a multimodal index ends with the mode of each, 0 for text."""
    if size == place + sequences:
        modes = chunks(DiskArray(path, place, "i1", sequences), _AT_ONCE)
        if others := sum(map(np.count_nonzero, modes)):
            raise UserError(f"{path}: {others:,} of {sequences:,} sequences are no text, but of another mode of a "
                            "multimodal dataset: write those of text alone")  # fmt: skip
    elif size != place:
        raise UserError(f"{path}: {size:,} bytes, and its sequences take {place:,}: it is damaged, copy it again")


def _check_size(path: str, tokens: str, lengths: DiskArray, pointers: DiskArray, dtype: str) -> None:
    """Raise UserError if the .bin has more or fewer tokens than an index of all tokens, of any type, describes.

    Megatron's writers leave no gaps; an index with gaps, of some of the documents, is read as it is.
    """
    count = sum(int(part.sum(dtype=np.int64)) for part in chunks(lengths, _AT_ONCE))
    size, expected = stamp_of(tokens).size, count * np.dtype(dtype).itemsize
    if size == expected or not len(lengths):
        return
    last = len(lengths) - 1
    with opened(path) as file:
        begins, length = (int(array.read(file, last, last + 1)[0]) for array in (pointers, lengths))
    if begins in {np.dtype(kind).itemsize * (count - length) for kind in _TYPES.values()}:
        what = f"its {count:,} tokens of {dtype} take {expected:,}, but {tokens} has {size:,} bytes"
        raise UserError(f"{path}: {what}: they do not belong together, copy or write both again")


def _one_sequence_each(first: DiskArray, sequences: int) -> bool:
    """Whether every document is one sequence: the document index counts up to `sequences`."""
    return len(first) == sequences + 1 and all(
        np.array_equal(chunk, np.arange(number * _AT_ONCE, number * _AT_ONCE + len(chunk)))
        for number, chunk in enumerate(chunks(first, _AT_ONCE))
    )


def _join(lengths: np.ndarray, pointers: np.ndarray, index: DiskArray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of documents of several sequences, int64 [documents].

    UserError if the sequences of a document do not follow each other in the .bin.
    """
    first = in_memory(index, np.int64)
    if first[0] != 0 or first[-1] != len(lengths) or (np.diff(first) < 0).any():
        raise UserError(f"{index.path}: the document index is damaged: write the dataset again")
    begins = np.zeros(len(lengths), bool)
    begins[first[:-1][np.diff(first) > 0]] = True
    follows = np.zeros(len(lengths), bool)
    follows[1:] = pointers[1:] == pointers[:-1] + lengths[:-1] * np.dtype(dtype).itemsize
    if not (begins | follows).all():
        raise UserError(f"{index.path}: sequences of a document do not follow each other: write the dataset again")
    before = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.append(pointers, 0)[first[:-1]]  # an empty document at the end points anywhere
    return starts, before[first[1:]] - before[first[:-1]]
