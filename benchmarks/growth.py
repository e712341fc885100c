"""Measure how time and memory grow with the size of a run: `python -m benchmarks.growth [SUBJECT ...]`.

    documents  start and resume of a stream, 10^5 to 10^8 documents of one Megatron store (a sparse file)
    shards     the same, 1 to 10^4 Arrow files of eight documents
    metrics    a start that continues a run, and the page of curves, 10^3 to 10^6 lines of metrics.jsonl
    chunks     the manifest of a checkpoint of a 70B model that 1 to 512 ranks saved, a chunk of each tensor per rank
    checkpoint a save and a cold load of 10^8 to 10^9 parameters with two moments in fp32, 12 bytes each
    layers     step, first step and memory, 4 to 64 blocks of the tiny model, on both engines
    ranks      the same with the same global batch, 1 to 8 gloo processes on this host

Each size is measured in processes of its own. The growth between two rows is the exponent e of time = size^e: 1 is
linear, and above 1.1 something grows faster than its input.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoint import FACTS, evict, expanded, peak_memory, reset_peak
from benchmarks.data import private_mib, settings, write_arrow, write_sparse
from benchmarks.peers.turns import Figures, print_facts, run_program, versions
from pretraining.checkpoint.files import BLOCK
from pretraining.checkpoint.manifest import Chunk, Entry, Facts, Manifest, ShardFile, open_checkpoint, write_commit
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import PendingSave, load
from pretraining.data import open_stream
from pretraining.extensions.spikes.detection import WINDOW
from pretraining.extensions.spikes.watch import recent_losses
from pretraining.monitor.metrics import check_metrics, missing_history, open_metrics
from pretraining.tools.report import main as report

ACCOUNT = {"train": 1.5, "data_wait": 1e-5, "time": 1.75e9}
RECORD = {"loss": 3.25, "loss_spike": False, "grad_norm": 1.5, "learning_rate": 1e-3, "tokens_seen": 1 << 30}
SPEED = {"step_time": 1.5, "tokens_per_second": 1e5, "memory_bytes": 1 << 30}
FLAGS = ["--use_dummy_dataset=True", "--model_variant=tiny", "--mixed_precision=False", "--seq_length=128"]
FLAGS += ["--global_batch_size=8", "--batch_size=1", "--num_steps=6", "--report_interval=1"]


def measure_documents(count: int, folder: Path) -> Figures:
    """Return what a stream of `count` documents of 40 tokens takes."""
    write_sparse(folder, np.full(count, 40, np.int32))
    return _measure_stream(folder)


def measure_shards(count: int, folder: Path) -> Figures:
    """Return what a stream of `count` files takes."""
    sizes = np.full(8, 1200, np.int32)
    tokens = np.random.default_rng(0).integers(2, 32_000, int(sizes.sum()), np.int32)
    for number in range(count):
        write_arrow(folder / f"{number:05d}", tokens, sizes)
    return _measure_stream(folder)


def _measure_stream(folder: Path) -> Figures:
    """Return seconds until the first batch, without and with an index, and of a resume; and the memory."""
    with tempfile.TemporaryDirectory() as index:
        config, before = settings(folder, Path(index)), private_mib()
        first = _seconds(lambda: open_stream(config).batch(0))
        again = _seconds(lambda: open_stream(config).batch(0))
        state = json.loads(json.dumps(open_stream(config).state(1000)))
        resume = _seconds(lambda: open_stream(config, state=state).batch(0))
    return {"first start, s": first, "start, s": again, "resume, s": resume, "private MiB": private_mib() - before}


def measure_metrics(count: int, folder: Path) -> Figures:
    """Return what a start that continues after `count` reports takes, and their page."""
    lines = (json.dumps({"step": step, **RECORD, **SPEED, "account": ACCOUNT}) + "\n" for step in range(1, count + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    start = _seconds(lambda: check_metrics(folder / "metrics.jsonl"))
    start += _seconds(lambda: missing_history(folder / "metrics.jsonl", count, 1))
    start += _seconds(lambda: open_metrics(folder, count, time.time()))
    start += _seconds(lambda: recent_losses(folder / "metrics.jsonl", WINDOW))
    return {
        "start, s": start,
        "page, s": _seconds(lambda: report([str(folder)])),
        "page, MB": (folder / "report.html").stat().st_size / 1e6,
    }


def measure_chunks(ranks: int, folder: Path) -> Figures:
    """Return what writing and reading the description of 723 weights and their moments takes."""
    rows = 8192 // ranks
    size = rows * 8192 * 4
    digests = ("0" * 24,) * math.ceil(size / BLOCK)
    files = {f"weights-{rank:05d}.safetensors": ShardFile(1 << 40, "0" * 32, 1 << 16) for rank in range(ranks)}
    names = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(3 * 723)]
    chunks = (Chunk((rank * rows, 0), (rows, 8192), file, 0, size, digests) for rank, file in enumerate(files))
    entries = ((name, Entry("F32", (8192, 8192), (chunk,))) for chunk in chunks for name in names)
    facts = Facts(1, 0, None, {}, "torch", {})
    write = _seconds(lambda: write_commit(folder, Manifest.merge(entries, files), facts))
    for name in files:
        (folder / name).touch()
    return {
        "write, s": write,
        "read, s": _seconds(lambda: open_checkpoint(folder)),
        "manifest, MB": (folder / "manifest.json").stat().st_size / 1e6,
    }


def measure_checkpoint(parameters: int, folder: Path) -> Figures:
    """Return what a save and a load of a state take, one tensor in host memory at a time."""
    state, before = expanded(parameters), reset_peak()
    pending = PendingSave(folder, state, FACTS, Peers(together=False))
    save, added = _seconds(pending.write), peak_memory() - before
    evict(folder)
    checkpoint = open_checkpoint(folder / "step_1")
    reads = (_seconds(partial(load, checkpoint, {name: torch.empty(state[name].shape)})) for name in state)
    return {"GB": sum(tensor.numel() * 4 for tensor in state.values()) / 1e9, "save, s": save, "load, s": sum(reads),
            "save, MiB": added / 2**20}  # fmt: skip


def measure_layers(count: int, folder: Path, engine: str = "xla") -> Figures:
    """Return the figures of a model of `count` blocks."""
    return _measure_run([sys.executable, "main_training.py", f"--num_layers={count}"], folder, engine)


def measure_ranks(count: int, folder: Path) -> Figures:
    """Return the figures of `count` processes."""
    script = ["bash", "scripts/train.sh", "--optimizer=adamw", "--fsdp_activation_checkpointing=False"]
    return _measure_run(script, folder, "torch", NPROC=str(count))


def _measure_run(command: list[str], folder: Path, engine: str, **variables: str) -> Figures:
    """Return what the summary of a benchmark says of a run, and its CPU seconds."""
    places = [f"--log_dir={folder}", f"--engine={engine}"]
    spent, output = run_program([*command, *FLAGS, *places], PJRT_DEVICE="CPU", **variables)
    (first,) = re.findall(r"\(first step ([\d.]+) s\)", output)
    (step,) = re.findall(r"step time +([\d.]+) s", output)
    (memory, unit) = re.findall(r"peak memory +([\d.]+) (MiB|GiB)", output)[0]
    mebibytes = float(memory) * (1024 if unit == "GiB" else 1)
    return {"step, s": float(step), "first step, s": float(first), "MiB": mebibytes, "program, CPU s": spent.cpu}


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


MEASURES: dict[str, tuple[Callable[[int, Path], Figures], tuple[int, ...]]] = {
    "documents": (measure_documents, (10**5, 10**6, 10**7, 10**8)),
    "shards": (measure_shards, (1, 10, 100, 1000, 10_000)),
    "metrics": (measure_metrics, (10**3, 10**4, 10**5, 10**6)),
    "chunks": (measure_chunks, (1, 8, 64, 512)),
    "checkpoint": (measure_checkpoint, (10**8, 3 * 10**8, 10**9)),
    "layers": (measure_layers, (4, 16, 64)),
    "layers, torch": (lambda count, folder: measure_layers(count, folder, "torch"), (4, 16, 64)),
    "ranks": (measure_ranks, (1, 2, 4, 8)),
}


def measure_in_new_process(subject: str, size: int) -> Figures:
    """Return the figures of one size."""
    _, output = run_program([sys.executable, "-m", "benchmarks.growth", "--measure", subject, str(size)])
    figures: Figures = json.loads(output.splitlines()[-1])
    return figures


def print_growth(subject: str, sizes: tuple[int, ...]) -> None:
    """Print a row for each size, and in parentheses the growth since the size before it."""
    before, last = Figures(), 0
    for size in sizes:
        figures = measure_in_new_process(subject, size)
        if not before:
            print(f"\n| {subject} | {' | '.join(figures)} |\n|{'---|' * (1 + len(figures))}")
        cells = [f"{value:.3g}{_growth(before.get(name), value, last, size)}" for name, value in figures.items()]
        print(f"| {size:,} | {' | '.join(cells)} |", flush=True)
        before, last = figures, size


def _growth(before: float | None, value: float, last: int, size: int) -> str:
    if not before or value <= 0 or before < 0:
        return ""
    return f" ({math.log(value / before) / math.log(size / last):.2f})"


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1:2] == ["--measure"]:
        subject, size = sys.argv[2:]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(MEASURES[subject][0](int(size), Path(folder))))
        return
    print_facts(versions(("torch", "torch-xla", "numpy", "pyarrow", "plotly")))
    for subject, (_, sizes) in MEASURES.items():
        if len(sys.argv) == 1 or subject in sys.argv[1:]:
            print_growth(subject, sizes)


if __name__ == "__main__":
    main()
