"""Training from Python: docs/python.md, the script's losses, and stopping and resuming."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import main_training
from pretraining import TrainConfig, train
from pretraining.config.errors import UserError
from pretraining.data import RowMarks
from pretraining.monitor.metrics import FILE_NAME, read_metrics
from tests.pages import code_of
from tests.parallel.toy import instruction_cases
from tests.processes import call
from tests.warm import python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the names of the page stand for after its code has run."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        exec(code_of(PAGE.split("\n## ")[0]), names)
    return names


def test_the_page_runs_and_its_models_learn_its_data(page: dict[str, Any]) -> None:
    for name in ("counters", "squares", "halved"):
        run = page[name]
        assert run.code == 0 and list(run.losses) == list(range(1, 9)) and run.losses[8] < run.losses[1] - 0.2
    assert page["halved"].losses != page["counters"].losses


@pytest.mark.slow
def test_the_notebook_runs_continues_and_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    exec("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), names)
    run, longer, watched = (names[name] for name in ("run", "longer", "watched"))
    assert list(run.losses) == list(range(1, 11)) and run.losses[10] < run.losses[1] - 0.2
    assert longer.losses.items() > run.losses.items() and max(longer.losses) == 14
    assert names["norms"].keys() == watched.losses.keys()


def test_the_flags_of_the_script_train_as_the_configuration_does(
    page: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {**page["tiny"], "use_dummy_dataset": True, "checkpoint_interval": 8, "log_dir": tmp_path}
    assert main_training.main(**{name: str(value) for name, value in flags.items()}) == 0
    before = (tmp_path / FILE_NAME).read_text()
    again = train(flags)  # complete: nothing is trained, the figures are there
    assert again.losses == page["counters"].losses
    assert (tmp_path / FILE_NAME).read_text() == before
    fewer = train({**flags, "num_steps": 2, "test_steps": 1})  # than the checkpoint has, which is what is tested
    assert [record["step"] for record in fewer.records if "test_loss" in record] == [8]
    assert "complete: 8 steps" in capsys.readouterr().out.splitlines()[-5]


@pytest.mark.slow
def test_instruction_data_continue_bit_for_bit(page: dict[str, Any], tmp_path: Path) -> None:
    rows = {**instruction_cases()["packed"], "global_batch_size": 4, "seq_length": 64, "vocab_size": 512}
    flags = {**page["tiny"], **rows, "num_steps": 6, "lr_schedule": "constant"}
    whole = train({**flags, "log_dir": tmp_path / "whole"})
    halves = [train({**flags, "num_steps": steps, "log_dir": tmp_path / "halves"}) for steps in (3, 6)]
    assert halves[1].losses == whole.losses
    hashes = [[record["data_hash"] for record in run.records if "loss" in record] for run in (halves[1], whole)]
    assert hashes[0] == hashes[1]


class ThirdBatchUntrained:
    """Counters, in global batches of 8; the third has no trained token."""

    def row(self, sequence: int, out: Any) -> RowMarks:
        out[:] = sequence % 7 + np.arange(len(out))
        return RowMarks([], untrained=np.arange(len(out)) if sequence // 8 == 2 else None)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_global_batch_without_trained_tokens_has_loss_0_on_both_engines(page: dict[str, Any], tmp_path: Path) -> None:
    torch = train({**page["tiny"], "log_dir": tmp_path / "torch"}, data={"train": ThirdBatchUntrained()})
    assert torch.code == 0 and torch.losses[3] == 0 < torch.losses[8] < torch.losses[1] - 0.2
    flags = {**page["tiny"], "engine": "xla", "log_dir": str(tmp_path / "xla")}
    code = f"from {__name__} import *; train({flags}, data={{'train': ThirdBatchUntrained()}})"
    call([*python(), "-c", code], env={**os.environ, "PJRT_DEVICE": "CPU"})
    records = read_metrics(tmp_path / "xla" / FILE_NAME)
    xla = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert xla == pytest.approx(torch.losses, abs=1e-5)


def test_an_id_outside_the_vocabulary_and_missing_data_are_named(page: dict[str, Any], tmp_path: Path) -> None:
    class Large:
        def row(self, sequence: int, out: Any) -> RowMarks:
            out[:] = 64
            return RowMarks([])

    config = TrainConfig(**page["tiny"], log_dir=str(tmp_path))
    with pytest.raises(UserError, match="Large: token id 64, but the model's vocabulary is 64"):
        train(replace(config, data_path="nowhere"), data={"train": Large()})
    with pytest.raises(UserError, match="--num_epochs=1: data of your own have no end"):
        train(replace(config, num_epochs=1), data={"train": Large()})
    with pytest.raises(UserError, match="--data_path  is not set"):
        train(config)


@pytest.mark.slow
def test_settings_and_splits_that_no_run_reads_are_refused(page: dict[str, Any], tmp_path: Path) -> None:
    rows, settings = page["Squares"](), {**page["tiny"], "log_dir": str(tmp_path)}
    for nothing in (None, "tiny", ["--num_steps=2"]):
        with pytest.raises(UserError, match=r"settings=.*: give a TrainConfig, or flags by name"):
            train(nothing)  # type: ignore[arg-type]
    for split in ("eval", "valid", "test"):  # without val_interval and test_steps
        with pytest.raises(UserError, match=rf"data={split}: the run reads no such split: .*val_interval"):
            train(settings, data={"train": rows, split: rows})
    held_out = {"val_interval": 8, "val_steps": 1, "test_steps": 1}
    assert train({**settings, **held_out}, data={"train": rows, "valid": rows, "test": rows}).code == 0


@pytest.mark.slow
def test_a_second_run_of_a_process_uses_the_compile_cache_of_the_first_and_no_other(
    page: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**page["tiny"], "use_dummy_dataset": True, "engine": "xla"}
    code = f"""
from pretraining import train
from pretraining.config.errors import UserError

caches = ["one", "one", "two"]
for start, cache in enumerate(caches):
    try:
        run = train({settings!r} | {{"compile_cache_dir": cache, "log_dir": f"run{{start}}"}})
        print("code", run.code)
    except UserError as error:
        print(error)
"""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)}
    printed = call([*python(), "-c", code], folder=tmp_path, env=environment).stdout
    assert printed.count("code 0") == 2
    assert "--compile_cache_dir=two: this process has compiled without it" in printed
