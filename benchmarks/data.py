"""How fast batches come out of the data room: `python -m benchmarks.data [--scale]`.

Three datasets of 80 thousand documents each (158 M tokens, lognormal lengths, median 400), in the three stores, mixed
0.5 / 0.3 / 0.2 over 1024 logical shards, batches of [2, 4096]. Every figure stands beside a bare numpy memmap of
random windows, measured in the same process on the same core, and is a median over processes: ratios carry over to
other machines, tokens per second do not. --scale: one Megatron dataset of 100 million documents over a sparse file.
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

from pretraining.config.training import TrainConfig
from pretraining.data import Prefetcher, Stream, open_stream

ROWS, LENGTH, VOCABULARY = 2, 4096, 32_000
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
SHARDS, DOCUMENTS = 8, 10_000  # per dataset, per shard


# ---- The corpus


def lengths(seed: int, median: int) -> np.ndarray:
    """Lognormal document lengths, int32: sigma 1, between 16 and 16384 tokens."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, DOCUMENTS)
    return np.clip(drawn, 16, 16_384).astype(np.int32)


def write_corpus(folder: Path, store: str, median: int) -> None:
    """The three datasets in one store."""
    write = {"arrow": write_arrow, "parquet": write_parquet, "megatron": write_megatron}[store]
    for number, name in enumerate(SHARES):
        (folder / name).mkdir(parents=True)
        for shard in range(SHARDS):
            sizes = lengths(100 * number + shard, median)
            tokens = np.random.default_rng(shard).integers(2, VOCABULARY, int(sizes.sum()), np.int32)
            write(folder / name / f"{shard:02d}", tokens, sizes)


def write_arrow(path: Path, tokens: np.ndarray, sizes: np.ndarray) -> None:
    """One document per record batch, uint32: fms-fsdp's layout."""
    import pyarrow as pa

    schema = pa.schema([("tokens", pa.uint32())])
    with pa.OSFile(f"{path}.arrow", "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for end, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
            document = pa.array(tokens[end - size : end].view(np.uint32))
            writer.write(pa.record_batch([document], schema=schema))


def write_parquet(path: Path, tokens: np.ndarray, sizes: np.ndarray) -> None:
    """A list column of int32."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    pq.write_table(pa.table({"tokens": column}), f"{path}.parquet", row_group_size=2000)


def write_megatron(path: Path, tokens: np.ndarray, sizes: np.ndarray) -> None:
    """uint16, as Megatron's tools write for small vocabularies."""
    tokens.astype(np.uint16).tofile(f"{path}.bin")
    write_idx(Path(f"{path}.idx"), sizes, token_type=8)


def write_idx(path: Path, sizes: np.ndarray, token_type: int) -> None:
    """Megatron's index of documents of one sequence each."""
    width = {4: 4, 8: 2}[token_type]
    with path.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([token_type]))
        file.write(len(sizes).to_bytes(8, "little") + (len(sizes) + 1).to_bytes(8, "little"))
        sizes.astype("<i4").tofile(file)
        ((np.cumsum(sizes, dtype=np.int64) - sizes) * width).tofile(file)
        np.arange(len(sizes) + 1, dtype=np.int64).tofile(file)


# ---- Measuring, in a process of its own


