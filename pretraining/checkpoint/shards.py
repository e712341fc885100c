"""Tensor bytes in safetensors files: laid out before the first byte, streamed in several threads, checked on reading.

Speaks torch.distributed.checkpoint's write and read items, whose planners decide which process holds which piece.
Knows nothing of commits or of runs.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from pretraining.checkpoint.files import (
    BLOCK,
    UnreadableError,
    descriptor,
    digest,
    read_into,
    sync_folder,
    write_at,
)
from pretraining.checkpoint.manifest import DTYPE_NAMES, DTYPES, OPTIMIZER, Checkpoint, Piece, ShardFile

# Host copies waiting for the disk may take this much, or one piece if that is more: the disk is busy with 64 MiB
# already, and what a save adds to a host's memory stays a few of the largest shards.
IN_FLIGHT = 256 << 20
FLUSH_EVERY = 64 << 20  # bytes


@dataclass(frozen=True)
class Slot:
    """A place in a file, reserved for one piece."""

    item: WriteItem
    dtype: torch.dtype  # on disk
    start: int
    size: int  # bytes


@dataclass(frozen=True)
class Layout:
    """A safetensors file that is not written yet."""

    name: str
    header: bytes
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(slot.size for slot in self.slots)


@dataclass(frozen=True)
class Written:
    """What one process wrote: its files, and its pieces by tensor."""

    files: dict[str, ShardFile]
    pieces: dict[str, list[Piece]]
    dtypes: dict[str, str]


# ---- Layout


def lay_out(items: Iterable[WriteItem], rank: int, dtype: torch.dtype | None) -> list[Layout]:
    """One file of weights and one of optimizer state for process `rank`, whose floating tensors become `dtype`.

    The same for any number of threads. Scalars keep their dtype: a step count of 257 is 256 in bfloat16.
    """
    groups: dict[str, list[WriteItem]] = {"weights": [], "optimizer": []}
    for item in items:
        groups["optimizer" if item.index.fqn.startswith(OPTIMIZER) else "weights"].append(item)
    return [_layout(f"{name}-{rank:05d}.safetensors", group, dtype) for name, group in groups.items() if group]


def _layout(name: str, items: list[WriteItem], dtype: torch.dtype | None) -> Layout:
    described: dict[str, dict[str, object]] = {}
    sizes, end = [], 0
    for item in items:
        facts = item.tensor_data
        assert facts is not None, f"{item.index.fqn} is not a tensor"
        kind, shape = stored_dtype(item, dtype), list(facts.chunk.sizes)
        size = math.prod(shape) * kind.itemsize
        described[piece_name(item)] = {"dtype": DTYPE_NAMES[kind], "shape": shape, "data_offsets": [end, end + size]}
        sizes.append((item, kind, end, size))
        end += size
    header = safetensors_header(described)
    slots = tuple(Slot(item, kind, len(header) + start, size) for item, kind, start, size in sizes)
    return Layout(name, header, slots)


def safetensors_header(described: dict[str, dict[str, object]]) -> bytes:
    """The bytes before the first tensor: length (8 bytes, little endian), then JSON, padded to a multiple of 8."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stored_dtype(item: WriteItem, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype on disk of an item, when floating tensors are saved as `dtype` (None: as they are)."""
    assert item.tensor_data is not None
    own, shape = item.tensor_data.properties.dtype, item.tensor_data.size
    return dtype if dtype is not None and own.is_floating_point and len(shape) else own


def piece_name(item: WriteItem) -> str:
    """A whole tensor's own name; a piece of it is name@offset,offset."""
    facts = item.tensor_data
    assert facts is not None
    if facts.chunk.sizes == facts.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, facts.chunk.offsets))}"


# ---- Writing


class InFlight:
    """Holds a producer back while too many bytes wait to be written."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes, self._changed = limit, 0, threading.Condition()

    def enter(self, size: int) -> None:
        """Wait until `size` bytes may join; a piece above the limit goes alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes or self._bytes + size <= self._limit)
            self._bytes += size

    def leave(self, size: int) -> None:
        """`size` bytes are written."""
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()


