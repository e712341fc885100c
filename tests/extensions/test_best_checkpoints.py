"""The best checkpoints by a validation loss are kept, next to the newest, whatever happens between."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from main_training import CONFIGURATION
from main_training import EXTENSIONS as ALL
from pretraining.checkpoint.folder import find_checkpoints, step_of
from pretraining.config.errors import ConfigError
from pretraining.extensions.best_checkpoints.ranking import best_steps, validation_values
from pretraining.extensions.best_checkpoints.watch import BestCheckpoint
from pretraining.monitor.metrics import read_metrics
from pretraining.run.configure import configure
from pretraining.storage import location
from tests.checkpoint.small_run import small_config, train
from tests.checkpoint.test_checkpoints import steps
from tests.data.corpora import corpus, numbered
from tests.end_to_end.small import finish
from tests.object_storage import FaultProxy
from tests.selection import needs_xla

VALIDATED: dict[str, Any] = {"keep_last_n_checkpoints": 1, "val_interval": 2, "val_steps": 1}
LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}


def run(folder: Path, values: Mapping[int, float | None], **fields: Any) -> list[int]:
    """Train with a validation of these losses before the save of each step; the steps whose checkpoints are left."""
    folder.mkdir(exist_ok=True)

    def report(step: int, loss: float) -> None:
        lines: list[dict[str, float | None]] = [{"step": step, "loss": loss}]
        lines += [{"step": step, "val_loss": values[step]}] if step in values else []
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    train(small_config(folder, **VALIDATED, **fields), report)
    where = fields.get("ckpt_save_path", "")
    return sorted(map(step_of, find_checkpoints(location(where)).committed)) if where else steps(folder)


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        (LOSSES, {"keep_best": 0}, [8]),
        (LOSSES, {"keep_best": 1}, [4, 8]),
        (LOSSES, {"keep_best": 2}, [4, 6, 8]),
        (LOSSES, {"keep_best": 2, "async_checkpointing": True}, [4, 6, 8]),
        ({2: 1.0, 4: 2.0, 6: 3.0, 8: 0.5}, {"keep_best": 1}, [8]),
        ({2: 2.0, 4: 1.0, 6: 1.0, 8: 3.0}, {"keep_best": 1}, [6, 8]),  # of equal ones the newer
        ({2: None, 4: None, 6: 9.0, 8: None}, {"keep_best": 1}, [6, 8]),  # null is a value that is not finite
        ({2: 2.0, 6: 1.0, 8: 3.0}, {"keep_best": 1}, [4, 6, 8]),  # step 4 is not validated yet
        ({2: 2.0, 4: 1.0, 6: 0.5, 8: 3.0}, {"keep_best": 2, "checkpoint_interval": 1}, [4, 6, 8]),
        ({3: 0.1, **LOSSES}, {"keep_best": 1, "checkpoint_interval": 3}, [3, 8]),  # of another val_interval once
    ],
)
def test_a_run_leaves_the_best_and_the_newest(
    tmp_path: Path, values: Mapping[int, float | None], fields: dict[str, Any], expected: list[int]
) -> None:
    assert run(tmp_path, values, **fields) == expected


def test_a_run_that_continues_remembers_the_values(tmp_path: Path) -> None:
    assert run(tmp_path, {2: 1.0, 4: 2.0}, num_steps=4, keep_best=1) == [2, 4]
    assert run(tmp_path, {6: 3.0, 8: 4.0}, keep_best=1) == [2, 8]
    (tmp_path / "metrics.jsonl").unlink()
    assert run(tmp_path, {10: 5.0}, num_steps=10, keep_best=1) == [2, 8, 10]  # what is not known is not removed


def test_a_file_that_cannot_be_read_removes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, {2: 1.0, 4: 2.0}, num_steps=4, keep_best=1)
    (tmp_path / "metrics.jsonl").write_text('{"val_loss"\n')
    assert run(tmp_path, {6: 3.0}, num_steps=6, keep_best=1) == [2, 4, 6]
    assert "an old checkpoint could not be removed" in capsys.readouterr().out
    config = CONFIGURATION(keep_best=1, log_dir=str(tmp_path))
    checkpoints = SimpleNamespace(folder=location(str(tmp_path / "checkpoints")))
    ended: Any = SimpleNamespace(leads=True, config=config, checkpoints=checkpoints)
    (line,) = BestCheckpoint(ended).where_to_look()
    assert line == f"  best         not known: {tmp_path}/metrics.jsonl: a line is not a record"


@pytest.mark.slow
def test_the_best_are_kept_in_object_storage(tmp_path: Path, proxy: FaultProxy) -> None:
    assert run(tmp_path, LOSSES, keep_best=1, ckpt_save_path="s3://bucket/best") == [4, 8]


def test_a_step_has_the_value_of_the_last_line_that_was_written_for_it(tmp_path: Path) -> None:
    lines = [
        {"step": 2, "loss": 0.1},
        {"step": 2, "val_loss": 5.0, "val_loss/a": 4.0},
        {"step": 4, "val_loss": 1.0},
        {"step": 2, "val_loss": 3.0, "val_loss/a": 2.0},
        {"step": 6, "test_loss": 0.2},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "val_loss": 1')
    assert validation_values(tmp_path, "val_loss") == {2: 3.0, 4: 1.0}
    assert validation_values(tmp_path, "val_loss/a") == {2: 2.0, 4: math.inf}
    assert validation_values(tmp_path / "nowhere", "val_loss") == {}
    assert best_steps([2, 4, 6, 8], {2: 1.0, 4: math.inf, 8: 1.0}) == [8, 2, 4]


def test_a_validation_before_the_first_step_which_may_be_shorter_does_not_count(tmp_path: Path) -> None:
    lines = ('{"step": 0, "val_loss": 1.0}\n', '{"step": 4, "val_loss": 2.0}\n')
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    config = CONFIGURATION(keep_best=1, val_interval=4, log_dir=str(tmp_path))
    assert config.validation_values() == {4: 2.0}


def test_a_dataset_that_is_not_validated_is_a_mistake_before_the_start(tmp_path: Path) -> None:
    for folder, name in (("train", "a"), ("valid", "b"), ("valid", "c")):
        corpus(tmp_path / folder, numbered([40] * 40), name=name)
    flags = {**VALIDATED, "keep_best": 1, "data_path": tmp_path / "train", "valid_data_path": tmp_path / "valid"}
    flags |= {"model_variant": "tiny", "log_dir": tmp_path / "run", "num_steps": 8, "checkpoint_interval": 2}

    def mistakes(metric: str, **more: object) -> str:
        with pytest.raises(ConfigError) as refused:
            configure({name: str(value) for name, value in {**flags, "keep_best_metric": metric, **more}.items()}, ALL)
        return str(refused.value)

    words = r"--keep_best_metric=val_loss/x +the validation data are b, c; use val_loss"
    assert re.search(words, mistakes("val_loss/x"))
    assert "are one dataset; use val_loss" in mistakes("val_loss/b", valid_datasets="b")
    flags["keep_best_metric"] = "val_loss/b"
    configure({name: str(value) for name, value in flags.items()}, ALL, report=False)


def validation_losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in read_metrics(folder / "metrics.jsonl") if "val_loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("xla", marks=[pytest.mark.exhaustive, needs_xla])])
def test_after_kill_9_a_run_that_overfits_leaves_the_best_and_the_newest(tmp_path: Path, engine: str) -> None:
    generator = np.random.default_rng(0)
    for name in ("train", "valid"):
        corpus(tmp_path / name, generator.integers(2, 320, (16, 64)).tolist())
    fields = {**VALIDATED, "keep_best": 2, "num_steps": 24, "checkpoint_interval": 2, "report_interval": 2}
    fields |= {"data_path": tmp_path / "train", "valid_data_path": tmp_path / "valid", "engine": engine}
    killed = ("-m", "tests.stopping", "SIGKILL", "16", "0")  # between its validation and its save
    finish(tmp_path / "run", 2, code=-signal.SIGKILL, script=killed, **fields)
    output = finish(tmp_path / "run", 2, **fields)
    losses = validation_losses(tmp_path / "run")
    assert list(losses) == [*range(2, 25, 2)]
    best = sorted(losses, key=lambda step: (losses[step], -step))[:2]
    assert max(best) < 16  # before the kill
    assert steps(tmp_path / "run") == sorted({*best, 24})
    assert f"best         {tmp_path}/run/checkpoints/step_{best[0]} (val_loss {losses[best[0]]:.4f})" in output
