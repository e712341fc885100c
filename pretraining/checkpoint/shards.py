"""Tensor bytes in safetensors files: planned before the first byte, streamed by several threads, checked on reading.

torch.distributed.checkpoint's planners decide which process writes and reads which chunk. Its HuggingFaceStorageWriter
does not serve: it serializes the whole state of a process in memory (2.0 GiB more for 1 GiB of tensors; 2 MiB here, in
half the time) and hashes nothing. safetensors' save_file does the same for a file. Does not depend on commits or runs.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from pretraining.checkpoint.files import BLOCK, UnreadableError, checksum, digest, is_intact, read_into, unreadable
from pretraining.checkpoint.manifest import DTYPE_NAMES, DTYPES, Checkpoint, Chunk, Entry, Manifest, ShardFile
from pretraining.parallel.engine import OPTIMIZER, OPTIONAL
from pretraining.storage import Location, NewFile, OpenFile, store_of

# Host copies waiting for the disk may take this much, or one chunk if that is more: the disk is busy with 64 MiB
# already, and what a save adds to a host's memory stays a few of the largest chunks.
IN_FLIGHT = 256 << 20


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk of a tensor and the place in a file that is reserved for it."""

    item: WriteItem
    dtype: torch.dtype  # on disk
    start: int
    size: int  # bytes


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file that is not written yet."""

    name: str
    header: bytes
    chunks: tuple[PlannedChunk, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(chunk.size for chunk in self.chunks)


# ---- Planning


def plan_files(items: Iterable[WriteItem], rank: int, dtype: torch.dtype | None) -> list[FilePlan]:
    """Plan one file of weights and one of optimizer state for process `rank`, whose floating tensors become `dtype`.

    The plan does not depend on the number of threads.
    """
    groups: dict[str, list[WriteItem]] = {"weights": [], "optimizer": []}
    for item in items:
        groups["optimizer" if item.index.fqn.startswith(OPTIMIZER) else "weights"].append(item)
    return [plan_file(f"{name}-{rank:05d}.safetensors", group, dtype) for name, group in groups.items() if group]


def plan_file(name: str, items: Iterable[WriteItem], dtype: torch.dtype | None) -> FilePlan:
    """Plan the safetensors file `name` with these chunks, one after the other.

    Scalars, and the figures of engine.OPTIONAL, keep their dtype: a step count of 257 is 256 in bfloat16.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks, end = [], 0
    for item in items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is not a tensor"
        own, shape = data.properties.dtype, list(data.chunk.sizes)
        stored = dtype if dtype and own.is_floating_point and data.size and item.index.fqn not in OPTIONAL else own
        begin, end = end, end + math.prod(shape) * stored.itemsize
        entries[chunk_name(item)] = {"dtype": DTYPE_NAMES[stored], "shape": shape, "data_offsets": [begin, end]}
        chunks.append((item, stored, begin, end - begin))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FilePlan(name, header, tuple(PlannedChunk(i, kind, len(header) + at, n) for i, kind, at, n in chunks))


def chunk_name(item: WriteItem) -> str:
    """Return an unsharded tensor's own name, or name@offset,offset of a chunk."""
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


# ---- Writing


def write_files(
    folder: Location, plans: list[FilePlan], fetch: Callable[[WriteItem], Tensor], workers: int
) -> Manifest:
    """Write the files, on the disk on return, and describe them.

    `fetch` returns a chunk on any device; it is called in order, from this thread.
    """
    store = store_of(folder)
    with ExitStack() as stack:
        opened = [stack.enter_context(store.create(folder / plan.name)) for plan in plans]
        for target, plan in zip(opened, plans, strict=True):
            target.write_at(memoryview(plan.header), 0)
        places = [(target, plan, chunk) for target, plan in zip(opened, plans, strict=True) for chunk in plan.chunks]
        with ThreadPoolExecutor(1 if store.writes_in_order else workers) as pool:
            digests = _write_chunks(pool, [(target, chunk) for target, _, chunk in places], fetch)
        for target in opened:
            target.finish()
    store.sync(folder)
    files = {plan.name: ShardFile(plan.size, digest(plan.header), len(plan.header)) for plan in plans}
    written = zip(places, digests, strict=True)
    return Manifest.merge([_entry(plan.name, chunk, hashes) for (_, plan, chunk), hashes in written], files)


def _entry(file: str, chunk: PlannedChunk, digests: tuple[str, ...]) -> tuple[str, Entry]:
    """Describe a chunk that was written: the tensor's name, and the tensor with this chunk alone."""
    data = chunk.item.tensor_data
    assert data is not None
    written = Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes), file, chunk.start, chunk.size, digests)
    return chunk.item.index.fqn, Entry(DTYPE_NAMES[chunk.dtype], tuple(data.size), (written,))


def _write_chunks(
    pool: ThreadPoolExecutor, places: list[tuple[NewFile, PlannedChunk]], fetch: Callable[[WriteItem], Tensor]
) -> list[tuple[str, ...]]:
    """Write every chunk, at most IN_FLIGHT bytes at a time; the digests of each, in order."""
    digests: list[tuple[str, ...]] = []
    pending: deque[tuple[Future[tuple[str, ...]], int]] = deque()
    waiting = 0
    for target, chunk in places:
        while pending and waiting + chunk.size > IN_FLIGHT:
            first, size = pending.popleft()
            digests.append(first.result())
            waiting -= size
        # no name for the bytes here: they would stay while the next chunk, as large, is fetched
        future = pool.submit(_write_chunk, target, host_bytes(fetch(chunk.item), chunk.dtype), chunk.start)
        pending.append((future, chunk.size))
        waiting += chunk.size
    return digests + [future.result() for future, _ in pending]


