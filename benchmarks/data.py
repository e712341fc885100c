"""Measure the throughput of the data pipeline: `python -m benchmarks.data [--scale | --verification]`.

Three datasets of 80 thousand documents each (158 M tokens, lognormal lengths, median 400) in each of the three stores,
mixed 0.5 / 0.3 / 0.2 over 1024 logical shards, batches of [2, 4096]. For comparison, the same process reads random
windows of a numpy memmap on the same core: the ratios carry over to other machines, tokens per second do not. Figures
are medians over processes. --scale: one Megatron dataset of 100 million documents in a sparse file. --verification:
the first epoch with and without checksums of blocks, in turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from main_training import CONFIGURATION
from pretraining.config.training import TrainConfig
from pretraining.data import Prefetcher, open_stream
from pretraining.data.stream import Stream

ROWS, LENGTH, VOCABULARY = 2, 4096, 32_000
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
SHARDS, DOCUMENTS = 8, 10_000  # per dataset, per shard


# ---- Corpus


def lengths(seed: int, median: int, count: int = DOCUMENTS) -> np.ndarray:
    """Return lognormal document lengths, int32: sigma 1, between 16 and 16384 tokens."""
    samples = np.random.default_rng(seed).lognormal(np.log(median), 1.0, count)
    return np.clip(samples, 16, 16_384).astype(np.int32)


def write_corpus(folder: Path, store: str, median: int, documents: int = DOCUMENTS) -> None:
    """Write the three datasets in one store."""
    write = {"arrow": write_arrow, "parquet": write_parquet, "megatron": write_megatron}[store]
    for number, name in enumerate(SHARES):
        (folder / name).mkdir(parents=True)
        for shard in range(SHARDS):
            sizes = lengths(100 * number + shard, median, documents)
            tokens = np.random.default_rng(shard).integers(2, VOCABULARY, int(sizes.sum()), np.int32)
            write(folder / name / f"{shard:02d}", tokens, sizes)


def write_arrow(path: Path, tokens: np.ndarray, sizes: np.ndarray) -> None:
    """Write one document per record batch, uint32, as fms-fsdp does."""
    import pyarrow as pa

    schema = pa.schema([("tokens", pa.uint32())])
    with pa.OSFile(f"{path}.arrow", "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for end, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
            document = pa.array(tokens[end - size : end].view(np.uint32))
            writer.write(pa.record_batch([document], schema=schema))


def write_parquet(path: Path, tokens: np.ndarray, sizes: np.ndarray) -> None:
    """Write a list column of int32."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    pq.write_table(pa.table({"tokens": column}), f"{path}.parquet", row_group_size=2000)


def write_megatron(path: Path, tokens: np.ndarray, sizes: np.ndarray) -> None:
    """Write uint16, as Megatron's tools do for small vocabularies."""
    tokens.astype(np.uint16).tofile(f"{path}.bin")
    write_idx(Path(f"{path}.idx"), sizes, token_type=8)


def write_idx(path: Path, sizes: np.ndarray, token_type: int) -> None:
    """Write Megatron's index of documents of one sequence each."""
    width = {4: 4, 8: 2}[token_type]
    with path.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([token_type]))
        file.write(len(sizes).to_bytes(8, "little") + (len(sizes) + 1).to_bytes(8, "little"))
        sizes.astype("<i4").tofile(file)
        ((np.cumsum(sizes, dtype=np.int64) - sizes) * width).tofile(file)
        np.arange(len(sizes) + 1, dtype=np.int64).tofile(file)


# ---- Measurement, in a new process


def measure(folder: Path, index: Path) -> dict[str, float]:
    """Measure one store; the page cache is warm after the first process."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    config = settings(folder, index)
    results = {"private_mib": -private_mib()}
    began = time.perf_counter()
    stream = open_stream(config)
    stream.batch(0)
    results["first_batch_s"] = time.perf_counter() - began
    touch(stream)
    results["private_mib"] += private_mib()
    results |= rates({"stream": stream.batch, "window": windows(folder)})
    results["prefetched"] = max(prefetch_rate(stream) for _ in range(10))
    state = json.loads(json.dumps(stream.state(10_000)))
    began = time.perf_counter()
    open_stream(config, state=state).batch(0)
    results["resume_s"] = time.perf_counter() - began
    results["state_bytes"] = len(json.dumps(state))
    return results


def settings(folder: Path, index: Path) -> TrainConfig:
    """Return the configuration to measure."""
    several = any(folder.glob("*/*"))
    names, weights = (",".join(SHARES), "0.5,0.3,0.2") if several else ("", "")
    config = CONFIGURATION(data_path=str(folder), datasets=names, weights=weights, index_dir=str(index))
    return replace(config, seq_length=LENGTH, global_batch_size=ROWS, vocab_size=VOCABULARY, sep_token=1)


def touch(stream: Stream, batches: int = 1500) -> None:
    """Read every logical shard at least once."""
    for step in range(batches):
        stream.batch(step)


def rates(sources: dict[str, Callable[[int], Any]], rounds: int = 300, batches: int = 6) -> dict[str, float]:
    """Return the million tokens per second of CPU time of each source in its best round.

    The sources take turns, so that other load on the machine affects all of them; it affects the best round least.
    """
    best = dict.fromkeys(sources, 0.0)
    for number in range(rounds):
        for name, batch in sources.items():
            began = time.process_time()
            for step in range(number * batches, (number + 1) * batches):
                batch(step)
            seconds = time.process_time() - began
            best[name] = max(best[name], batches * ROWS * LENGTH / seconds / 1e6)
    return best


def prefetch_rate(stream: Stream, batches: int = 512) -> float:
    """Return the rate through the prefetch thread; the CPU time of the whole process and the start count."""
    prefetcher = Prefetcher(stream, 1)
    began = time.process_time()
    for step in range(batches):
        prefetcher.batch(step)
    seconds = time.process_time() - began
    prefetcher.close()
    return batches * ROWS * LENGTH / seconds / 1e6


def windows(folder: Path) -> Callable[[int], Any]:
    """Return the comparison: random windows of one mapped file, copied to a new array."""
    path = max(folder.rglob("*.*"), key=lambda file: file.stat().st_size)
    tokens = np.memmap(path, np.uint32, "r", shape=(path.stat().st_size // 4,)).view(np.ndarray)
    starts = np.random.default_rng(0).integers(0, len(tokens) - LENGTH, (4096, ROWS)).tolist()

    def batch(step: int) -> Any:
        out = np.empty((ROWS, LENGTH), np.int64)
        for row, start in enumerate(starts[step % 4096]):
            out[row] = tokens[start : start + LENGTH]
        return out

    return batch


def private_mib() -> float:
    """Return the anonymous memory of this process in MiB."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.split("Anonymous:")[1].split()[0]) / 1024


