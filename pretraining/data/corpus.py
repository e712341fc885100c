"""One dataset as an endless stream of tokens: documents shuffled anew in each epoch, a separator after each.

Knows nothing of mixtures, ranks or batches. Documents are grouped into blocks that lie together in a shard; an epoch
permutes the blocks and the documents of every block. In memory are one number per block (at most 2^18 blocks,
whatever the number of documents) and the documents of the blocks that are being read.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.files import OpenFile, OpenFiles
from pretraining.data.hashing import key_of, mix_one, permutation
from pretraining.data.index import CELL, ShardIndex

# Tokens a block should have: with short documents whole blocks are read at once, and 64 KiB take 8 us.
_BLOCK_TOKENS = 16_384
_MOST_BLOCKS = 1 << 18
# A read of one document costs about 1 us, as much as copying 8 KiB out of the page cache.
_BYTES_PER_READ = 8_192
# Blocks whose documents are known at a time, in bytes, for the whole stream: 1024 slots of three datasets take
# 12 MiB, and 17 with documents of 66 tokens.
_VIEW_BYTES = 48 * 2**20


@dataclass(frozen=True)
class Order:
    """What decides the order of one dataset, apart from its documents."""

    key: tuple[int, ...]  # seed and whatever tells this dataset from others
    shuffled: bool
    eos: int
    bos: int | None
    marked: bool  # whether anybody asks where documents begin

    @property
    def added(self) -> int:
        """Tokens added to every document."""
        return 1 if self.bos is None else 2


class _Epoch(NamedTuple):
    key: int  # of the permutations inside blocks
    order: memoryview  # int64 [blocks], blocks in the order of this epoch
    before: memoryview  # int64 [blocks + 1], tokens before each of them


class _View(NamedTuple):
    """The documents of one block in the order of one epoch, without empty ones.

    memoryviews of int64: a binary search or a slice of a few elements takes a third of numpy's time.
    """

    shard: ShardIndex
    width: int  # bytes of a token
    starts: memoryview  # [documents], byte offset of the first token
    lengths: memoryview  # [documents], tokens
    before: memoryview  # [documents + 1], position of each document in the block, added tokens included
    low: int  # first byte of the block's tokens
    high: int  # the byte after the last


class Views:
    """The block views made last, for all datasets of a stream together. Threads may share it."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, int, int], _View] = {}
        self._bytes = 0
        self._lock = Lock()

    def get(self, key: tuple[int, int, int]) -> _View | None:
        """The view of (dataset, epoch, block), if it is still there."""
        return self._views.get(key)

    def put(self, key: tuple[int, int, int], view: _View) -> None:
        """Keep a view; the oldest leave when all together are too large. Slots are read in turn: oldest is idlest."""
        with self._lock:
            if key in self._views:
                return
            self._views[key] = view
            self._bytes += _size(view)
            while self._bytes > _VIEW_BYTES and len(self._views) > 1:
                self._bytes -= _size(self._views.pop(next(iter(self._views))))


def _size(view: _View) -> int:
    """Bytes of a view; 1000 for the objects around the arrays."""
    return 1000 + 3 * view.before.nbytes


