"""Whole runs of the script: killed, stopped, continued, moved to other devices, and given wrong data."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.end_to_end.small import ROOT, command, environment, figures, finish, start

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of Markov text and a held-out one, one document per record batch."""
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, documents in (("train/a", 120), ("train/b", 60), ("valid/held", 30)):
        (root / name).mkdir(parents=True)
        schema = pa.schema([("tokens", pa.uint32())])
        with pa.ipc.new_file(str(root / name / "0.arrow"), schema) as writer:
            for _ in range(documents):
                length = int(rng.integers(0, 400))
                tokens = (rng.integers(0, 300) + np.arange(length) * 7) % 300 + 2
                writer.write(pa.record_batch([pa.array(tokens.astype(np.uint32))], schema=schema))
    return root


def data(corpus: Path) -> dict[str, Any]:
    return {
        "data_path": corpus / "train",
        "datasets": "a,b",
        "weights": "2,1",
        "valid_data_path": corpus / "valid",
        "val_interval": 20,
        "val_steps": 2,
        "val_sanity_steps": -1,
        "test_data_path": corpus / "valid",
        "test_steps": -1,
        "log_param_norm": True,
    }


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    said = finish(folder, **data(corpus))
    assert "complete: 40 steps" in said
    return folder


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_run_learns_and_validation_agrees(whole: Path) -> None:
    lines = figures(whole)
    assert lines[40, "loss"]["loss"] < lines[1, "loss"]["loss"] - 1.0
    assert lines[40, "val_loss"]["val_loss"] == pytest.approx(lines[40, "loss"]["loss"], abs=0.5)
    assert lines[40, "test_loss"]["test_loss"] == pytest.approx(lines[40, "val_loss"]["val_loss"], abs=0.1)
    assert sorted(step for step, loss in lines if loss == "val_loss") == [0, 20, 40]


def test_after_kill_9_the_same_command_gives_the_uninterrupted_run(whole: Path, corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path, **data(corpus))
    wait_for((tmp_path / "checkpoints" / "step_5").exists, process)
    time.sleep(random.uniform(0, 0.5))  # the instant must not matter
    process.send_signal(signal.SIGKILL)
    process.communicate()
    said = finish(tmp_path, **data(corpus))
    assert "continuing from" in said
    assert figures(tmp_path) == figures(whole)


def test_sigterm_saves_and_leaves_with_143(whole: Path, corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path, checkpoint_interval=1000, **data(corpus))
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("grad_norm") >= 3, process)
    process.terminate()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 143, said
    assert list((tmp_path / "checkpoints").glob("step_*")), said
    finish(tmp_path, checkpoint_interval=1000, **data(corpus))
    assert figures(tmp_path) == figures(whole)


def test_a_run_goes_on_with_other_devices_at_the_same_token(whole: Path, corpus: Path, tmp_path: Path) -> None:
    fields = {**data(corpus), "val_interval": 0, "val_sanity_steps": 0, "test_steps": 0}
    finish(tmp_path, checkpoint_interval=20, **fields)
    shutil.rmtree(tmp_path / "checkpoints" / "step_40")
    finish(tmp_path, devices=4, sharding_strategy="hsdp", sharding_group_size=2, **fields)
    expected, got = figures(whole), figures(tmp_path)
    for step in range(1, 21):  # 8 devices still: validations in between change nothing of the training
        assert got[step, "loss"] == expected[step, "loss"]
    for step in range(21, 41):
        assert got[step, "loss"]["data_hash"] == expected[step, "loss"]["data_hash"]
        assert got[step, "loss"]["tokens_seen"] == expected[step, "loss"]["tokens_seen"]
        # 8 and 4 devices sum in another order, and twenty steps at a high rate enlarge the difference
        assert got[step, "loss"]["loss"] == pytest.approx(expected[step, "loss"]["loss"], abs=1e-3)


def test_the_same_command_again_says_that_the_run_is_complete(whole: Path, corpus: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    assert "complete: 40 steps" in finish(whole, **data(corpus))
    assert (whole / "metrics.jsonl").read_text() == before


def test_a_checkpoint_generates_text_in_plain_torch_without_a_mesh(whole: Path) -> None:
    from pretraining.checkpoint.store import read_tensors

    tensors = read_tensors(whole / "checkpoints" / "step_40")
    assert tensors["model.layers.2.mlp.down_proj.weight"].shape == (32, 64)


def test_a_token_beyond_the_vocabulary_stops_before_a_device_computes(corpus: Path, tmp_path: Path) -> None:
    said = finish(tmp_path, code=2, vocab_size=100, **data(corpus))
    assert "100" in said and "Traceback" not in said


def test_without_data_the_choices_are_named_and_torch_is_not_loaded(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        command(tmp_path), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "--data_path" in done.stderr and "--use_dummy_dataset" in done.stderr and "scripts/train.sh" in done.stderr
    assert time.monotonic() - began < 5
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_fit_this_host_is_refused_with_figures(tmp_path: Path) -> None:
    command_line = [sys.executable, "main_training.py", "--use_dummy_dataset=True", "--model_variant=llama2_70b"]
    done = subprocess.run(
        [*command_line, "--low_cpu_fsdp=True", f"--log_dir={tmp_path}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "GiB" in done.stderr and "llama2_70b" in done.stderr and "Traceback" not in done.stderr


def test_a_dummy_run_neither_saves_nor_resumes_and_ends_with_a_summary(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "use_dummy_dataset": True,
        "checkpoint_interval": None,
        "num_steps": 3,
    }
    said = finish(tmp_path, devices=2, use_profiler=True, profile_start_step=2, profile_num_steps=1, **fields)
    assert "Benchmark summary" in said and "compile time" in said
    assert not (tmp_path / "checkpoints").exists()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert "step 1/3" in finish(tmp_path, devices=2, **fields)  # from the beginning again
