"""A run through another trainer's file is the run with the equivalent flags, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.small import environment, reports
from tests.processes import call, words
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
    "neox": {"num_gpus": 1, "num_nodes": 1, "train_micro_batch_size_per_gpu": 16, "split": "8,1,1", "eval_iters": 1},
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
    # Two threads take four times the CPU time of a busy machine.
    call([*python(), "-c", DRIVER, json.dumps(commands)], env={**environment(), "OMP_NUM_THREADS": "1"})
    lines = {name: reports(folder / name).values() for name in runs}
    return {name: [{figure: line[figure] for figure in SAME} for line in lines[name]] for name in runs}


def changed_file(folder: Path, kind: str, changes: dict[str, Any]) -> str:
    return write(folder, tree(kind, changes), f"{kind}.yaml")


def text(folder: Path) -> list[str]:
    """Prepare the sources of this package, and return the flags that train on them."""
    prepare = [sys.executable, "-m", "pretraining.tools.prepare", "--input=pretraining", "--endings=.py"]
    call([*prepare, f"--output={folder / 'data'}", "--vocab_size=1024"])
    return [f"--data_path={folder / 'data' / 'train'}", "--vocab_size=1024", f"--index_dir={folder / 'index'}"]


@pytest.mark.parametrize("is_text", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_each_format_trains_as_the_equivalent_flags_do(tmp_path: Path, is_text: bool) -> None:
    data = text(tmp_path) if is_text else ["--use_dummy_dataset", "--vocab_size=100"]
    runs = {kind: [f"--import_config={changed_file(tmp_path, kind, BATCHES[kind])}", *data] for kind in CURVES}
    runs |= {f"flags_{kind}": [*words({**FLAGS, **CURVES[kind]}), *data] for kind in ("nemo", "neox")}
    if is_text:
        runs["flags_neox"] += ["--split=8,1,1", "--val_interval=1000", "--val_steps=1", "--test_steps=1"]
    steps = train(tmp_path, runs)
    assert steps["nemo"] == steps["nxdt"] == steps["flags_nemo"]
    assert steps["neox"] == steps["flags_neox"]
    for reported in steps.values():
        assert len(reported) == FLAGS["num_steps"]
        assert reported[-1]["loss"] < reported[0]["loss"]
