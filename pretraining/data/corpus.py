"""One dataset as an endless stream of tokens: documents shuffled anew in each epoch, a separator after each.

Does not depend on mixtures, ranks or batches. Documents are grouped into blocks that are contiguous in a shard; an
epoch permutes the blocks and the documents of every block. In memory are one number per block (at most 2^18 blocks,
whatever the number of documents) and the documents of the blocks that are being read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.files import OpenFiles
from pretraining.data.hashing import key_of, mix_one, permutation
from pretraining.data.index import GROUP, ShardIndex
from pretraining.data.stores.shard import DiskArray, Readable, to_int32
from pretraining.storage import OpenFile, ReadAhead, StorageError, is_remote

# Tokens a block should have: with short documents whole blocks are read at once, and 64 KiB take 8 us.
_BLOCK_TOKENS = 16_384
_MOST_BLOCKS = 1 << 18
# A read of one document costs about 1 us, as much as copying 8 KiB out of the page cache.
_BYTES_PER_READ = 8_192
# Blocks whose documents are cached, in bytes, for the whole stream: 1024 lanes of three datasets take 12 MiB, and 17
# with documents of 66 tokens.
_CACHE_BYTES = 48 * 2**20


@dataclass(frozen=True)
class DocumentOrder:
    """What decides the order of one dataset, apart from its documents."""

    key: tuple[int, ...]  # seed, and what distinguishes this dataset from others
    shuffled: bool
    separator: int | None  # after every document; None: none
    bos: int | None  # before every document; None: none
    boundaries: bool  # whether the caller asks where documents begin

    @property
    def added(self) -> int:
        """Tokens added to every document."""
        return (self.separator is not None) + (self.bos is not None)


class Epoch(NamedTuple):
    """The order of the blocks in one epoch. memoryviews of int64."""

    number: int
    key: int  # of the permutations inside blocks
    blocks: memoryview  # [blocks], block numbers in the order of this epoch
    before: memoryview  # [blocks + 1], tokens before each of them


@dataclass(slots=True)
class DocumentBlock:
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
    ranges: list[tuple[int, int]]  # to request for the whole block; of a local shard, none
    is_verified: bool  # whether the check has compared it, or need not

    @property
    def memory(self) -> int:
        """Bytes of the block in memory, with 1000 for the objects around the arrays, and 120 for each range."""
        return 1000 + 3 * self.before.nbytes + 120 * len(self.ranges)


class BlockCheck(Protocol):
    """Compares blocks with what they were. Threads may share it."""

    is_repeated: bool  # at every read of a block, and not at the first alone

    def compare(self, block: DocumentBlock, source: Readable, documents: range, length: int) -> bool:
        """Compare a block, which has these documents of its shard and could have `length`; return whether it is known.

        source: what it is read from. Raises UserError if the block is not as it was.
        """


BlockKey = tuple[int, int, int]  # id of the Corpus, epoch, block


class BlockCache:
    """The blocks read last, for all datasets of a stream together. Threads may share it."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, DocumentBlock] = {}
        self._bytes = 0
        self._lock = Lock()

    def get(self, key: BlockKey) -> DocumentBlock | None:
        """Return a block, None if it is not in the cache."""
        return self._blocks.get(key)

    def put(self, key: BlockKey, block: DocumentBlock) -> None:
        """Add a block and evict the oldest ones. Lanes are read in turn, so the oldest is the one used least lately."""
        with self._lock:
            if key in self._blocks:
                return
            self._blocks[key] = block
            self._bytes += block.memory
            while self._bytes > _CACHE_BYTES and len(self._blocks) > 1:
                self._bytes -= self._blocks.pop(next(iter(self._blocks))).memory


