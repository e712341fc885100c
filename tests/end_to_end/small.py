"""A small training run through the real script, on virtual devices of the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLAGS = {
    "model_variant": "custom",
    "num_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 320,
    "seq_length": 32,
    "global_batch_size": 16,
    "batch_size": 2,
    "num_steps": 40,
    "learning_rate": 1e-2,
    "mixed_precision": False,
    "sharding_strategy": "fsdp",
    "fsdp_activation_checkpointing": True,
    "selective_checkpointing": "1/2",
    "report_interval": 1,
    "checkpoint_interval": 5,
}
SAME = (
    *("loss", "loss_spike", "grad_norm", "param_norm", "learning_rate", "tokens_seen", "consumed", "data_hash"),
    *("val_loss", "test_loss"),
)  # digit for digit


def command(folder: Path, **fields: Any) -> list[str]:
    """The command line of a run that writes to `folder`; None leaves a flag out."""
    flags = {**FLAGS, "log_dir": folder, **fields}
    given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return [sys.executable, "main_training.py", *given]


def environment(devices: int = 8) -> dict[str, str]:
    """That many virtual CPU devices."""
    return {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}


def start(folder: Path, devices: int = 8, **fields: Any) -> subprocess.Popen[str]:
    """Begin a run."""
    return subprocess.Popen(
        command(folder, **fields),
        cwd=ROOT,
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(folder: Path, devices: int = 8, code: int = 0, **fields: Any) -> str:
    """A whole run; what it printed."""
    process = start(folder, devices, **fields)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == code, said
    return said


def figures(folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """What must be the same of every line: by step, and which loss it reports."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = ("loss", "val_loss", "test_loss")
    keys = [(line["step"], next(name for name in losses if name in line)) for line in lines]
    assert len(set(keys)) == len(keys), "a step was written twice"
    return {key: {name: line[name] for name in SAME if name in line} for key, line in zip(keys, lines, strict=True)}
