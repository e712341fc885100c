"""A run through another trainer's file is the run with the equivalent flags, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.small import ROOT, environment, reports
from tests.tools.importing.files import SETTINGS, tree, write
from tests.warm import python

pytestmark = pytest.mark.slow

# What the three files say, as somebody would write it here. One CPU process: 2 micro-batches a step.
FLAGS = {**SETTINGS, "model_variant": "custom", "batch_size": 16}
CURVES = {
    "nemo": {"lr_schedule": "cosine", "lr_warmup_steps": 3},
    "nxdt": {"lr_schedule": "cosine", "lr_warmup_steps": 3},
    "neox": {"lr_schedule": "neox_cosine", "lr_warmup_steps": 3},
}
ONE_DEVICE = {"trainer.devices": 1, "trainer.num_nodes": 1}
BATCHES: dict[str, dict[str, Any]] = {
    "nemo": {**ONE_DEVICE, "model.micro_batch_size": 16},
    "nxdt": {**ONE_DEVICE, "data.micro_batch_size": 16},
    "neox": {"num_gpus": 1, "num_nodes": 1, "train_micro_batch_size_per_gpu": 16},
}
COMMON = ("--engine=torch", "--device=cpu", "--checkpoint_interval=0", "--log_grad_norm=True")
SAME = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")
# All runs of a test in one process: starting Python and importing torch takes longer than one of these trainings.
DRIVER = """
import json, sys
from main_training import CHECKS, CONFIGURATION, main
from pretraining.config.flags import run
sys.exit(max(run(main, words, CHECKS, CONFIGURATION) for words in json.loads(sys.argv[1])))
"""


def train(folder: Path, runs: dict[str, list[str]]) -> dict[str, list[dict[str, float]]]:
    """Train with each list of flags; return what each step of each run reports."""
    commands = [[*words, *COMMON, f"--log_dir={folder / name}"] for name, words in runs.items()]
    one_thread = {**environment(), "OMP_NUM_THREADS": "1"}  # two threads take four times the CPU time of a busy machine
    subprocess.run([*python(), "-c", DRIVER, json.dumps(commands)], cwd=ROOT, env=one_thread, check=True)
    lines = {name: reports(folder / name).values() for name in runs}
    return {name: [{figure: line[figure] for figure in SAME} for line in lines[name]] for name in runs}


def changed_file(folder: Path, kind: str, changes: dict[str, Any]) -> str:
    return write(folder, tree(kind, changes), f"{kind}.yaml")


def as_words(flags: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def test_each_format_trains_as_the_equivalent_flags_do(tmp_path: Path) -> None:
    data = ["--use_dummy_dataset", "--vocab_size=100"]
    runs = {kind: [f"--import_config={changed_file(tmp_path, kind, BATCHES[kind])}", *data] for kind in CURVES}
    runs |= {f"flags_{kind}": [*as_words({**FLAGS, **CURVES[kind]}), *data] for kind in ("nemo", "neox")}
    steps = train(tmp_path, runs)
    assert steps["nemo"] == steps["nxdt"] == steps["flags_nemo"]
    assert steps["neox"] == steps["flags_neox"]
    for reported in steps.values():
        assert len(reported) == FLAGS["num_steps"]
        assert reported[-1]["loss"] < reported[0]["loss"]


# scripts/train.sh's batch and rate and half of its model, as a file of each format says them
SHAPES: dict[str, dict[str, Any]] = {
    "nemo": {
        "trainer.max_steps": 8,
        "trainer.devices": 1,
        "trainer.num_nodes": 1,
        "trainer.gradient_clip_val": 1.0,
        "model.micro_batch_size": 8,
        "model.global_batch_size": 16,
        "model.encoder_seq_length": 128,
        "model.max_position_embeddings": 512,
        "model.num_layers": 2,
        "model.hidden_size": 192,
        "model.ffn_hidden_size": 512,
        "model.num_attention_heads": 6,
        "model.num_query_groups": 3,
        "model.layernorm_epsilon": 1e-5,
        "model.init_method_std": 0.07,
        "model.optim.weight_decay": 0.1,
        "model.optim.betas": [0.9, 0.95],
        "model.optim.sched.warmup_steps": 2,
    },
    "neox": {
        "train_iters": 8,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 8,
        "num_nodes": 1,
        "num_gpus": 1,
        "split": "8,1,1",
        "seq_length": 128,
        "max_position_embeddings": 512,
        "num_layers": 2,
        "hidden_size": 192,
        "intermediate_size": 1536,
        "num_attention_heads": 6,
        "num_kv_heads": 3,
        "rms_norm_epsilon": 1e-5,
        "init_method_std": 0.07,
        "weight_decay": 0.1,
        "eval_iters": 1,
        "optimizer.params.betas": [0.9, 0.95],
    },
}
OTHER_KEYS = {f"model.{name}_batch_size": f"data.{name}_batch_size" for name in ("micro", "global")}
OTHER_KEYS["model.num_query_groups"] = "model.num_kv_heads"
SHAPES["nxdt"] = {OTHER_KEYS.get(key, key): value for key, value in SHAPES["nemo"].items()}
QUICKSTART = {
    "model_variant": "tiny",
    "num_layers": 2,
    "seq_length": 128,
    "global_batch_size": 16,
    "batch_size": 8,
    "num_steps": 8,
    "learning_rate": 3e-3,
    "init_std": 0.07,
    "mixed_precision": False,
    "seed": 7,
    "report_interval": 1,
    "lr_warmup_steps": 2,
    "min_lr": 3e-4,
    "num_workers": 2,
}


@pytest.mark.exhaustive
def test_text_trains_through_a_file_as_it_does_with_flags(tmp_path: Path) -> None:
    prepare = [sys.executable, "-m", "pretraining.tools.prepare", "--input=pretraining", "--endings=.py"]
    subprocess.run([*prepare, f"--output={tmp_path / 'data'}", "--vocab_size=1024"], cwd=ROOT, check=True)
    data = [f"--data_path={tmp_path / 'data' / 'train'}", "--vocab_size=1024", f"--index_dir={tmp_path / 'index'}"]
    parts = ["--split=8,1,1", "--val_interval=1000", "--val_steps=1", "--test_steps=1"]
    runs = {
        "flags_nemo": [*as_words(QUICKSTART), "--lr_schedule=cosine", *data],
        "flags_neox": [*as_words(QUICKSTART), "--lr_schedule=neox_cosine", *parts, *data],
    }
    runs |= {kind: [f"--import_config={changed_file(tmp_path, kind, SHAPES[kind])}", *data] for kind in SHAPES}
    steps = train(tmp_path, runs)
    assert steps["nemo"] == steps["nxdt"] == steps["flags_nemo"]
    assert steps["neox"] == steps["flags_neox"]
    for reported in steps.values():
        assert len(reported) == 8
        assert reported[-1]["loss"] < reported[0]["loss"] - 0.5