class EarlyFlush:
    """Sends what is written to the disk while more is hashed, so that the last sync has little left to do.

    A gigabyte took 1.0 s so, and 1.6 to 2.0 s with one fsync at the end (2 cores, a disk of about 1 GB/s). An error
    that it meets is raised on leaving: the kernel reports each only once, and the last fsync would not see it.
    """

    def __init__(self, opened: list[int]) -> None:
        self._opened, self._due, self._pending = opened, threading.Condition(), 0
        self._error: OSError | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-flush")

    def __enter__(self) -> EarlyFlush:
        self._thread.start()
        return self

    def count(self, size: int) -> None:
        """`size` more bytes are written."""
        with self._due:
            self._pending += size
            self._due.notify()

    def _run(self) -> None:
        while True:
            with self._due:
                self._due.wait_for(lambda: self._ended or self._pending >= FLUSH_EVERY)
                if self._ended or self._error:
                    return
                self._pending = 0
            try:
                for target in self._opened:
                    os.fdatasync(target)
            except OSError as error:
                self._error = error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._due:
            self._ended = True
            self._due.notify()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error


def write_shards(folder: Path, layouts: list[Layout], fetch: Callable[[WriteItem], Tensor], workers: int) -> Written:
    """Write the files, synced; `fetch` gives a piece on any device and is called in order, from this thread."""
    with ExitStack() as stack:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        opened = [stack.enter_context(descriptor(folder / layout.name, flags)) for layout in layouts]
        for target, layout in zip(opened, layouts, strict=True):
            write_at(target, memoryview(layout.header), 0)
        with ThreadPoolExecutor(workers) as pool, EarlyFlush(opened) as flush:
            digests = _stream(pool, list(zip(opened, layouts, strict=True)), fetch, flush)
        for target in opened:
            os.fsync(target)
    sync_folder(folder)
    return _written(layouts, digests)


def _stream(
    pool: ThreadPoolExecutor, files: list[tuple[int, Layout]], fetch: Callable[[WriteItem], Tensor], flush: EarlyFlush
) -> list[tuple[str, ...]]:
    """Write every slot of every file, a few at a time; the digests of each, in order."""
    budget, failed, written = InFlight(IN_FLIGHT), threading.Event(), []

    def write(target: int, slot: Slot, data: memoryview) -> tuple[str, ...]:
        try:
            return _write_blocks(target, data, slot.start, flush)
        except OSError:
            failed.set()
            raise
        finally:
            budget.leave(slot.size)

    for target, slot in ((target, slot) for target, layout in files for slot in layout.slots):
        if failed.is_set():
            break
        budget.enter(slot.size)
        written.append(pool.submit(write, target, slot, host_bytes(fetch(slot.item), slot.dtype)))
    return [done.result() for done in written]


def _write_blocks(target: int, data: memoryview, start: int, flush: EarlyFlush) -> tuple[str, ...]:
    digests = []
    for begin in range(0, len(data), BLOCK):
        block = data[begin : begin + BLOCK]
        digests.append(digest(block))
        write_at(target, block, start + begin)
        flush.count(len(block))
    return tuple(digests)


def host_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> memoryview:
    """The bytes of a tensor on any device, row by row, in `dtype` if given; a view of contiguous host memory if not.

    It is cast on the host: a device that training has filled has no room for the copy.
    """
    flat = tensor.detach().cpu().to(dtype or tensor.dtype).contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def _written(layouts: list[Layout], digests: list[tuple[str, ...]]) -> Written:
    remaining = iter(digests)
    result = Written({}, {}, {})
    for layout in layouts:
        result.files[layout.name] = ShardFile(layout.size, digest(layout.header), len(layout.header))
        for slot in layout.slots:
            name, facts = slot.item.index.fqn, slot.item.tensor_data
            assert facts is not None
            box = tuple(facts.chunk.offsets), tuple(facts.chunk.sizes)
            result.pieces.setdefault(name, []).append(Piece(*box, layout.name, slot.start, slot.size, next(remaining)))
            result.dtypes[name] = DTYPE_NAMES[slot.dtype]
    return result


# ---- Reading