# ---- Verification


def report_verification(name: str, folder: Path, rounds: int = 1000, batches: int = 20) -> None:
    """Print the rates of about an epoch without and with checksums of blocks, and what those cost.

    All blocks are opened, and therefore compared, in the first fifth of the epoch.
    """
    seconds = {"off": 0.0, "first_read": 0.0}
    with tempfile.TemporaryDirectory() as index:
        config: Any = settings(folder, Path(index))
        streams = {"off": open_stream(replace(config, verify_data="off")), "first_read": open_stream(config)}
        for number in range(rounds):
            for mode, stream in streams.items():
                began = time.process_time()
                for step in range(number * batches, (number + 1) * batches):
                    stream.batch(step)
                seconds[mode] += time.process_time() - began
    tokens = rounds * batches * ROWS * LENGTH / 1e6
    rates = ", ".join(f"{mode} {tokens / spent:.0f}" for mode, spent in seconds.items())
    cost = seconds["first_read"] / seconds["off"] - 1
    print(f"{name:<22} M tokens/s: {rates}; checksums cost {cost:.1%} of the CPU time", flush=True)


# ---- Report


def measure_in_new_process(folder: Path, index: Path) -> dict[str, float]:
    """Run `measure` in a new process."""
    command = [sys.executable, "-m", "benchmarks.data", "--measure", str(folder), str(index)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report(name: str, folder: Path, repeats: int) -> None:
    """Print a row of medians; "cold" is the first process, which has no index."""
    index = Path(tempfile.mkdtemp())
    cold = measure_in_new_process(folder, index)
    runs = [measure_in_new_process(folder, index) for _ in range(repeats)]
    shutil.rmtree(index)
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    stream, prefetched = (
        statistics.median(run[key] / run["window"] for run in runs) for key in ("stream", "prefetched")
    )
    most = max(run["private_mib"] for run in [*runs, cold])
    print(
        f"{name:<22} {middle['stream']:6.0f} {middle['prefetched']:10.0f} {middle['window']:7.0f}   "
        f"{stream:6.2f} {prefetched:10.2f}"
        f"   {cold['first_batch_s']:6.2f} {middle['first_batch_s']:6.3f} {middle['resume_s']:6.3f}"
        f"   {most:6.0f} {middle['state_bytes']:6.0f}",
        flush=True,
    )


def main() -> None:
    """Write the corpora, measure each store, and print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.data", description=__doc__)
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scale", action="store_true", help="100 million documents with 2 GB of index")
    parser.add_argument("--verification", action="store_true", help="checksums of blocks on and off")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stores", default="arrow,parquet,megatron,short")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of a shard, of which a dataset has 8")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    if not options.verification:
        print(f"{'':<22}   M tokens/s                  of memmap           first batch s  resume  private  state")
        print(f"{'':<22} direct prefetched  memmap   direct prefetched     cold   warm       s      MiB  bytes")
    for store in ["scale"] if options.scale else options.stores.split(","):
        folder = Path(tempfile.mkdtemp())
        if store == "scale":
            write_scale(folder)
        else:
            kind, median = ("arrow", 40) if store == "short" else (store, 400)
            write_corpus(folder, kind, median, options.documents)
        name = {"short": "arrow, mean 66"}.get(store, store)
        if options.verification:
            report_verification(name, folder)
        else:
            report(name, folder, options.repeats)
        shutil.rmtree(folder)


def write_scale(folder: Path) -> None:
    """Write 100 million documents of 600 tokens on average in a sparse file."""
    write_sparse(folder, np.tile(lengths(0, 364), 10_000))


def write_sparse(folder: Path, sizes: np.ndarray) -> None:
    """Write Megatron documents of these lengths, int32 zeros that take no room on the disk."""
    write_idx(folder / "all.idx", sizes, token_type=4)
    with (folder / "all.bin").open("wb") as file:
        file.truncate(int(sizes.sum(dtype=np.int64)) * 4)


if __name__ == "__main__":
    main()
