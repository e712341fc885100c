"""Seconds per training step of whole programs: this one on both engines, and what people would use instead.

    python -m benchmarks.peers.train [--steps=24] [--turns=5] [--contenders="torch engine,compiled loop"]

All start from one Hugging Face folder of the `tiny` shape and train on the same batches of 16 x 256 tokens, in fp32 on
all cores, with AdamW and clipping; the losses of every step must agree within 1e-4. In every turn each program runs for
one step, which is the cold start to a first loss with empty caches of compiled programs, and for 1 + steps; the
difference is the time of the further steps with everything that the program does beside the model. Prints medians and
the ratio of each to the best peer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from transformers import LlamaConfig, LlamaForCausalLM

from main_training import configure
from pretraining.config.variants import model_shape
from pretraining.data import open_stream
from pretraining.monitor.metrics import read_metrics

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, VOCABULARY = 16, 256, 4096
OURS: dict[str, tuple[str, ...]] = {
    "torch engine": ("--engine=torch", "--device=cpu"),
    "xla engine": ("--engine=xla",),
}
PEERS = {"transformers' Trainer": "trainer", "loop": "loop", "compiled loop": "compiled"}
TOLERANCE = 1e-4  # largest difference of a loss from that of the first contender


class Spent(NamedTuple):
    """Seconds of one program, its start included."""

    cpu: float
    clock: float


def flags(work: Path, steps: int) -> dict[str, object]:
    """Return the settings of our runs."""
    return {
        "model_variant": "tiny",
        "vocab_size": VOCABULARY,
        "seq_length": LENGTH,
        "batch_size": ROWS,
        "global_batch_size": ROWS,
        "mixed_precision": False,
        "num_steps": steps,
        "lr_schedule": "constant",
        "learning_rate": 1e-3,
        "data_path": str(work / "data"),
        "index_dir": str(work / "index"),
        "shuffle": "none",
        "sep_token": -1,
        "ckpt_load_path": str(work / "weights"),
        "checkpoint_interval": 0,
        "report_interval": 1,
    }


def prepare(work: Path, steps: int) -> None:
    """Write weights, token shards, and the batches that our loader makes of them."""
    (work / "data").mkdir()
    ids = np.random.default_rng(0).zipf(1.2, (steps + 1) * ROWS * (LENGTH + 1)) % VOCABULARY
    table = pa.table({"tokens": pa.array([ids.astype(np.uint32)])})
    with pa.ipc.new_file(str(work / "data/tokens.arrow"), table.schema) as writer:
        writer.write_table(table)
    described = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **dimensions())
    LlamaForCausalLM(described).save_pretrained(work / "weights")
    stream = open_stream(configure(flags(work, steps)))
    batches = [stream.batch(step) for step in range(steps)]
    tokens, labels = (np.stack([batch[name] for batch in batches]) for name in ("tokens", "labels"))
    np.savez(work / "batches.npz", tokens=tokens, labels=labels)


def dimensions() -> dict[str, object]:
    """Return what Hugging Face's configuration says of the `tiny` shape."""
    config = configure({"model_variant": "tiny", "use_dummy_dataset": True})
    shape = model_shape(config)
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
    }


def run(name: str, work: Path, steps: int) -> tuple[Spent, list[float]]:
    """Run one contender; return what it took, and its losses."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        losses = Path(folder) / "losses.json"
        if name in OURS:
            settings = {**flags(work, steps), "log_dir": f"{folder}/run"}
            words = ["main_training.py", *(f"--{key}={value}" for key, value in settings.items()), *OURS[name]]
        else:
            files = [str(work / "weights"), str(work / "batches.npz"), str(steps), str(losses)]
            words = ["-m", "benchmarks.peers.hf_loop", PEERS[name], *files]
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}
        environment, command = {**os.environ, **variables}, [sys.executable, *words]
        before, began = children_seconds(), time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        spent = Spent(children_seconds() - before, time.monotonic() - began)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        if name in OURS:
            return spent, [line["loss"] for line in read_metrics(Path(folder) / "run/metrics.jsonl") if "loss" in line]
        return spent, json.loads(losses.read_text())


def children_seconds() -> float:
    """Return the CPU seconds of all programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(names: list[str], steps: int, turns: int, work: Path) -> None:
    """Run the contenders in turns, and print the table."""
    prepare(work, 1 + steps)
    starts: dict[str, list[Spent]] = {name: [] for name in names}
    further: dict[str, list[Spent]] = {name: [] for name in names}
    reference: list[float] = []
    for _ in range(turns):
        for name in names:
            start, _ = run(name, work, 1)
            whole, losses = run(name, work, 1 + steps)
            reference = reference or losses
            worst = float(np.abs(np.subtract(losses, reference)).max())
            if worst > TOLERANCE:
                sys.exit(f"{name}: a loss differs by {worst:.2g} from that of {names[0]}")
            starts[name].append(start)
            further[name].append(Spent(*((a - b) / steps for a, b in zip(whole, start, strict=True))))
            print(f"{name}: {start}, per step {further[name][-1]}, losses within {worst:.1g}", flush=True)
    peers = [name for name in names if name in PEERS] or names
    print("| program | step: CPU s | spread | clock s | CPU to best peer's | first loss and end: CPU s | clock s |")
    print("|---|---|---|---|---|---|---|")
    best = min(middle(further[name]).cpu for name in peers)
    for name in names:
        step, start = middle(further[name]), middle(starts[name])
        spread = [spent.cpu for spent in further[name]]
        print(
            f"| {name} | {step.cpu:.3f} | {min(spread):.3f} to {max(spread):.3f} | {step.clock:.3f} "
            f"| {step.cpu / best:.2f} | {start.cpu:.1f} | {start.clock:.1f} |"
        )


def middle(samples: list[Spent]) -> Spent:
    """Return the medians."""
    return Spent(*(statistics.median(sample[kind] for sample in samples) for kind in range(2)))


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--contenders", default=",".join([*OURS, *PEERS]))
    options = parser.parse_args()
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "torch_xla", "transformers", "accelerate")))
    with tempfile.TemporaryDirectory() as work:
        compare(options.contenders.split(","), options.steps, options.turns, Path(work))


if __name__ == "__main__":
    main()
