"""Batches made ahead of the device, in threads of this process.

Not torch's DataLoader: its workers cost about 400 us a batch and a copy of the process each, and a batch here is a
pure function of its step, so threads share one stream without any state to hand over.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from pretraining.data.stream import Batch, Stream

AHEAD = 2  # batches waiting per thread: one being fed, one ready


class Prefetcher:
    """`stream.batch(step)` for steps that come in order. Errors surface at the step they belong to."""

    def __init__(self, stream: Stream, threads: int) -> None:
        self._stream, self._depth = stream, AHEAD * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="data")
        self._waiting: dict[int, Future[Batch]] = {}
        self.wait_seconds = 0.0  # spent in `batch` so far

    def batch(self, step: int) -> Batch:
        """See Stream.batch."""
        began = time.perf_counter()
        for ahead in range(step, step + self._depth):
            if ahead not in self._waiting:
                self._waiting[ahead] = self._pool.submit(self._stream.batch, ahead)
        ready = self._waiting.pop(step).result()
        self.wait_seconds += time.perf_counter() - began
        return ready

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(cancel_futures=True)