def _write_chunk(target: NewFile, data: memoryview, start: int) -> tuple[str, ...]:
    """Write and hash the bytes, block by block."""
    digests = []
    for begin in range(0, len(data), BLOCK):
        block = data[begin : begin + BLOCK]
        digests.append(checksum(block))
        target.write_at(block, start + begin)
    return tuple(digests)


def host_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> memoryview:
    """The bytes of a tensor on any device, row by row, in `dtype` if given; a view of contiguous host memory if not.

    It is cast on the host: a device that training has filled has no room for the copy.
    """
    flat = tensor.detach().cpu().to(dtype or tensor.dtype).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


# ---- Reading


def read_files(
    checkpoint: Checkpoint, items: list[ReadItem], target: Callable[[ReadItem], Tensor], workers: int
) -> None:
    """Copy every item's box into the tensor that `target` gives; each block is checked before it is used.

    Raises UnreadableError, naming the file, at the first byte that is not what was saved.
    """
    tensors = checkpoint.manifest.tensors
    chunks = {(name, chunk.offsets): chunk for name, entry in tensors.items() for chunk in entry.pieces}
    files: dict[str, OpenFile] = {}
    with ExitStack() as stack, ThreadPoolExecutor(workers) as pool:
        reads: list[Future[None]] = []
        for item in items:
            name, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            chunk, dtype = chunks[name, offsets], DTYPES[tensors[name].dtype]
            if chunk.file not in files:
                files[chunk.file] = _check(stack, checkpoint.path / chunk.file, checkpoint.manifest.files[chunk.file])
            reads.append(pool.submit(_read, files[chunk.file], chunk, dtype, item, target(item)))
        try:
            for read in reads:
                read.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _open(stack: ExitStack, path: Location | str) -> tuple[OpenFile, int]:
    """Open a file until `stack` ends; return it and its bytes. Raises UnreadableError."""
    try:
        opened = stack.enter_context(closing(store_of(path).open(path)))
        return opened, opened.size
    except OSError as error:
        raise unreadable(error, path) from error


def _check(stack: ExitStack, path: Location, expected: ShardFile) -> OpenFile:
    """Open a file until `stack` ends. Raises UnreadableError if its size or header is not what was saved."""
    opened, size = _open(stack, path)
    if size != expected.size:
        raise UnreadableError(f"{path}: has {size} bytes, {expected.size} were saved")
    header = memoryview(bytearray(expected.header_size))
    read_into(opened, header, 0)
    if digest(header) != expected.header:
        raise UnreadableError(f"{path}: its header differs from what was saved")
    return opened


def _read(file: OpenFile, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Read `item` through an open file of its own: see `_read_box`.

    A disk reads ahead for each open file. Threads that shared one took 0.50 s (median of 7) for 0.8 GB, with one each
    0.31 s, and half of the CPU time.
    """
    with ExitStack() as stack:
        if file.is_local and chunk.size > BLOCK:
            file, _ = _open(stack, file.path)
        _read_box(file, chunk, dtype, item, target)


def _read_box(file: OpenFile, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Read the rows of `chunk` that `item` touches and copy its box of them into `target`."""
    is_complete = tuple(item.lengths) == chunk.sizes
    if is_complete and target.dtype == dtype and target.is_contiguous() and target.is_cpu:
        _read_blocks(file, chunk, host_bytes(target), 0)  # no copy: straight to where it belongs
        return
    if 0 in item.lengths:
        return
    sizes, offsets, lengths = list(chunk.sizes) or [1], list(item.storage_offsets) or [0], list(item.lengths) or [1]
    row = math.prod(sizes[1:]) * dtype.itemsize
    rows = memoryview(bytearray(lengths[0] * row))
    _read_blocks(file, chunk, rows, offsets[0] * row)
    box = torch.frombuffer(rows, dtype=dtype).view(lengths[0], *sizes[1:])
    for dim in range(1, box.dim()):
        box = box.narrow(dim, offsets[dim], lengths[dim])
    target.copy_(box.view(target.shape) if not target.dim() else box)


def _read_blocks(file: OpenFile, chunk: Chunk, target: memoryview, skip: int) -> None:
    """Fill `target` with the chunk's bytes from `skip` on, checking every block that they touch.

    A chunk without digests, of a file that another program wrote, cannot be checked.
    """
    stop = skip + len(target)
    for number in range(skip // BLOCK, -(-stop // BLOCK)):
        begin, end = number * BLOCK, min((number + 1) * BLOCK, chunk.size)
        inside = begin >= skip and end <= stop
        block = target[begin - skip : end - skip] if inside else memoryview(bytearray(end - begin))
        read_into(file, block, chunk.start + begin)
        if chunk.digests and not is_intact(block, chunk.digests[number]):
            first = chunk.start + begin
            raise UnreadableError(f"{file.path}: bytes {first} to {first + len(block)} differ from what was saved")
        if not inside:
            low, high = max(begin, skip), min(end, stop)
            target[low - skip : high - skip] = block[low - begin : high - begin]
