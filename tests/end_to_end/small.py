"""A small training run of the real script on virtual CPU devices."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import main_training
from pretraining.monitor.metrics import read_metrics
from tests.processes import start, words
from tests.waiting import PATIENCE
from tests.warm import python

ROOT = Path(__file__).parents[2]
MODEL: dict[str, Any] = {
    "model_variant": "custom",
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 64,
    "seq_length": 32,
}
# A run of the torch engine on one process, of two sequences a step
ONE_PROCESS: dict[str, Any] = {**MODEL, "engine": "torch", "device": "cpu", "mixed_precision": False}
ONE_PROCESS |= {"global_batch_size": 2, "batch_size": 1}
FLAGS = {
    **MODEL,
    "vocab_size": 320,
    "global_batch_size": 16,
    "batch_size": 2,
    "num_steps": 40,
    "learning_rate": 1e-2,
    "mixed_precision": False,
    "sharding_strategy": "fsdp",
    "report_interval": 1,
    "checkpoint_interval": 5,
}
DETERMINISTIC = "loss loss_spike grad_norm param_norm learning_rate tokens_seen consumed data_hash val_loss test_loss"


def command(folder: Path, script: Sequence[str] = ("main_training.py",), **fields: Any) -> list[str]:
    """Return the command line of a run that writes to `folder`; a flag whose value is None is omitted."""
    return [*python(), *script, *words({**FLAGS, "log_dir": folder, **fields})]


def environment(devices: int = 8) -> dict[str, str]:
    """Return the environment of a run on virtual CPU devices."""
    return {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}


def finish(folder: Path, devices: int = 8, code: int = 0, **fields: Any) -> str:
    """Run to the end, and return what it printed."""
    process = start(command(folder, **fields), env=environment(devices))
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, output
    return output


def train(folder: Path, **fields: Any) -> None:
    """Train on the torch engine in this process; with dummy data unless fields name others."""
    flags = {**FLAGS, "engine": "torch", "device": "cpu", "use_torch_compile": False, "log_dir": folder, **fields}
    flags |= {} if "data_path" in fields else {"use_dummy_dataset": True}
    assert main_training.main(**{name: str(value) for name, value in flags.items()}) == 0


def continue_from(run: Path, step: int, folder: Path) -> Path:
    """Let the next run in `folder` continue from a checkpoint of another run; return the folder."""
    shutil.copytree(run / "checkpoints" / f"step_{step}", folder / "checkpoints" / f"step_{step}")
    return folder


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what a run has reported of its training, by step."""
    return {line["step"]: line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line}


def figures(folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the deterministic figures of every line of metrics.jsonl by step and kind of loss."""
    losses = ("loss", "val_loss", "test_loss")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if any(name in line for name in losses)]  # others are accounts of time
    keys = [(line["step"], next(name for name in losses if name in line)) for line in lines]
    assert len(set(keys)) == len(keys), "a step was written twice"
    return {
        key: {name: line[name] for name in DETERMINISTIC.split() if name in line}
        for key, line in zip(keys, lines, strict=True)
    }
