"""Which process is slower than the others: a step takes as long in all of them, because each waits for the slowest."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from pretraining.config.extension import Watcher
from pretraining.parallel.accelerator import HOST
from pretraining.run.training_run import TrainingRun

if TYPE_CHECKING:
    from pretraining.parallel.torch.engine import TorchEngine

# A probe is as many products of square matrices, one after the other: 15 ms at 100 TFLOP/s, 30 ms on a core of a CPU.
PRODUCTS = 10
WIDTH, WIDTH_ON_HOST = 4096, 512
SLOW = 1.2  # times the median, above which a line says so


class Lap(NamedTuple):
    """What one process measured since the last report."""

    host: str
    waited: float  # s for data
    memory: int  # bytes, the peak of its busiest device; 0 where the device does not report it
    probe: float  # s; 0 on the xla engine, whose devices share a process


class Stragglers(Watcher):
    """Reports the slowest process, its probe over the median's, the longest wait for data, and the fullest device."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._waited = run, 0.0
        self._matrix: torch.Tensor | None = None
        if run.engine.name == "torch":
            engine = cast("TorchEngine", run.engine)
            width = WIDTH_ON_HOST if engine.device == HOST else WIDTH
            # The product of this matrix with itself is the matrix
            self._matrix = torch.full((width, width), 1 / width, dtype=engine.precision.compute, device=engine.device)

    def prepare(self) -> None:
        """Load the kernel of the probe."""
        self._probe()

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """See Watcher."""
        engine, account = self._run.engine, self._run.account
        before, self._waited = self._waited, account.seconds()["data_wait"]
        lap = Lap(socket.gethostname(), self._waited - before, engine.memory_bytes() or 0, self._probe())
        laps: list[Any] = [lap]
        if engine.process_count > 1:
            laps = [None] * engine.process_count
            dist.all_gather_object(laps, lap)
        figures = spread(laps)
        if figures.get("straggler_ratio", 1.0) > SLOW and engine.process_index == 0:
            rank = int(figures["straggler"])
            words = f"{figures['straggler_ratio']:.2f} times the median's time for the same matrix products"
            print(f"process {rank} on {laps[rank].host} takes {words}", flush=True)
        return figures

    def _probe(self) -> float:
        if self._matrix is None:
            return 0.0
        product = self._matrix
        product[0, 0].item()  # waits for what the device has to do before
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            product = product @ self._matrix
        product[0, 0].item()
        return time.perf_counter() - began


def spread(laps: Sequence[Lap]) -> dict[str, float]:
    """Return the figures of all processes, in the order of their ranks."""
    figures: dict[str, float] = {"data_wait_seconds_max": max(lap.waited for lap in laps)}
    if memory := max(lap.memory for lap in laps):
        figures["memory_bytes_max"] = memory
    probes = [lap.probe for lap in laps]
    if min(probes):
        figures["straggler"] = probes.index(max(probes))
        figures["straggler_ratio"] = max(probes) / statistics.median_low(probes)
    return figures