class Corpus:
    """The endless stream of one dataset. Threads may share it."""

    def __init__(
        self,
        indexes: list[ShardIndex],
        span: tuple[int, int],
        order: Order,
        *,
        number: int,
        files: OpenFiles,
        views: Views,
    ) -> None:
        """span: documents [first, last), counted over all shards. number: of the dataset, for `views`."""
        self._indexes, self._order, self._number = indexes, order, number
        self._files, self._views = files, views
        self._epochs: dict[int, _Epoch] = {}
        self._lock = Lock()
        self._shard, self._first, self._last, self._tokens = _blocks(indexes, span, order.added, files)
        self.tokens = int(self._tokens.sum())  # of one epoch, added ones included

    def fill(self, position: int, out: np.ndarray, seen: set[OpenFile]) -> list[int]:
        """Copy the stream from `position` on into `out` (int32, contiguous); where documents begin in it.

        seen: files that were checked for change during this batch.
        """
        done, total = 0, len(out)
        beginnings: list[int] = []
        out.fill(self._order.eos)
        while done < total:
            epoch, within = divmod(position + done, self.tokens)
            plan = self._epochs.get(epoch) or self._plan(epoch)
            place = bisect_right(plan.before, within) - 1
            view = self._view(plan, epoch, plan.order[place])
            within -= plan.before[place]
            count = min(total - done, view.before[-1] - within)
            file = self._files.tokens(view.shard)
            if file not in seen:
                file.check()
                seen.add(file)
            places = self._copy(view, file, within, out if count == total else out[done : done + count])
            beginnings += [done + at for at in places]
            done += count
        return beginnings

    def sources(self, position: int, count: int) -> list[str]:
        """The shards that tokens [position, position + count) come from, for a message."""
        found, done = [], 0
        while done < count:
            epoch, within = divmod(position + done, self.tokens)
            plan = self._epochs.get(epoch) or self._plan(epoch)
            place = bisect_right(plan.before, within) - 1
            found.append(self._indexes[self._shard[plan.order[place]]].path)
            done += plan.before[place + 1] - within
        return list(dict.fromkeys(found))

    def _plan(self, epoch: int) -> _Epoch:
        with self._lock:
            blocks = len(self._tokens)
            key = key_of(*self._order.key, epoch)
            order = permutation(blocks, mix_one(key)) if self._order.shuffled else np.arange(blocks)
            before = np.zeros(blocks + 1, np.int64)
            np.cumsum(self._tokens[order], out=before[1:])
            self._epochs[epoch] = plan = _Epoch(key, order.data, before.data)
            while len(self._epochs) > 3:  # a batch touches two; readers ahead of it a third
                self._epochs.pop(next(iter(self._epochs)), None)
        return plan

    def _view(self, plan: _Epoch, epoch: int, block: int) -> _View:
        key = (self._number, epoch, block)
        view = self._views.get(key)
        if view is None:
            view = self._read_view(block, key_of(plan.key ^ block))
            self._views.put(key, view)
        return view

    def _read_view(self, block: int, key: int) -> _View:
        shard = self._indexes[self._shard[block]]
        first, last = int(self._first[block]), int(self._last[block])
        starts = shard.starts.read(self._files.column(shard.starts, shard).descriptor, first, last)
        lengths = shard.lengths.read(self._files.column(shard.lengths, shard).descriptor, first, last)
        filled = np.flatnonzero(lengths)
        if self._order.shuffled:
            filled = filled[permutation(len(filled), key)]
        starts, lengths = starts[filled], lengths[filled].astype(np.int64)
        before = np.zeros(len(filled) + 1, np.int64)
        np.cumsum(lengths + self._order.added, out=before[1:])
        if int(before[-1]) != int(self._tokens[block]):
            raise UserError(f"{shard.path}: its index {shard.lengths.path} is damaged; remove that and start again")
        width = np.dtype(shard.dtype).itemsize
        low, high = int(starts.min()), int((starts + lengths * width).max())
        return _View(shard, width, starts.data, lengths.data, before.data, low, high)

    def _copy(self, view: _View, file: OpenFile, within: int, out: np.ndarray) -> list[int]:
        """Copy block positions [within, within + len(out)) into `out`; where documents begin in it.

        `out` holds separators already. The beginnings are left out where nobody asked for them.
        """
        before, lead = view.before, self._order.added - 1
        first = bisect_right(before, within) - 1
        last = bisect_left(before, within + len(out), first)
        if view.width != 8 and view.high - view.low < (last - first) * _BYTES_PER_READ:
            _gather(view, file, out, (first, last), within, lead)
            ends = np.asarray(before[first + 1 : last + 1]) - within
            out[ends[ends <= len(out)] - 1] = self._order.eos
        else:
            pieces = _pieces(view, first, last, within - lead, len(out))
            (_read_into if view.width == 4 else _read_each)(view, file, out, pieces)
        if not (self._order.marked or lead):
            return []
        beginnings = [at - within for at in before[first:last].tolist() if at >= within]
        if lead:
            out[beginnings] = self._order.bos
        return beginnings


class _Pieces(NamedTuple):
    """The documents of a row.

    Of one of which only an added token falls into the row no tokens are left, or -1 in place of the separator.
    """

    starts: list[int]  # byte offset in the file
    places: list[int]  # position in the block, counted as `base` is
    lengths: list[int]  # tokens
    base: int  # the place that is the row's first


def _pieces(view: _View, first: int, last: int, base: int, count: int) -> _Pieces:
    """Documents [first, last) of a block as far as they fall into a row of `count` tokens."""
    starts, lengths = view.starts[first:last].tolist(), view.lengths[first:last].tolist()
    places = view.before[first:last].tolist()
    skipped = base - places[0]
    if skipped > 0:
        starts[0] += skipped * view.width
        lengths[0] -= skipped
        places[0] = base
    lengths[-1] = min(lengths[-1], base + count - places[-1])
    return _Pieces(starts, places, lengths, base)


def _read_into(view: _View, file: OpenFile, out: np.ndarray, pieces: _Pieces) -> None:
    """One read per document, straight into the row: for ids of 4 bytes."""
    memory, descriptor, read, base = out.data.cast("B"), file.descriptor, os.preadv, pieces.base
    for offset, place, length in zip(pieces.starts, pieces.places, pieces.lengths, strict=True):
        start, size = (place - base) * 4, length * 4
        if size > 0 and read(descriptor, [memory[start : start + size]], offset) != size:
            raise _truncated(view, offset + size)