def measure(folder: Path, index: Path) -> dict[str, float]:
    """Everything about one store; the page cache is warm after the first process."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    config = settings(folder, index)
    found = {"private_mib": -private_mib()}
    began = time.perf_counter()
    stream = open_stream(config)
    stream.batch(0)
    found["first_batch_s"] = time.perf_counter() - began
    touch(stream)
    found["private_mib"] += private_mib()
    found |= rates({"stream": stream.batch, "window": windows(folder)})
    found["thread"] = max(rate_ahead(stream) for _ in range(10))
    state = json.loads(json.dumps(stream.state(10_000)))
    began = time.perf_counter()
    open_stream(config, state=state).batch(0)
    found["resume_s"] = time.perf_counter() - began
    found["state_bytes"] = len(json.dumps(state))
    return found


def settings(folder: Path, index: Path) -> TrainConfig:
    """The configuration under test."""
    many = any(folder.glob("*/*"))
    names, weights = (",".join(SHARES), "0.5,0.3,0.2") if many else ("", "")
    config = TrainConfig(data_path=str(folder), datasets=names, weights=weights, index_dir=str(index))
    return replace(config, seq_length=LENGTH, global_batch_size=ROWS, vocab_size=VOCABULARY, sep_token=1)


def touch(stream: Stream, batches: int = 1500) -> None:
    """Visit every logical shard at least once."""
    for step in range(batches):
        stream.batch(step)


def rates(sources: dict[str, Callable[[int], Any]], rounds: int = 300, batches: int = 6) -> dict[str, float]:
    """Million tokens a second of this process's CPU time, each source's best round.

    The sources take turns, so that what else the machine does meets all of them; the best round met it least.
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


def rate_ahead(stream: Stream, batches: int = 512) -> float:
    """The same with the reading thread in front, its start included: all of the process's CPU time counts."""
    ahead = Prefetcher(stream, 1)
    began = time.process_time()
    for step in range(batches):
        ahead.batch(step)
    seconds = time.process_time() - began
    ahead.close()
    return batches * ROWS * LENGTH / seconds / 1e6


def windows(folder: Path) -> Callable[[int], Any]:
    """The bare comparison: random windows of one file, mapped, copied into a new array."""
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
    """Anonymous memory of this process, MiB."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.split("Anonymous:")[1].split()[0]) / 1024


# ---- The report


def in_process(folder: Path, index: Path) -> dict[str, float]:
    """`measure` in a new process."""
    command = [sys.executable, "-m", "benchmarks.data", "--measure", str(folder), str(index)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report(name: str, folder: Path, repeats: int) -> None:
    """One line of the table: medians; cold is the first process, without any index."""
    index = Path(tempfile.mkdtemp())
    cold = in_process(folder, index)
    runs = [in_process(folder, index) for _ in range(repeats)]
    shutil.rmtree(index)
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    stream, thread = (statistics.median(run[key] / run["window"] for run in runs) for key in ("stream", "thread"))
    most = max(run["private_mib"] for run in [*runs, cold])
    print(
        f"{name:<22} {middle['stream']:6.0f} {middle['thread']:6.0f} {middle['window']:7.0f}   "
        f"{stream:5.2f} {thread:6.2f}"
        f"   {cold['first_batch_s']:6.2f} {middle['first_batch_s']:6.3f} {middle['resume_s']:6.3f}"
        f"   {most:6.0f} {middle['state_bytes']:6.0f}",
        flush=True,
    )


def main() -> None:
    """Write the corpora, measure each store, and print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.data", description=__doc__)
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scale", action="store_true", help="100 million documents (2 GB of index)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stores", default="arrow,parquet,megatron,short")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    print(f"{'':<22}   M tokens/s            of memmap      first batch s  resume  private  state")
    print(f"{'':<22}  alone  ahead  memmap   alone  ahead     cold   warm       s      MiB  bytes")
    for store in ["scale"] if options.scale else options.stores.split(","):
        folder = Path(tempfile.mkdtemp())
        if store == "scale":
            write_scale(folder)
        else:
            write_corpus(folder, "arrow" if store == "short" else store, 40 if store == "short" else 400)
        report({"short": "arrow, mean 66"}.get(store, store), folder, options.repeats)
        shutil.rmtree(folder)


def write_scale(folder: Path) -> None:
    """100 million documents of 600 tokens on average, over a file of holes."""
    sizes = np.tile(lengths(0, 364), 10_000)
    write_idx(folder / "all.idx", sizes, token_type=4)
    with (folder / "all.bin").open("wb") as file:
        file.truncate(int(sizes.sum(dtype=np.int64)) * 4)


if __name__ == "__main__":
    main()
