"""Measure the speed of saving and loading checkpoints relative to that of the disk.

    python -m benchmarks.checkpoint --folder=DIR [--parameters=1e8] [--stream=1e9] [--repeats=3] [--workers=8]

Saves and loads parameters and two moments in fp32 (12 bytes per parameter), including the hashes, and compares with one
sequential write of the same bytes with fsync and one sequential cold read. Then measures how long a training step waits
with async_checkpointing, and how much host memory a streamed save takes relative to the largest tensor. Both
measurements take turns, because the speed of disks varies; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.shards import host_bytes
from pretraining.checkpoint.store import PendingSave, load
from pretraining.config.training import TrainConfig
from pretraining.extensions.async_checkpointing import AsyncCheckpointingConfig
from pretraining.extensions.async_checkpointing.saves import copied_bytes

BLOCK = 8 << 20
FACTS = Facts(1, 0, {}, asdict(TrainConfig()), "none", {})
WIDTH = 2048


def shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of about `parameters` parameters (embedding, head, blocks) and their moments."""
    width = min(WIDTH, max(64, math.isqrt(parameters // 11) // 64 * 64))  # WIDTH from 5e7 on
    vocabulary = max(parameters // 8 // width, 1)  # a quarter in embedding and head together
    block = {"attn": (4 * width, width), "mlp": (12 * width, width), "norm": (width,)}
    per_block = 16 * width * width + width
    weights: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "head": (vocabulary, width)}
    for layer in range(max(round(parameters * 3 / 4 / per_block), 1)):
        weights |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    moments = {f"optimizer.{kind}.{name}": shape for kind in ("m", "v") for name, shape in weights.items()}
    return {**weights, **moments}


def evict(path: Path) -> None:
    """Remove the files below a folder from the page cache."""
    for file in filter(Path.is_file, path.rglob("*")):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def plain_write(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write all bytes to one file, with fsync."""
    folder.mkdir()
    with (folder / "bytes").open("wb", buffering=0) as file:
        for tensor in state.values():
            data = host_bytes(tensor)
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
        os.fsync(file.fileno())


def plain_read(folder: Path, buffer: bytearray) -> None:
    """Read the file in blocks."""
    with (folder / "bytes").open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure_round(root: Path, state: dict[str, torch.Tensor], workers: int, *, ours_first: bool) -> dict[str, float]:
    """Return the seconds of a plain write and a save, and of a cold plain read and a load."""
    plain, ours, buffer = root / "plain", root / "ours", bytearray(BLOCK)
    functions: dict[str, Callable[[], object]] = {
        "plain_write": lambda: plain_write(plain, state),
        "save": lambda: PendingSave(ours, state, FACTS, Peers(), workers=workers).write(),
        "plain_read": lambda: plain_read(plain, buffer),
        "load": lambda: load(open_checkpoint(ours / "step_1"), state, workers=workers),
    }
    writes, reads = ["plain_write", "save"], ["plain_read", "load"]
    seconds = {name: timed(functions[name]) for name in (writes[::-1] if ours_first else writes)}
    for folder in (plain, ours / "step_1"):
        evict(folder)
    seconds |= {name: timed(functions[name]) for name in (reads[::-1] if ours_first else reads)}
    for folder in (plain, ours):
        shutil.rmtree(folder)
    os.sync()  # the next round starts with an idle disk
    return seconds


def bandwidth(root: Path, parameters: int, repeats: int, workers: int) -> dict[str, float]:
    """Return the medians in seconds, and the two ratios."""
    state = {name: torch.randn(shape) for name, shape in shapes(parameters).items()}
    size = sum(t.numel() * 4 for t in state.values())
    rounds = [measure_round(root, state, workers, ours_first=bool(number % 2)) for number in range(repeats)]
    for one in rounds:
        print({name: round(value, 2) for name, value in one.items()})
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return {
        "gigabytes": size / 1e9,
        **median,
        "save_over_plain": median["plain_write"] / median["save"],
        "load_over_plain": median["plain_read"] / median["load"],
    }


def waiting(root: Path, parameters: int, repeats: int) -> dict[str, float]:
    """Return the seconds that training waits for a save, synchronous and asynchronous.

    Medians without the first save, which allocates the host memory; the first asynchronous one is returned, too.
    """
    state = {name: torch.randn(shape) for name, shape in shapes(parameters).items()}
    waits = {}
    for background in (False, True):
        checkpoints = Checkpoints(
            AsyncCheckpointingConfig(async_checkpointing=background, keep_last_n_checkpoints=1), root
        )
        seconds = []
        for step in range(1, repeats + 2):
            seconds.append(timed(partial(checkpoints.save, state, replace(FACTS, step=step))))
            checkpoints.wait()
        checkpoints.close()
        shutil.rmtree(root / "checkpoints")
        waits["async" if background else "sync"] = statistics.median(seconds[1:])
    return {**waits, "first_async": seconds[0], "async_over_sync": waits["async"] / waits["sync"]}


def peak_memory() -> int:
    """Return the peak of this process's memory in bytes since `reset_peak`."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def reset_peak() -> int:
    """Reset the peak, and return the memory in bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def expanded(parameters: int) -> dict[str, torch.Tensor]:
    """Return the state of about `parameters` parameters, whose tensors are expanded from one number each.

    Like tensors of a device, they take no host memory until a chunk is copied there, so that 12 GB of them fit on a
    small machine.
    """
    return {name: torch.full((1,) * len(shape), 0.5).expand(shape) for name, shape in shapes(parameters).items()}


def streamed(root: Path, parameters: int, workers: int) -> dict[str, float]:
    """Return the host memory that a streamed save takes, and its ratio to the largest tensor."""
    state = expanded(parameters)
    largest = max(tensor.numel() * 4 for tensor in state.values())
    memory_before = reset_peak()
    pending = PendingSave(root, state, FACTS, Peers(together=False), dtype=None, workers=workers)
    seconds = timed(pending.write)
    size = copied_bytes(pending)
    shutil.rmtree(root)
    growth = peak_memory() - memory_before
    return {
        "gigabytes": size / 1e9,
        "seconds": seconds,
        "growth": growth / 1e9,
        "growth_over_largest": growth / largest,
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--stream", type=float, default=1e9, help="parameters of the streamed save; 0 skips it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8)
    flags = parser.parse_args()
    root = flags.folder / "checkpoint_benchmark"
    root.mkdir(parents=True)
    try:
        results = {"bandwidth": bandwidth(root, int(flags.parameters), flags.repeats, flags.workers)}
        results["waiting"] = waiting(root, int(flags.parameters), flags.repeats)
        if flags.stream:
            results["streamed"] = streamed(root / "streamed", int(flags.stream), flags.workers)
        print(json.dumps(results, indent=2))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