def _read_each(view: _View, file: OpenFile, out: np.ndarray, pieces: _Pieces) -> None:
    """One read per document, and a cast: for ids of 2 or 8 bytes."""
    for offset, place, length in zip(pieces.starts, pieces.places, pieces.lengths, strict=True):
        if length > 0:
            raw = os.pread(file.descriptor, length * view.width, offset)
            if len(raw) != length * view.width:
                raise _truncated(view, offset + length * view.width)
            start = place - pieces.base
            out[start : start + length] = narrow(np.frombuffer(raw, view.shard.dtype), view.shard.path)


def _truncated(view: _View, end: int) -> UserError:
    return UserError(f"{view.shard.path}: ends before byte {end}; it was truncated under the run")


def _gather(view: _View, file: OpenFile, out: np.ndarray, documents: tuple[int, int], within: int, lead: int) -> None:
    """One read for the whole block, then one gather: for documents much shorter than a row.

    Writes something in the places of added tokens too; the caller puts them there. lead: tokens added before each.
    """
    raw = os.pread(file.descriptor, view.high - view.low, view.low)
    if len(raw) != view.high - view.low:
        raise _truncated(view, view.high)
    tokens = np.frombuffer(raw, view.shard.dtype)
    first, last = documents
    starts, before = np.asarray(view.starts[first:last]), np.asarray(view.before[first : last + 1]) - within
    shift = (starts - view.low) // view.width - before[:-1] - lead  # from an index in the row to one in `tokens`
    before[0], before[-1] = max(int(before[0]), 0), min(int(before[-1]), len(out))  # a third of np.clip and np.diff
    index = np.repeat(shift, before[1:] - before[:-1])
    index += np.arange(len(out))
    out[:] = narrow(tokens.take(index, mode="clip"), view.shard.path)


def narrow(tokens: np.ndarray, path: str) -> np.ndarray:
    """Ids that fit int32. UserError if an id of 8 bytes does not."""
    if tokens.itemsize == 8 and len(tokens) and (int(tokens.max()) >= 2**31 or int(tokens.min()) < 0):
        wrong = int(tokens.max()) if int(tokens.max()) >= 2**31 else int(tokens.min())
        raise UserError(f"{path}: token id {wrong} is outside 0..2^31-1; write the shard again")
    return tokens if tokens.itemsize != 8 else tokens.astype(np.int32)


# ---- Blocks


def _blocks(
    indexes: list[ShardIndex], span: tuple[int, int], added: int, files: OpenFiles
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(shard, first document, last document + 1, tokens) of every block that has tokens.

    Blocks do not cross shards and hold a multiple of 64 documents, except at the ends of a shard or of `span`.
    """
    count = _block_documents(indexes)
    parts: list[np.ndarray] = [np.zeros((0, 4), np.int64)]
    before = 0
    for number, index in enumerate(indexes):
        low = min(max(span[0] - before, 0), index.documents)
        high = min(max(span[1] - before, 0), index.documents)
        before += index.documents
        if low == high:
            continue
        edges = np.unique(np.concatenate([np.arange(low // count * count, high, count), [low, high]]))
        edges = edges[edges >= low]
        tokens = np.diff(_tokens_before(index, edges, added, files))
        shard = np.full(len(tokens), number)
        parts.append(np.stack([shard, edges[:-1], edges[1:], tokens], axis=1))
    table = np.concatenate(parts)
    table = table[table[:, 3] > 0]
    return table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy()


def _block_documents(indexes: list[ShardIndex]) -> int:
    """Documents per block: about 16 thousand tokens, at least 128, and never more than 2^18 blocks."""
    documents = sum(index.documents for index in indexes)
    mean = max(1, sum(index.token_count for index in indexes) // max(1, documents))
    cells = max(2, min(64, _BLOCK_TOKENS // mean // CELL), -(-documents // CELL // _MOST_BLOCKS))
    return cells * CELL


def _tokens_before(index: ShardIndex, edges: np.ndarray, added: int, files: OpenFiles) -> np.ndarray:
    """Tokens of a shard before each of the documents `edges`, added ones included; int64."""
    file = files.column(index.cells, index)
    cells = index.cells.read(file.descriptor, 0, index.cells.length).reshape(-1, 2)
    # a cell's sum is the document's own where it begins a cell or ends the shard
    whole = np.where(edges == index.documents, len(cells) - 1, edges // CELL)
    found = cells[whole] @ np.array([1, added])
    for at in np.flatnonzero((edges % CELL != 0) & (edges != index.documents)):
        start = int(edges[at]) // CELL * CELL
        lengths = index.lengths.read(files.column(index.lengths, index).descriptor, start, int(edges[at]))
        found[at] += int(lengths.sum(dtype=np.int64)) + added * int(np.count_nonzero(lengths))
    return found
