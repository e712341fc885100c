"""Whole runs of the script: stopped, killed, continued, moved to other devices, and given wrong data."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.corpora import write_flat
from tests.end_to_end.small import command, environment, figures, finish
from tests.processes import call
from tests.selection import needs_xla

pytestmark = [needs_xla, pytest.mark.slow]
STEPS = 24
DEVICES = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two datasets of Markov text and a held-out one, one document per record batch."""
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, documents in (("train/a", 120), ("train/b", 60), ("valid/held", 30)):
        lengths, firsts = rng.integers(0, 400, documents), rng.integers(0, 300, documents)
        texts = [(first + np.arange(length) * 7) % 300 + 2 for length, first in zip(lengths, firsts, strict=True)]
        write_flat(root / name / "0", texts)
    return root


def data(corpus: Path) -> dict[str, Any]:
    return {
        "batch_size": 4,
        "num_steps": STEPS,
        "checkpoint_interval": 12,
        "data_path": corpus / "train",
        "datasets": "a,b",
        "weights": "2,1",
        "valid_data_path": corpus / "valid",
        "val_interval": 12,
        "val_steps": 2,
        "val_sanity_steps": -1,
        "test_data_path": corpus / "valid",
        "test_steps": -1,
        "log_param_norm": True,
    }


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert f"complete: {STEPS} steps" in finish(folder, DEVICES, **data(corpus))
    return folder


def test_the_run_learns_and_validation_agrees(uninterrupted: Path) -> None:
    lines = figures(uninterrupted)
    assert lines[STEPS, "loss"]["loss"] < lines[1, "loss"]["loss"] - 1.0
    assert lines[STEPS, "val_loss"]["val_loss"] == pytest.approx(lines[STEPS, "loss"]["loss"], abs=0.5)
    assert lines[STEPS, "test_loss"]["test_loss"] == pytest.approx(lines[STEPS, "val_loss"]["val_loss"], abs=0.1)
    assert sorted(step for step, loss in lines if loss == "val_loss") == [0, 12, STEPS]


def test_after_sigterm_and_kill_9_the_same_command_gives_the_uninterrupted_run(
    uninterrupted: Path, corpus: Path, tmp_path: Path
) -> None:
    local = {"ckpt_local_path": tmp_path / "local", "ckpt_local_interval": 3}
    fields = {**data(corpus), **local, "checkpoint_interval": 8}
    checkpoints = tmp_path / "checkpoints"
    finish(tmp_path, DEVICES, code=143, script=("-m", "tests.stopping", "SIGTERM", "3", "0"), **fields)
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_4"]
    output = finish(
        tmp_path, DEVICES, code=-signal.SIGKILL, script=("-m", "tests.stopping", "SIGKILL", "20", "0"), **fields
    )
    assert f"continuing from {checkpoints}/step_4" in output
    output = finish(tmp_path, DEVICES, **fields)
    assert f"continuing from {tmp_path}/local/step_18" in output
    assert f"complete: {STEPS} steps" in output
    assert figures(tmp_path) == figures(uninterrupted)


def test_a_run_continues_on_other_devices_at_the_same_token(uninterrupted: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "checkpoints" / "step_12", tmp_path / "checkpoints" / "step_12")
    shutil.copy(uninterrupted / "metrics.jsonl", tmp_path)
    mesh = {"sharding_strategy": "hsdp", "sharding_group_size": 4, "batch_size": 2}
    finish(tmp_path, 2 * DEVICES, **{**data(corpus), **mesh})
    expected, actual = figures(uninterrupted), figures(tmp_path)
    assert expected.keys() == actual.keys()
    for step in range(13, STEPS + 1):
        there, here = expected[step, "loss"], actual[step, "loss"]
        assert (here["data_hash"], here["tokens_seen"]) == (there["data_hash"], there["tokens_seen"])
        # 4 and 8 devices sum in another order, and twelve steps at a high rate enlarge the difference
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-3)


def refuse(folder: Path, **fields: Any) -> str:
    """Run a command that must exit with code 2; return what it printed."""
    return call(command(folder, **fields), code=2, env=environment(DEVICES)).stderr


def test_mistakes_end_the_run_with_code_2_before_a_device_computes(corpus: Path, tmp_path: Path) -> None:
    message = refuse(tmp_path)  # without data
    assert "--data_path" in message and "--use_dummy_dataset" in message and "scripts/train.sh" in message
    assert not list(tmp_path.iterdir())
    assert "100" in refuse(tmp_path, vocab_size=100, **data(corpus))  # the corpus has larger token ids
    large = {"num_layers": 80, "hidden_size": 8192, "intermediate_size": 28672}
    assert "GiB" in refuse(tmp_path, use_dummy_dataset=True, low_cpu_fsdp=True, **large)


@pytest.mark.exhaustive
def test_a_dummy_run_neither_saves_nor_resumes_and_ends_with_a_summary(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"use_dummy_dataset": True, "checkpoint_interval": None, "num_steps": 3}
    output = finish(tmp_path, devices=2, use_profiler=True, profile_start_step=2, profile_num_steps=1, **fields)
    assert "Benchmark summary" in output and "compile time" in output
    assert not (tmp_path / "checkpoints").exists()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert "step 1/3" in finish(tmp_path, engine="torch", **fields)  # starts at the first step again