def read_shards(
    checkpoint: Checkpoint, items: list[ReadItem], target: Callable[[ReadItem], Tensor], workers: int
) -> None:
    """Copy every item's box into the tensor that `target` gives; each block is checked before it is used.

    Raises UnreadableError, naming the file, at the first byte that is not what was saved.
    """
    tensors = checkpoint.manifest.tensors
    pieces = {(name, piece.offsets): piece for name, entry in tensors.items() for piece in entry.pieces}
    with ExitStack() as stack:
        files = ReadFiles(checkpoint, stack)
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        reads: list[Future[None]] = []
        for item in items:
            name, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            piece, dtype = pieces[name, offsets], DTYPES[tensors[name].dtype]
            reads.append(pool.submit(_read, files.open(piece.file), piece, dtype, item, target(item)))
        try:
            for read in reads:
                read.result()
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class ReadFile:
    """A file of the checkpoint whose size and header are right."""

    path: Path
    opened: int


class ReadFiles:
    """The files that are read from, each opened and checked once."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self._checkpoint, self._stack = checkpoint, stack
        self._open: dict[str, ReadFile] = {}

    def open(self, name: str) -> ReadFile:
        """UnreadableError where the file is missing, has another size, or another header than was saved."""
        if name not in self._open:
            path = self._checkpoint.path / name
            try:
                opened = self._stack.enter_context(descriptor(path, os.O_RDONLY))
            except OSError as error:
                raise UnreadableError(f"{path}: {error.strerror}") from error
            self._open[name] = ReadFile(path, opened)
            _check_file(self._open[name], self._checkpoint.manifest.files[name])
        return self._open[name]


def _check_file(file: ReadFile, expected: ShardFile) -> None:
    size = os.fstat(file.opened).st_size
    if size != expected.size:
        raise UnreadableError(f"{file.path}: has {size} bytes, {expected.size} were saved")
    header = memoryview(bytearray(expected.header_size))
    read_into(file.opened, header, 0, file.path)
    if digest(header) != expected.header:
        raise UnreadableError(f"{file.path}: its header differs from what was saved")


def _read(file: ReadFile, piece: Piece, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Read the rows of `piece` that `item` touches and copy its box of them into `target`."""
    whole = tuple(item.lengths) == piece.sizes
    if whole and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu":
        read_blocks(file, piece, host_bytes(target), 0)  # no copy: straight to where it belongs
        return
    if 0 in item.lengths:
        return
    sizes, offsets, lengths = (list(x) or [fill] for x, fill in _box(piece, item))  # a scalar is a box of 1
    row = math.prod(sizes[1:]) * dtype.itemsize
    held = memoryview(bytearray(lengths[0] * row))
    read_blocks(file, piece, held, offsets[0] * row)
    box = torch.frombuffer(held, dtype=dtype).view(lengths[0], *sizes[1:])
    for dim in range(1, box.dim()):
        box = box.narrow(dim, offsets[dim], lengths[dim])
    target.copy_(box.view(target.shape) if not target.dim() else box)


def _box(piece: Piece, item: ReadItem) -> tuple[tuple[Iterable[int], int], ...]:
    return (piece.sizes, 1), (item.storage_offsets, 0), (item.lengths, 1)


def read_blocks(file: ReadFile, piece: Piece, target: memoryview, skip: int) -> None:
    """Fill `target` with the piece's bytes from `skip` on, checking every block that they touch.

    A piece without digests, of a file that others wrote, cannot be checked.
    """
    stop = skip + len(target)
    for number in range(skip // BLOCK, -(-stop // BLOCK)):
        begin, end = number * BLOCK, min((number + 1) * BLOCK, piece.size)
        inside = begin >= skip and end <= stop
        block = target[begin - skip : end - skip] if inside else memoryview(bytearray(end - begin))
        read_into(file.opened, block, piece.start + begin, file.path)
        if piece.digests and digest(block) != piece.digests[number]:
            first = piece.start + begin
            raise UnreadableError(f"{file.path}: bytes {first} to {first + len(block)} differ from what was saved")
        if not inside:
            low, high = max(begin, skip), min(end, stop)
            target[low - skip : high - skip] = block[low - begin : high - begin]
