"""A run through another trainer's file is the run with the equivalent flags, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.importing.files import tree, write
from tests.end_to_end.small import ROOT, environment

pytestmark = pytest.mark.slow

# What the three files say, as somebody would write it here. One CPU process: accumulation is derived, 16 passes a step.
FLAGS = {
    "model_variant": "custom",
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "max_position_embeddings": 32,
    "norm_eps": 1e-6,
    "init_std": 0.03,
    "mixed_precision": False,
    "seq_length": 32,
    "batch_size": 2,
    "global_batch_size": 32,
    "num_steps": 12,
    "learning_rate": 3e-3,
    "min_lr": 3e-4,
    "adam_beta2": 0.98,
    "weight_decay": 0.05,
    "grad_clip_thresh": 0.5,
    "seed": 7,
    "num_workers": 2,
    "report_interval": 1,
}
CURVES = {
    "nemo": {"lr_schedule": "cosine", "lr_warmup_steps": 3},
    "nxdt": {"lr_schedule": "cosine", "lr_warmup_steps": 3},
    "neox": {"lr_schedule": "neox_cosine", "lr_warmup_steps": 3},
}
HERE = ("--engine=torch", "--device=cpu", "--use_dummy_dataset", "--vocab_size=100", "--checkpoint_interval=0")
SAME = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")


def losses(folder: Path, *words: str) -> list[dict[str, float]]:
    """What each step of a run reports."""
    command = [sys.executable, "main_training.py", *words, *HERE, f"--log_dir={folder}"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in SAME} for line in lines]


def test_each_format_trains_as_the_equivalent_flags_do(tmp_path: Path) -> None:
    with_flags: dict[str, list[dict[str, float]]] = {}
    for kind, curve in CURVES.items():
        with_file = losses(tmp_path / kind, f"--import_config={write(tmp_path, tree(kind))}")
        schedule = str(curve["lr_schedule"])
        if schedule not in with_flags:
            words = [f"--{name}={value}" for name, value in {**FLAGS, **curve}.items()]
            with_flags[schedule] = losses(tmp_path / schedule, *words)
        assert len(with_file) == FLAGS["num_steps"]
        assert with_file == with_flags[schedule]
        assert with_file[-1]["loss"] < with_file[0]["loss"]
