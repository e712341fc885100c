"""The reports of the loop: a record of metrics.jsonl and a line for a step."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist

from pretraining.data.stream import Batch
from pretraining.monitor.progress import progress_line
from pretraining.parallel.engine import Engine
from pretraining.run.training_run import TrainingRun


class Stopwatch:
    """Seconds per step since the last lap, without pauses. step: after which the lap began."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin a lap after `step`."""
        self.step, self._began = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Return the mean seconds of the steps since the lap began."""
        return (time.perf_counter() - self._began) / (step - self.step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the body out of the lap."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began


class Reports:
    """What the loop remembers between two reports: their time."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.watch = Stopwatch(run.start_step)
        self._waited = 0.0  # seconds for data up to the last report

    def write(self, step: int, figures: dict[str, float], rate: float, batch: Batch) -> None:
        """Report a step, and begin another lap."""
        run = self._run
        record = self._record(step, figures, rate, batch)
        for watcher in run.watchers:
            record |= watcher.figures(record)
        before, self._waited = self._waited, run.account.seconds()["data_wait"]
        record |= {"data_wait_seconds": self._waited - before, "account": run.account.take()}
        tokens_left = run.tokens_seen(run.config.num_steps) - record["tokens_seen"]
        remaining = math.inf if begins_rows(run, step) else tokens_left / record["tokens_per_second"]
        run.report(record, progress_line(record, run.config.num_steps, remaining))
        self.watch.restart(step)

    def _record(self, step: int, figures: dict[str, float], rate: float, batch: Batch) -> dict[str, Any]:
        run, config, engine, step_time = self._run, self._run.config, self._run.engine, self.watch.lap(step)
        # Per step, in the mean
        tokens = (run.tokens_seen(step) - run.tokens_seen(self.watch.step)) / (step - self.watch.step)
        return {
            "step": step,
            "loss": figures["loss"],
            **({"grad_norm": figures["grad_norm"]} if config.log_grad_norm else {}),
            **{name: figures[name] for name in ("loss_scale", "outliers") if name in figures},
            "learning_rate": rate,
            "tokens_seen": run.tokens_seen(step),
            "samples_seen": run.stream.state(step - run.start_step)["sequences"],
            "consumed": run.stream.consumed(step - run.start_step),
            "step_time": step_time,
            "tokens_per_second": tokens / step_time,
            "tokens_per_second_per_device": tokens / step_time / engine.mesh.size,
            "samples_per_second": tokens / config.seq_length / step_time,
            "memory_bytes": engine.memory_bytes(),
            "compilations": engine.compilations(),
            "data_hash": data_hash(batch, engine),
        }


def begins_rows(run: TrainingRun, step: int) -> bool:
    """Return whether `step` is the first of this process with rows of its length, which is a program of its own."""
    return step == run.start_step + 1 or run.config.row_length(step) != run.config.row_length(step - 1)


def data_hash(batch: Batch, engine: Engine) -> str:
    """Return 16 hex digits of the global batch's tokens, which do not depend on the number of data-parallel ranks.

    Several processes may share a data-parallel rank, and therefore its rows.
    """
    rows = [hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8).digest() for row in batch["tokens"]]
    every_row = [row for rows in gather_from_data_ranks(engine, rows) for row in rows]
    return hashlib.blake2b(b"".join(every_row), digest_size=8).hexdigest()


def gather_from_data_ranks(engine: Engine, value: Any) -> list[Any]:
    """Return the values of all data-parallel ranks, in their order."""
    by_rank = dict(gather_from_processes(engine, (engine.data_rank, value)))
    return [by_rank[rank] for rank in range(engine.data_size)]


def gather_from_processes(engine: Engine, value: Any) -> list[Any]:
    """Return the values of all processes, in their order."""
    gathered = [value] * engine.process_count
    if engine.process_count > 1:
        dist.all_gather_object(gathered, value)
    return gathered
