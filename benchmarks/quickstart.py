"""CPU seconds and clock of the quickstart until its validation loss is 5.5, 5.0 and 4.67, on both engines.

    python -m benchmarks.quickstart [--rounds=1] [--every=10] [FLAG ...]

Runs scripts/train.sh in a copy of the checkout, the engines in turns, with a validation every few steps, whose time is
part of the figures. FLAGs are added to the quickstart's settings, for example --optimizer=muon --learning_rate=0.01.
Prints medians, and the ratio of the torch engine to the xla engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from pretraining.monitor.metrics import read_metrics
from tests.end_to_end.checkout import copy_checkout

LOSSES = (5.5, 5.0, 4.67)
ENGINES = ("xla", "torch")


class Spent(NamedTuple):
    """Seconds since the start of the script."""

    cpu: float  # of all its processes
    clock: float


class CpuTime:
    """CPU seconds of a process and its descendants, those that ended included."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._seen = process, dict[int, float]()

    def seconds(self) -> float:
        """Return the CPU seconds until now; a process that lived shorter than a poll counts for its parent."""
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                self._seen[process.pid] = sum(process.cpu_times()[:2])
            except psutil.Error:
                continue
        return sum(self._seen.values())


def measure(checkout: Path, engine: str, every: int, flags: list[str]) -> dict[str, Spent]:
    """Run the quickstart once; return what it took until the first loss, each of LOSSES and its end."""
    name = f"{engine}-{time.time_ns()}"
    words = [f"--engine={engine}", f"--run_name={name}", f"--val_interval={every}", *flags]
    hidden = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS")
    variables = {key: value for key, value in os.environ.items() if key not in hidden}
    began, spent = time.monotonic(), dict[str, Spent]()
    with Path(os.devnull).open("w") as null:
        script = psutil.Popen(["bash", "scripts/train.sh", *words], cwd=checkout, env=variables, stdout=null)
    cpu, metrics = CpuTime(script), checkout / "runs" / name / "metrics.jsonl"
    while script.poll() is None:
        now = Spent(cpu.seconds(), time.monotonic() - began)
        for record in read_metrics(metrics):
            if "loss" in record:
                spent.setdefault("first loss", now)
            for loss in LOSSES:
                if record.get("val_loss", 10.0) <= loss:
                    spent.setdefault(f"{loss}", now)
        spent["end, with a sample"] = now
        time.sleep(0.2)
    if script.returncode:
        raise SystemExit(f"the quickstart ended with code {script.returncode}")
    return spent


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--every", type=int, default=10)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy_checkout(Path(folder) / "checkout")
        prepare = [sys.executable, "-m", "pretraining.tools.prepare", "--stdlib", "--output=data/stdlib"]
        subprocess.run(prepare, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
        runs: dict[str, list[dict[str, Spent]]] = {engine: [] for engine in ENGINES}
        for _ in range(options.rounds):
            for engine in ENGINES:
                runs[engine].append(measure(checkout, engine, options.every, flags))
    print(f"{'until':<20}{'xla: CPU s':>12}{'clock':>8}{'torch: CPU s':>14}{'clock':>8}{'torch / xla':>13}")
    for name in ("first loss", *map(str, LOSSES), "end, with a sample"):
        cells = []
        for engine in ENGINES:
            there = [run[name] for run in runs[engine] if name in run]
            both = [statistics.median(part) for part in zip(*there, strict=True)] if there else [float("nan")] * 2
            cells.append(both)
        (xla_cpu, xla_clock), (torch_cpu, torch_clock) = cells
        figures = f"{xla_cpu:>12.0f}{xla_clock:>8.0f}{torch_cpu:>14.0f}{torch_clock:>8.0f}"
        print(f"{name:<20}{figures}{torch_cpu / xla_cpu:>13.2f}")


if __name__ == "__main__":
    main()
