"""How fast checkpoints are written and read, against the disk itself, in the same run on the same disk.

    python benchmarks/checkpoint.py --folder=DIR [--parameters=1e8] [--stream=1e9] [--repeats=3] [--workers=8]

Plain: one sequential write of the same bytes, fsynced; one sequential read of them, not in the page cache. Ours: save
and load of parameters and two moments in fp32 (12 bytes a parameter), hashes included. Then what training waits for
with async_checkpointing, and how much host memory a streamed save takes over the largest tensor. Medians, and the
plain and our measurement take turns, because disks have moods.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.shards import host_bytes
from pretraining.checkpoint.store import PendingSave, load, save
from pretraining.config.training import TrainConfig

BLOCK = 8 << 20
FACTS = Facts(1, 0, {}, asdict(TrainConfig()), "none", {})
WIDTH = 2048


def shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of about so many parameters and their moments: an embedding, a head, blocks of width 2048."""
    vocabulary = max(parameters // 8 // WIDTH, 1)  # a quarter in embedding and head together
    block = {"attn": (4 * WIDTH, WIDTH), "mlp": (12 * WIDTH, WIDTH), "norm": (WIDTH,)}
    per_block = 16 * WIDTH * WIDTH + WIDTH
    weights: dict[str, tuple[int, ...]] = {"embed": (vocabulary, WIDTH), "head": (vocabulary, WIDTH)}
    for layer in range(max(round(parameters * 3 / 4 / per_block), 1)):
        weights |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    moments = {f"optimizer.{kind}.{name}": shape for kind in ("m", "v") for name, shape in weights.items()}
    return {**weights, **moments}


def evict(path: Path) -> None:
    """Put a folder's files out of the page cache."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(act: Callable[[], object]) -> float:
    """Seconds that `act` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def plain_write(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """All bytes into one file, in order, fsynced."""
    folder.mkdir()
    with (folder / "bytes").open("wb", buffering=0) as file:
        for tensor in state.values():
            data = host_bytes(tensor)
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
        os.fsync(file.fileno())


def plain_read(folder: Path, buffer: bytearray) -> None:
    """The file, block by block, into one buffer."""
    with (folder / "bytes").open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def turn(root: Path, state: dict[str, torch.Tensor], workers: int, *, ours_first: bool) -> dict[str, float]:
    """Seconds of one plain write and save, and of one cold plain read and load."""
    plain, ours, buffer = root / "plain", root / "ours", bytearray(BLOCK)
    acts: dict[str, Callable[[], object]] = {
        "plain_write": lambda: plain_write(plain, state),
        "save": lambda: save(ours, state, FACTS, workers=workers),
        "plain_read": lambda: plain_read(plain, buffer),
        "load": lambda: load(open_checkpoint(ours / "step_1"), state, workers=workers),
    }
    writes, reads = ["plain_write", "save"], ["plain_read", "load"]
    seconds = {name: timed(acts[name]) for name in (writes[::-1] if ours_first else writes)}
    for folder in (plain, ours / "step_1"):
        evict(folder)
    seconds |= {name: timed(acts[name]) for name in (reads[::-1] if ours_first else reads)}
    for folder in (plain, ours):
        shutil.rmtree(folder)
    os.sync()  # the next turn starts with an idle disk
    return seconds


def bandwidth(root: Path, parameters: int, repeats: int, workers: int) -> dict[str, float]:
    """Seconds (medians) and the two ratios."""
    state = {name: torch.randn(shape) for name, shape in shapes(parameters).items()}
    size = sum(t.numel() * 4 for t in state.values())
    turns = [turn(root, state, workers, ours_first=bool(number % 2)) for number in range(repeats)]
    for one in turns:
        print({name: round(value, 2) for name, value in one.items()})
    median = {name: statistics.median(one[name] for one in turns) for name in turns[0]}
    return {
        "gigabytes": size / 1e9,
        **median,
        "save_over_plain": median["plain_write"] / median["save"],
        "load_over_plain": median["plain_read"] / median["load"],
    }


def waiting(root: Path, parameters: int, repeats: int) -> dict[str, float]:
    """Seconds that training waits for one save, synchronous and not: medians, and the first asynchronous one.

    The first takes the host memory, which the others find ready.
    """
    state = {name: torch.randn(shape) for name, shape in shapes(parameters).items()}
    waits = {}
    for background in (False, True):
        checkpoints = Checkpoints(TrainConfig(async_checkpointing=background, keep_last_n_checkpoints=1), root)
        seconds = []
        for step in range(1, repeats + 2):
            seconds.append(timed(partial(checkpoints.save, step, state, FACTS)))
            checkpoints.wait()
        checkpoints.close()
        shutil.rmtree(root / "checkpoints")
        waits["async" if background else "sync"] = statistics.median(seconds[1:])
    return {**waits, "first_async": seconds[0], "async_over_sync": waits["async"] / waits["sync"]}


def peak_memory() -> int:
    """Most bytes this process has held since `reset_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def reset_peak() -> int:
    """Forget the peak; the bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def streamed(root: Path, parameters: int, workers: int) -> dict[str, float]:
    """Host memory that a save of so many parameters takes over its largest tensor.

    The tensors are one number each, stretched to their shape: like a device's, they have no bytes in host memory
    until a piece is copied there, and 12 GB of them fit on a small machine.
    """
    state = {name: torch.full((1,) * len(shape), 0.5).expand(shape) for name, shape in shapes(parameters).items()}
    largest = max(tensor.numel() * 4 for tensor in state.values())
    before = reset_peak()
    pending = PendingSave(root, state, FACTS, Peers(together=False), dtype=None, workers=workers)
    seconds = timed(pending.write)
    size = pending.host_bytes
    shutil.rmtree(root)
    grown = peak_memory() - before
    return {"gigabytes": size / 1e9, "seconds": seconds, "grown": grown / 1e9, "grown_over_largest": grown / largest}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--stream", type=float, default=1e9, help="parameters of the streamed save; 0: leave it out")
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
