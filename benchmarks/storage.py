"""Measure data and checkpoints over an S3 server on loopback: `python -m benchmarks.storage [--data | --checkpoint]`.

Data: the corpus of benchmarks.data in Megatron's format, from a local folder and from the server, through one prefetch
thread; then the ranges that the loader requested again, by as many threads and nothing else; then a consumer of
10 M tokens/s, and how long its steps wait for either. They take turns. Checkpoints: how long a step waits for a save
and how long a restore takes, to the server and to a local folder, as ratios to a plain copy of the same bytes to the
same place. The server is moto's and shares the cores; because it answers a ranged read in 6 ms, data are measured once
more with a smaller server before it that answers reads. The ratios count. Needs requirements/dev.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch

from benchmarks.checkpoint import BLOCK, FACTS, evict, plain_read, plain_write, timed
from benchmarks.data import LENGTH, ROWS, settings, write_corpus
from main_training import EXTENSIONS
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.shards import host_bytes
from pretraining.checkpoint.store import PendingSave, load
from pretraining.config.training import TrainConfig
from pretraining.data import Prefetcher, open_stream
from pretraining.extensions.object_storage.objects import ObjectFile, ObjectPath, client_of
from pretraining.extensions.object_storage.ranges import REQUESTS
from pretraining.storage import Location, location, use_files_of
from tests.object_storage import BUCKET, FaultProxy, environment, s3_server, upload

RATE = 10e6  # tokens per second of the consumer
TOKENS = ROWS * LENGTH  # of a batch

Range = tuple[ObjectPath, int, int]


# ---- A server of reads


class FileServer(FaultProxy):
    """Answers reads of objects with the files of a folder, which are in the bucket, too; forwards everything else."""

    def __init__(self, port: int, folder: Path) -> None:
        """port: of the S3 server."""
        self._folder = folder
        super().__init__(port)

    def forward(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        """Answer one request."""
        path = self._folder / urlsplit(handler.path).path.removeprefix(f"/{BUCKET}/")
        if handler.command not in ("GET", "HEAD") or not path.is_file():
            super().forward(handler, port)
            return
        size, wanted = path.stat().st_size, handler.headers.get("Range")
        first, last = map(int, wanted.removeprefix("bytes=").split("-")) if wanted else (0, size - 1)
        handler.send_response(206 if wanted else 200)
        handler.send_header("Content-Length", str(last - first + 1))
        handler.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        handler.send_header("ETag", f'"{size:032x}"')
        handler.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        handler.end_headers()
        while handler.command == "GET" and first <= last:
            with path.open("rb") as file:
                first += os.sendfile(handler.connection.fileno(), file.fileno(), first, last - first + 1)


@contextmanager
def file_server(port: int, folder: Path) -> Iterator[int]:
    """Run a FileServer as a process; yield its port."""
    command = [sys.executable, "-m", "benchmarks.storage", "--serve", str(port), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield int(process.stdout.readline())
        process.kill()


# ---- Data


@contextmanager
def recorded() -> Iterator[list[Range]]:
    """Record the ranges of objects that are read."""
    ranges: list[Range] = []
    original = ObjectFile.read_unconfirmed

    def read_unconfirmed(file: ObjectFile, start: int, count: int) -> bytes:
        ranges.append((file.path, start, count))
        return original(file, start, count)

    ObjectFile.read_unconfirmed = read_unconfirmed  # type: ignore[method-assign, assignment]
    yield ranges
    ObjectFile.read_unconfirmed = original  # type: ignore[method-assign]


def read_plainly(files: dict[ObjectPath, Any], ranges: list[Range]) -> None:
    """Read ranges by as many threads as the loader has for requests."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(lambda range: files[range[0]].read_at(range[2], range[1]), ranges))


def cpu_seconds() -> np.ndarray:
    """Return the CPU time of this process and of the servers, which are its children; float64 [2]."""
    servers = [child.cpu_times() for child in psutil.Process().children()]
    return np.array([time.process_time(), sum(times.user + times.system for times in servers)])


