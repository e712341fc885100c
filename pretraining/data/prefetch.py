"""Batches made ahead of the device, in threads of this process.

Not torch's DataLoader: its workers cost about 400 us a batch and a copy of the process each, and a batch here is a
pure function of its step, so threads share one stream without any state to hand over.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from pretraining.data.stream import Batch, Stream

AHEAD = 2  # runs per thread: one being made, one ready
# Handing a run over between threads costs about 50 us, so small batches are made several at a time.
RUN_BYTES = 1 << 20
LONGEST_RUN = 8  # more leave the cache before they are used: 71 us a batch with 16, 62 with 8, 53 without a thread

Run = list[Batch | Exception]  # consecutive batches; an exception ends it


class Prefetcher:
    """`stream.batch(step)` for steps that come in order. An error surfaces at the step it belongs to."""

    def __init__(self, stream: Stream, threads: int) -> None:
        """threads: at least 1; the batches do not depend on it."""
        self._stream, self._depth = stream, AHEAD * threads
        self._length = min(max(1, RUN_BYTES // stream.batch_bytes), LONGEST_RUN)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="data")
        self._runs: dict[int, Future[Run]] = {}  # first step -> its run
        self._first, self._ready = 0, Run()
        self.wait_seconds = 0.0  # spent in `batch` so far

    def batch(self, step: int) -> Batch:
        """See Stream.batch."""
        began = time.perf_counter()
        if not self._first <= step < self._first + len(self._ready):
            self._next_run(step)
        found = self._ready[step - self._first]
        self.wait_seconds += time.perf_counter() - began
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(cancel_futures=True)

    def _next_run(self, step: int) -> None:
        wanted = range(step, step + self._depth * self._length, self._length)
        for first in [first for first in self._runs if first not in wanted]:  # a step out of turn
            self._runs.pop(first).cancel()
        for first in wanted:
            if first not in self._runs:
                self._runs[first] = self._pool.submit(self._make, first)
        self._first, self._ready = step, self._runs.pop(step).result()

    def _make(self, first: int) -> Run:
        run = Run()
        for step in range(first, first + self._length):
            try:
                run.append(self._stream.batch(step))
            except Exception as error:  # whatever it is, it is raised again where the batch is asked for
                return [*run, error]
        return run