class Corpus:
    """The endless stream of one dataset. Threads may share it."""

    def __init__(
        self,
        shards: list[ShardIndex],
        documents: range,
        order: DocumentOrder,
        files: OpenFiles,
        cache: BlockCache,
        ahead: ReadAhead | None,
        check: BlockCheck | None,
    ) -> None:
        """documents: those that belong to the stream, counted over all shards. ahead: reads shards that are not local.
        check: of blocks, when they are read.
        """
        self._ahead = ahead if any(is_remote(shard.tokens) for shard in shards) else None
        self._shards, self._order, self._files, self._cache = shards, order, files, cache
        self._epochs: dict[int, Epoch] = {}
        self._lock = Lock()
        self._verified: set[int] = set()  # blocks
        self._block_documents = documents_per_block(
            sum(shard.documents for shard in shards), sum(shard.token_count for shard in shards)
        )
        self._check = check
        self._shard, self._first, self._last, self._tokens = self._divide(documents).T
        self.tokens = int(self._tokens.sum())  # of one epoch, added ones included
        self.has_labels = any(shard.trained is not None for shard in shards)
        widest = max((np.dtype(shard.dtype).itemsize for shard in shards), default=0)
        # what is not local: mean bytes of a block, and number of blocks
        number = len(self._tokens) if self._ahead else 0
        self.remote_blocks = (self.tokens * widest // max(1, len(self._tokens)), number)

    def fill(self, position: int, out: np.ndarray, checked: set[OpenFile]) -> list[int]:
        """Copy the stream from `position` on into `out` (int32, contiguous); return where documents begin in it.

        checked: files that were checked for change during this batch. UserError names a shard that cannot be read.
        """
        done, total = 0, len(out)
        beginnings: list[int] = []
        if self._order.separator is not None:
            out.fill(self._order.separator)
        while done < total:
            epoch, place, within = self._locate(position + done)
            try:
                block = self._block(epoch, epoch.blocks[place])
                if not block.is_verified:
                    self._verify(epoch.blocks[place], block)
                count = min(total - done, block.before[-1] - within)
                file = self._files.get(block.shard.tokens, block.shard.token_stamp, block.shard.path)
                if file not in checked:
                    file.check()
                    checked.add(file)
                places = self._copy(block, file, within, out if count == total else out[done : done + count])
            except StorageError:
                raise
            except OSError as error:
                path = self._shards[self._shard[epoch.blocks[place]]].path
                raise UserError(f"{path}: {error.strerror}: restore the shard or its index") from error
            beginnings += [done + at for at in places]
            done += count
        return beginnings

    def fetch(self, position: int, count: int) -> int:
        """Begin to read what `fill` needs of files that are not local for `count` tokens from `position` on; return its
        bytes, without those that are kept or on their way."""
        size = done = 0
        while self._ahead and done < count:
            epoch, place, within = self._locate(position + done)
            block = self._block(epoch, epoch.blocks[place])
            some = min(count - done, block.before[-1] - within)
            file = self._files.get(block.shard.tokens, block.shard.token_stamp, block.shard.path)
            if not file.is_local:
                documents = _documents_at(block, within, some)
                size += self._ahead.begin(file, block, documents, is_whole=_is_read_whole(block, documents))
            done += some
        return size

    def paths(self, position: int, count: int) -> list[str]:
        """Return the shards that tokens [position, position + count) come from, for a message."""
        paths, done = [], 0
        while done < count:
            epoch, place, within = self._locate(position + done)
            paths.append(self._shards[self._shard[epoch.blocks[place]]].path)
            done += epoch.before[place + 1] - epoch.before[place] - within
        return list(dict.fromkeys(paths))

    def _locate(self, position: int) -> tuple[Epoch, int, int]:
        """Return the epoch of a position, the place of its block in it, and the position within the block."""
        number, within = divmod(position, self.tokens)
        epoch = self._epochs.get(number) or self._permute(number)
        place = bisect_right(epoch.before, within) - 1
        return epoch, place, within - epoch.before[place]

    def _permute(self, number: int) -> Epoch:
        """Return an epoch and cache it."""
        with self._lock:
            blocks = len(self._tokens)
            key = key_of(*self._order.key, number)
            order = permutation(blocks, mix_one(key)) if self._order.shuffled else np.arange(blocks)
            before = np.zeros(blocks + 1, np.int64)
            np.cumsum(self._tokens[order], out=before[1:])
            self._epochs[number] = epoch = Epoch(number, key, order.data, before.data)
            while len(self._epochs) > 3:  # a batch reads two; threads ahead of it a third
                self._epochs.pop(next(iter(self._epochs)), None)
        return epoch

    def _block(self, epoch: Epoch, number: int) -> DocumentBlock:
        """Return a block, read from the index if it is not cached."""
        key = (id(self), epoch.number, number)  # not `self`: a cycle would keep files open until it is collected
        block = self._cache.get(key)
        if block is None:
            self._cache.put(key, block := self._read_block(epoch, number))
        return block

    def _source(self, block: DocumentBlock, file: OpenFile, documents: tuple[int, int]) -> OpenFile:
        """Return what documents [first, last) of a block are read from: their file, or ranges that were read ahead."""
        if self._ahead is None or file.is_local:
            return file
        source: OpenFile = self._ahead.read(file, block, documents, is_whole=_is_read_whole(block, documents))
        return source

    def _verify(self, number: int, block: DocumentBlock) -> bool:
        """Let the check compare a block; return whether it knew the block. UserError if that is not as it was."""
        assert self._check is not None
        file = self._files.get(block.shard.tokens, block.shard.token_stamp, block.shard.path)
        source = self._source(block, file, (0, len(block.lengths)))
        documents = range(int(self._first[number]), int(self._last[number]))
        is_known = self._check.compare(block, source, documents, self._block_documents)
        self._verified.add(number)
        block.is_verified = True
        return is_known

    def verify_all(self) -> int:
        """Let the check compare every block; return how many it did not know. UserError if one is not as it was."""
        epoch = self._permute(0)
        return sum(not self._verify(number, self._read_block(epoch, number)) for number in range(len(self._tokens)))

    def _read_block(self, epoch: Epoch, number: int) -> DocumentBlock:
        shard = self._shards[self._shard[number]]
        first, last = int(self._first[number]), int(self._last[number])
        starts, lengths = (self._read(array, shard, first, last) for array in (shard.starts, shard.lengths))
        nonempty = np.flatnonzero(lengths)
        if self._order.shuffled:
            nonempty = nonempty[permutation(len(nonempty), key_of(epoch.key ^ number))]
        starts, lengths = starts[nonempty], lengths[nonempty].astype(np.int64)
        before = np.zeros(len(nonempty) + 1, np.int64)
        np.cumsum(lengths + self._order.added, out=before[1:])
        if int(before[-1]) != int(self._tokens[number]) or int(starts.min()) < 0:
            raise UserError(f"{shard.path}: its index {shard.lengths.path} is damaged: remove it and start again")
        width = np.dtype(shard.dtype).itemsize
        ends = starts + lengths * width
        low, high = int(starts.min()), int(ends.max())
        ranges = self._ahead.joined(starts, ends) if self._ahead and is_remote(shard.tokens) else []
        is_verified = self._check is None or (number in self._verified and not self._check.is_repeated)
        return DocumentBlock(shard, width, starts.data, lengths.data, before.data, low, high, ranges, is_verified)

    def _read(self, array: DiskArray, shard: ShardIndex, start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) of an array of a shard's index. Sidecars are not checked for change."""
        file = self._files.get(array.path, None, shard.path)  # kept until the read is done: it may be evicted
        return array.read(file, start, stop)

    def _copy(self, block: DocumentBlock, file: OpenFile, within: int, out: np.ndarray) -> list[int]:
        """Copy block positions [within, within + len(out)) into `out`; return where documents begin in it.

        `out` holds separators already. The result is empty where nobody asked for boundaries.
        """
        before, lead = block.before, 0 if self._order.bos is None else 1
        first, last = _documents_at(block, within, len(out))
        source = self._source(block, file, (first, last))
        if _is_gathered(block, first, last):
            _gather(block, source, out, (first, last), within, lead)
            if self._order.separator is not None:
                ends = np.asarray(before[first + 1 : last + 1]) - within
                out[ends[ends <= len(out)] - 1] = self._order.separator
        else:
            _read_documents(block, source, out, (first, last), within, self._order)
        if not (self._order.boundaries or lead):
            return []
        beginnings = [at - within for at in before[first:last].tolist() if at >= within]
        if lead:
            out[beginnings] = self._order.bos
        return beginnings

    # ---- Blocks

    def _divide(self, documents: range) -> np.ndarray:
        """Return (shard, first document, last document + 1, tokens) of every block with tokens, int64 [blocks, 4].

        Blocks do not cross shards and hold a multiple of 64 documents, except at the ends of a shard or of `documents`.
        """
        count = self._block_documents
        parts: list[np.ndarray] = [np.zeros((0, 4), np.int64)]
        before = 0
        for number, shard in enumerate(self._shards):
            low = min(max(documents.start - before, 0), shard.documents)
            high = min(max(documents.stop - before, 0), shard.documents)
            before += shard.documents
            if low == high:
                continue
            edges = np.array([low, *range((low // count + 1) * count, high, count), high])
            tokens = np.diff(self._tokens_before(shard, edges))
            parts.append(np.stack([np.full(len(tokens), number), edges[:-1], edges[1:], tokens], axis=1))
        blocks = np.concatenate(parts)
        return blocks[blocks[:, 3] > 0]

    def _tokens_before(self, shard: ShardIndex, edges: np.ndarray) -> np.ndarray:
        """Return tokens of a shard before each of the documents `edges`, added ones included; int64 [edges]."""
        added = self._order.added
        groups = self._read(shard.groups, shard, 0, len(shard.groups)).reshape(-1, 2)
        # the sum before a group is the sum before the document where the document begins a group or ends the shard
        group = np.where(edges == shard.documents, len(groups) - 1, edges // GROUP)
        tokens = groups[group] @ np.array([1, added])
        for at in np.flatnonzero((edges % GROUP != 0) & (edges != shard.documents)):
            lengths = self._read(shard.lengths, shard, int(edges[at]) // GROUP * GROUP, int(edges[at]))
            tokens[at] += int(lengths.sum(dtype=np.int64)) + added * int(np.count_nonzero(lengths))
        return tokens


def documents_per_block(documents: int, tokens: int) -> int:
    """Return the documents of a block, whole groups: about 16 thousand tokens, 128 to 4096 documents, or more where a
    dataset would have more than 2^18 blocks."""
    mean = max(1, tokens // max(1, documents))
    groups = max(2, min(64, _BLOCK_TOKENS // mean // GROUP))
    fewest = -(-documents // (GROUP * _MOST_BLOCKS))  # rounded up
    return max(groups, fewest) * GROUP


# ---- Copying tokens


def _documents_at(block: DocumentBlock, within: int, count: int) -> tuple[int, int]:
    """Return the first document, and the one after the last, of `count` tokens from position `within` of a block."""
    first = bisect_right(block.before, within) - 1
    return first, bisect_left(block.before, within + count, first)


def _is_gathered(block: DocumentBlock, first: int, last: int) -> bool:
    """Whether documents [first, last) are so short that the whole block is read for them."""
    return block.width != 8 and block.high - block.low < (last - first) * _BYTES_PER_READ


def _is_read_whole(block: DocumentBlock, documents: tuple[int, int]) -> bool:
    """Return whether a whole block is read for some of its documents: it is not verified yet, or they are gathered."""
    return not block.is_verified or _is_gathered(block, *documents)


def _read_documents(
    block: DocumentBlock, file: OpenFile, out: np.ndarray, documents: tuple[int, int], within: int, order: DocumentOrder
) -> None:
    """Read the row's documents, with a gap for added tokens between them, and convert them together.

    Separators are written to the gaps; `out` has one already after the last document.
    """
    (first, last), width, before = documents, block.width, block.before
    starts, sizes = block.starts[first:last].tolist(), [count * width for count in block.lengths[first:last].tolist()]
    begin = before[first] - within + (order.bos is not None)  # of the first document, from the beginning of the row
    end = before[last] - within - (order.separator is not None)  # of the last document
    skipped = max(0, -begin) * width
    starts[0], sizes[0] = starts[0] + skipped, sizes[0] - skipped
    sizes[-1] -= max(0, end - len(out)) * width
    parts = [*map(file.pread, sizes, starts)]
    if [*map(len, parts)] != sizes:
        raise _truncated(block, max(map(sum, zip(starts, sizes, strict=True))))
    tokens = to_int32(np.frombuffer(bytes(order.added * width).join(parts), block.shard.dtype), block.shard.path)
    begin = max(0, begin)
    out[begin : begin + len(tokens)] = tokens
    if order.separator is not None:
        for after in before[first + 1 : last].tolist():
            out[after - within - 1] = order.separator


def _truncated(block: DocumentBlock, end: int) -> UserError:
    return UserError(f"{block.shard.path}: truncated before byte {end} while the run reads it: restore the shard")


def _gather(
    block: DocumentBlock, source: OpenFile, out: np.ndarray, documents: tuple[int, int], within: int, lead: int
) -> None:
    """Read the whole block at once, then gather the row: for documents much shorter than a row.

    The places of added tokens get arbitrary ids, which the caller overwrites. lead: tokens added before each document.
    """
    raw = source.pread(block.high - block.low, block.low)
    if len(raw) != block.high - block.low:
        raise _truncated(block, block.high)
    tokens = np.frombuffer(raw, block.shard.dtype)
    first, last = documents
    starts, before = np.asarray(block.starts[first:last]), np.asarray(block.before[first : last + 1]) - within
    shift = (starts - block.low) // block.width - before[:-1] - lead  # from an index in the row to one in `tokens`
    before[0], before[-1] = max(int(before[0]), 0), min(int(before[-1]), len(out))  # a third of np.clip and np.diff
    index = np.repeat(shift, before[1:] - before[:-1])
    index += np.arange(len(out))
    out[:] = tokens.take(index, mode="clip")
