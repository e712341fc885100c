"""Saves in the background: copies of this process's chunks in host memory, and the thread that writes them."""

from __future__ import annotations

import contextlib
import mmap
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import PendingSave
from pretraining.extensions.memory import available_memory


class HostBuffer:
    """Host memory for copies of a state, kept from one save to the next.

    Copying a gigabyte took 0.09 s into memory that was touched before, 0.33 to 2 s into new memory in pages of 4 KiB,
    and 0.23 s into new memory in pages of 2 MiB (2 cores).
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        return self._bytes.numel()

    def take(self, size: int) -> Tensor:
        """Return at least `size` bytes, with any content."""
        if size > self.size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed before the next allocation
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without pages of 2 MiB
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        return self._bytes


def stage(pending: PendingSave, buffer: HostBuffer) -> None:
    """Copy this process's chunks into `buffer`; afterwards the tensors may change.

    Collective: where one process fails, for example because its memory is gone by now, all do.
    """
    pending.peers.each(partial(_copy, pending, buffer))


def _copy(pending: PendingSave, buffer: HostBuffer) -> None:
    memory, start, copies = buffer.take(copied_bytes(pending)), 0, {}
    for chunk in pending.chunks:
        tensor = pending.fetch(chunk.item)
        copy = memory[start : start + chunk.size].view(chunk.dtype).view(tensor.shape)
        copies[chunk.item.index] = copy.copy_(tensor)  # waits for the device: the copy is pageable memory
        start += _aligned(chunk.size)
    pending.fetch = lambda item: copies[item.index]


def copied_bytes(pending: PendingSave) -> int:
    """Return the bytes of host memory that `stage` takes in this process."""
    return sum(_aligned(chunk.size) for chunk in pending.chunks)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64  # any dtype may begin there


class BackgroundSaves:
    """One per run and process; `start` is collective over the processes."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._buffer = peers, HostBuffer()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None  # the save that was started last

    def start(self, pending: PendingSave, finish: Callable[[], None]) -> bool:
        """Copy the state and let the thread call `finish`; return whether every host has memory for the copies."""
        more = max(copied_bytes(pending) - self._buffer.size, 0)
        asked = self._peers.agree(lambda: (socket.gethostname(), more, available_memory()))
        if short := self._peers.lead(lambda: shortage(asked)):
            self._peers.say(f"{short}; this save is not asynchronous")
            return False
        stage(pending, self._buffer)
        self._writing = self._writer.submit(finish)
        return True

    @property
    def is_writing(self) -> bool:
        """Whether a save that was started may not be committed yet."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Wait until the save that was started is committed. Raises OSError if it failed."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()


def shortage(asked: list[tuple[str, int, int]]) -> str:
    """Describe the host whose processes together ask for more than it has; "" if none does.

    asked: (host, bytes asked for, bytes available) of every process.
    """
    for host in dict.fromkeys(host for host, _, _ in asked):
        needed = sum(size for other, size, _ in asked if other == host)
        free = min(available for other, _, available in asked if other == host)
        if needed > free:
            return f"{host} has {free / 1e9:.1f} GB of memory available for copies of {needed / 1e9:.1f} GB"
    return ""
