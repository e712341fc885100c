"""Batches read ahead of the device, in threads of this process.

Not torch's DataLoader: its workers cost about 400 us a batch and a copy of the process each. A batch here is a pure
function of its step, so threads share one stream and need no state of their own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from pretraining.data.stream import Batch, Stream

AHEAD = 2  # groups of batches per thread: one being read, one ready
# Passing a group between threads costs about 50 us, so small batches are read several at a time.
GROUP_BYTES = 1 << 20
LONGEST_GROUP = 8  # more leave the cache before they are used: 71 us a batch with 16, 62 with 8, 53 without a thread

BatchGroup = list[Batch | Exception]  # consecutive batches; an exception is the last element


class Prefetcher:
    """`stream.batch(step)` for steps that come in order. An error is raised at the step it belongs to."""

    def __init__(self, stream: Stream, threads: int) -> None:
        """threads: at least 1; the batches do not depend on it."""
        self._stream, self._depth = stream, AHEAD * threads
        self._length = min(max(1, GROUP_BYTES // stream.batch_bytes), LONGEST_GROUP)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="data")
        self._futures: dict[int, Future[BatchGroup]] = {}  # first step of a group -> the group
        self._first, self._ready = 0, BatchGroup()

    def batch(self, step: int) -> Batch:
        if not self._first <= step < self._first + len(self._ready):
            self._next_group(step)
        batch = self._ready[step - self._first]
        if isinstance(batch, Exception):
            raise batch
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(cancel_futures=True)

    def _next_group(self, step: int) -> None:
        ahead = range(step, step + self._depth * self._length, self._length)
        for first in [first for first in self._futures if first not in ahead]:  # a step out of order
            self._futures.pop(first).cancel()
        for first in ahead:
            if first not in self._futures:
                self._futures[first] = self._pool.submit(self._read, first)
        self._first, self._ready = step, self._futures.pop(step).result()

    def _read(self, first: int) -> BatchGroup:
        group = BatchGroup()
        self._stream.read_ahead(first, self._length)
        for step in range(first, first + self._length):
            try:
                group.append(self._stream.batch(step))
            except Exception as error:  # raised again where the batch is asked for
                return [*group, error]
        return group