def spent(name: str, act: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that `act` takes, on the clock and of the CPU."""
    before, began = cpu_seconds(), time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    client, servers = cpu_seconds() - before
    return {f"{name}_s": seconds, f"{name}_cpu_s": client, f"{name}_servers_cpu_s": servers}


def read_batches(name: str, config: TrainConfig, batches: int) -> dict[str, float]:
    """Return the seconds that batches take through the prefetch thread, and of them those of the first quarter."""
    stream = open_stream(config)
    stream.batch(0)
    prefetcher = Prefetcher(stream, 1)
    first = spent(name, lambda: [prefetcher.batch(step) for step in range(1, batches // 4 + 1)])
    rest = spent(name, lambda: [prefetcher.batch(step) for step in range(batches // 4 + 1, batches + 1)])
    prefetcher.close()
    stream.close()
    return {f"{name}_first_s": first[f"{name}_s"]} | {key: first[key] + rest[key] for key in first}


def waits(name: str, config: TrainConfig, batches: int) -> dict[str, float]:
    """Return how long a consumer of RATE waits for its batches after the first quarter of them.

    In that quarter, the first block of every logical shard is read.
    """
    prefetcher, waited = Prefetcher(open_stream(config), 1), []
    began = time.perf_counter()
    for step in range(batches):
        time.sleep(max(0.0, began + step * TOKENS / RATE - time.perf_counter()))
        asked = time.perf_counter()
        prefetcher.batch(step)
        waited.append(time.perf_counter() - asked)
        if step < batches // 4:
            began = time.perf_counter() - step * TOKENS / RATE
    prefetcher.close()
    waited = waited[batches // 4 :]
    seconds = len(waited) * TOKENS / RATE
    late = sum(wait > 1e-3 for wait in waited) / len(waited)
    return {f"{name}_wait_share": sum(waited) / seconds, f"{name}_steps_over_1ms": late, f"{name}_longest": max(waited)}


def measure_data(root: Path, port: int, batches: int, repeats: int) -> dict[str, Any]:
    """Return the measurements with moto's server, of an eighth of the batches, and with the smaller one."""
    write_corpus(root / "corpus", "megatron", 400)
    local = settings(root / "corpus", root / "index")
    stored = replace(local, data_path=upload(root / "corpus", "corpus", port), index_dir=str(root / "stored"))
    open_stream(stored).close()
    results = {"moto": measure_reads(local, stored, batches // 8, repeats)}
    with file_server(port, root) as reads:
        os.environ |= environment(reads)
        client_of.cache_clear()
        results["file_server"] = measure_reads(local, stored, batches, repeats)
        results["file_server"] |= measure_waits(local, stored, batches, repeats)
    return results


def measure_reads(local: TrainConfig, stored: TrainConfig, batches: int, repeats: int) -> dict[str, Any]:
    """Return seconds, rates in million tokens per second, and ratios, by the clock and by CPU time of all processes.

    The measurements take turns; the figures are medians, the ratios those of neighbours with their extremes.
    """
    rounds = []
    for _ in range(repeats):
        one = read_batches("local", local, batches)
        with recorded() as ranges:
            one |= read_batches("s3", stored, batches)
        files = {path: path.request(lambda client, name: client.open_input_file(name)) for path, _, _ in ranges}
        one |= spent("plain", partial(read_plainly, files, ranges))
        for name in ("local", "s3", "plain"):
            one[name] = batches * TOKENS / one[f"{name}_s"] / 1e6
            one[f"{name}_all_cpu_s"] = one[f"{name}_cpu_s"] + one[f"{name}_servers_cpu_s"]
        one |= {f"s3_over_{name}": one["s3"] / one[name] for name in ("local", "plain")}
        one |= {f"s3_over_{name}_cpu": one[f"{name}_all_cpu_s"] / one["s3_all_cpu_s"] for name in ("local", "plain")}
        one["local_over_plain"] = one["local"] / one["plain"]
        one |= {"ranges": len(ranges), "megabytes": sum(count for _, _, count in ranges) / 1e6}
        rounds.append(one)
    extremes = {f"s3_over_plain_{act.__name__}": act(one["s3_over_plain"] for one in rounds) for act in (min, max)}
    return medians(rounds) | extremes


def measure_waits(local: TrainConfig, stored: TrainConfig, batches: int, repeats: int) -> dict[str, float]:
    """Return medians of what `waits` returns, in turns."""
    rounds = []
    for number in range(repeats):
        seed = local.seed + number + 1
        one = waits("s3", replace(stored, seed=seed), batches)
        rounds.append(one | waits("local", replace(local, seed=seed), batches))
    return medians(rounds)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


# ---- Checkpoints


def measure_checkpoints(root: Path, mebibytes: int, repeats: int) -> dict[str, Any]:
    """Return medians in seconds of saves and restores, and their ratios to a plain write and read in the same place."""
    state = {f"layers.{number}.weight": torch.randn(1024, 1024) for number in range(mebibytes // 4)}
    rounds = [
        measure_local(root / "fast", state, replace(FACTS, step=number))
        | measure_stored(location(f"s3://{BUCKET}/run"), state, replace(FACTS, step=number))
        for number in range(1, repeats + 1)
    ]
    median = medians(rounds)
    names = [f"{act}_{place}" for act in ("save", "restore") for place in ("local", "s3")]
    ratios = {f"{name}_over_plain": median[name] / median[f"plain_{name}"] for name in names}
    ratios["save_s3_over_local"] = median["save_s3"] / median["save_local"]
    ratios["restore_s3_over_local"] = median["restore_s3"] / median["restore_local"]
    return {"gigabytes": sum(tensor.nbytes for tensor in state.values()) / 1e9, **median, **ratios}


def measure_local(folder: Path, state: dict[str, Any], facts: Facts) -> dict[str, float]:
    """Return seconds of a save and a cold restore, and of the same bytes in one file."""
    plain, step = folder / f"plain{facts.step}", folder / f"step_{facts.step}"
    folder.mkdir(exist_ok=True)
    seconds = {"plain_save_local": timed(lambda: plain_write(plain, state))}
    seconds["save_local"] = timed(PendingSave(folder, state, facts, Peers()).write)
    for written in (plain, step):
        evict(written)
    seconds["plain_restore_local"] = timed(lambda: plain_read(plain, bytearray(BLOCK)))
    return seconds | {"restore_local": timed(lambda: load(open_checkpoint(step), state))}


def measure_stored(folder: Location, state: dict[str, Any], facts: Facts) -> dict[str, float]:
    """Return seconds of a save and a restore, and of the same bytes in one object, by one thread in ranges."""
    plain, step = folder.parent / f"plain{facts.step}", folder / f"step_{facts.step}"
    assert isinstance(plain, ObjectPath)
    data = b"".join(host_bytes(tensor) for tensor in state.values())
    seconds = {"plain_save_s3": timed(lambda: plain.write_bytes(data))}
    seconds["save_s3"] = timed(PendingSave(folder, state, facts, Peers()).write)
    opened = plain.request(lambda client, name: client.open_input_file(name))
    ranges = range(0, len(data), BLOCK)
    seconds["plain_restore_s3"] = timed(lambda: [opened.read_at(min(BLOCK, len(data) - at), at) for at in ranges])
    return seconds | {"restore_s3": timed(lambda: load(open_checkpoint(step), state))}


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser("python -m benchmarks.storage", description=__doc__)
    parser.add_argument("--data", action="store_true", help="data only")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", action="store_true", help="checkpoints only")
    parser.add_argument("--batches", type=int, default=16_000, help=f"of {TOKENS} tokens; an epoch has 19,000")
    parser.add_argument("--mebibytes", type=int, default=256, help="of a checkpoint")
    parser.add_argument("--repeats", type=int, default=3, help="of everything")
    options = parser.parse_args()
    use_files_of(EXTENSIONS)
    if options.serve:
        print(FileServer(int(options.serve[0]), Path(options.serve[1])).port, flush=True)
        sys.stdin.read()
        return
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as port:
        os.environ |= environment(port)
        results = {}
        if not options.data:
            results["checkpoint"] = measure_checkpoints(Path(folder), options.mebibytes, options.repeats)
        if not options.checkpoint:
            client_of.cache_clear()
            results["data"] = measure_data(Path(folder), port, options.batches, options.repeats)
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
