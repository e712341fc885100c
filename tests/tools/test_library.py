"""A loop of one's own: docs/library.md on both engines and on two processes, and what it saves."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining import train
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.shards import write_files
from pretraining.config.declaration import settings_of
from pretraining.config.errors import UserError
from pretraining.data.stream import Counters
from pretraining.tools.library import Training
from tests.pages import code_of, losses_of, outputs

ROOT = Path(__file__).parents[2]
CODE = code_of((ROOT / "docs" / "library.md").read_text())
DEFINITIONS = CODE.partition("before, _ =")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the names of the page stand for after its code has run, in the folder `folder`."""
    names: dict[str, Any] = {"folder": tmp_path_factory.mktemp("page")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(names["folder"])
        exec(CODE, names)
    return names


def test_the_loop_of_the_page_has_the_losses_of_the_script_and_continues(page: dict[str, Any], tmp_path: Path) -> None:
    settings = {**page["settings"], "engine": "torch", "report_interval": 1, "log_dir": str(tmp_path)}
    assert {**page["before"], **page["after"]} == train(settings).losses
    assert list(page["before"]) == [*range(1, 9)] and list(page["after"]) == [*range(9, 13)]
    assert page["lowest"] == min({**page["before"], **page["after"]}.values())
    assert sorted(path.name for path in (page["folder"] / "checkpoints").iterdir()) == ["step_12", "step_8"]


@pytest.mark.slow
def test_the_script_continues_the_checkpoint_of_a_loop(page: dict[str, Any], tmp_path: Path) -> None:
    settings = {**page["settings"], "engine": "torch", "report_interval": 1, "checkpoint_interval": 12}
    source = page["folder"] / "checkpoints" / "step_8"
    shutil.copytree(source, tmp_path / "own" / "checkpoints" / "step_8")
    assert train({**settings, "log_dir": str(tmp_path / "own")}).losses == page["after"]
    if "load_step" in settings_of(CONFIGURATION):
        other = {"ckpt_load_path": str(source), "load_step": True, "log_dir": str(tmp_path / "other")}
        assert train({**settings, **other}).losses == page["after"]


def test_a_step_of_the_folder_is_loaded_and_an_empty_folder_holds_none(
    page: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(page["folder"] / "checkpoints")
    with Training({**page["settings"], "engine": "torch"}) as training:
        assert training.load(str(tmp_path)) is None
        assert training.load(folder, step=4) is None
        loaded = training.load(folder, step=8)
        assert loaded and loaded.step == 8
        assert training.train_step(9).read()["loss"] == page["after"][9]
        for step in (9, 8, 5):  # a loop that begins anew in the folder of an earlier one
            training.save(str(tmp_path / "kept"), step, keep=1)
        assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step_5", "step_9"]
        with pytest.raises(UserError, match="user_content of step 9 is no JSON value"):
            training.save(str(tmp_path), 9, user_content={"model": object()})
        with pytest.raises(UserError, match="step=0: steps are counted from 1"):
            training.train_step(0)
    assert "changed since" not in capsys.readouterr().out
    with Training({**page["settings"], "engine": "torch", "rope_theta": 50.0, "optimizer": "adam"}) as training:
        assert training.load(folder, step=8)
    printed = capsys.readouterr().out
    assert "changed since step_8: " in printed
    assert "optimizer adamw -> adam" in printed and "rope_theta 10000.0 -> 50.0" in printed


@pytest.mark.parametrize("changes", [{"seq_length_stages": "8:2,16:4"}, {"rampup_batch_size": "4,2,12"}], ids=" ".join)
def test_batches_that_change_are_those_of_the_script_and_so_are_the_tokens_of_the_checkpoint(
    page: dict[str, Any], tmp_path: Path, changes: dict[str, str]
) -> None:
    if not changes.keys() <= settings_of(CONFIGURATION).keys():
        pytest.skip("needs the extensions length_stages and batch_rampup")
    settings = {**page["settings"], **changes, "engine": "torch", "batch_size": 2, "num_steps": 6}
    run = train({**settings, "report_interval": 1, "checkpoint_interval": 6, "log_dir": str(tmp_path / "run")})
    with Training(settings) as training:
        assert {step: training.train_step(step).read()["loss"] for step in range(1, 7)} == run.losses
        training.save(str(tmp_path / "loop"), 6)
    folders = (tmp_path / "loop" / "step_6", tmp_path / "run" / "checkpoints" / "step_6")
    own, script = (open_checkpoint(folder).facts.tokens_seen for folder in folders)
    assert own == script


def test_a_checkpoint_has_what_the_settings_say_and_loads_without_an_optimizer_s_state(
    page: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**page["settings"], "engine": "torch", "checkpoint_dtype": "bf16", "save_optimizer": False}
    if "loss_scale_window" in settings_of(CONFIGURATION):
        settings |= {"precision": "fp16", "mixed_precision": True, "loss_scale_window": 1}  # doubled after each step
    with Training(settings) as training:
        training.train_step(1)
        training.save(str(tmp_path), 1)
        saved = {name: tensor.dtype for name, tensor in open_checkpoint(tmp_path / "step_1").manifest.tensors.items()}
        assert set(saved.values()) == {"BF16"} and "model.norm.weight" in saved
        assert not any(name.startswith("optimizer") for name in saved)
        loss = training.evaluate(training.batch(2)).read()["loss"]
    with Training({**page["settings"], "engine": "torch"}) as training:  # in fp32: moments, and no loss scale
        training.train_step(1)
        training.save(str(tmp_path / "moments"), 1)
    for folder in (tmp_path, tmp_path / "moments"):
        figures = []
        with Training(settings) as training:
            for _ in range(2):  # then in place of an optimizer that has counted an update
                assert training.load(str(folder)) == (1, None)
                assert training.evaluate(training.batch(2)).read()["loss"] == pytest.approx(loss, rel=1e-2)
                scale = training.train_step(2).read().get("loss_scale")
                figures.append((scale, training.evaluate(training.batch(3)).read()["loss"]))
        assert figures[0] == figures[1]


def test_a_save_in_the_background_has_the_weights_of_its_step_whatever_follows(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_later(*arguments: Any) -> Any:
        time.sleep(0.5)
        return write_files(*arguments)

    monkeypatch.setattr("pretraining.checkpoint.store.write_files", write_later)
    (tmp_path / "file").touch()
    with Training({**page["settings"], "engine": "torch"}) as training:
        for step in (1, 2):
            training.train_step(step)
            training.save(str(tmp_path), step, in_background=True)
        training.save(str(tmp_path / "file"), 2, in_background=True)  # and nobody asks for the result
        assert training.load(str(tmp_path), 1) == (1, None)
        assert training.train_step(2).read()["loss"] == page["before"][2]
        assert training.load(str(tmp_path)) == (2, None)
        assert training.train_step(3).read()["loss"] == page["before"][3]
    assert f"step 2 was not saved to {tmp_path / 'file'}: " in capsys.readouterr().out


def test_weights_that_only_the_script_would_load_are_refused(page: dict[str, Any]) -> None:
    settings = {**page["settings"], "ckpt_load_path": str(page["folder"] / "checkpoints")}
    message = r"--ckpt_load_path=.*: a loop of your own does not read it: call Training\.load"
    with pytest.raises(UserError, match=message):
        Training(settings)


def test_data_that_no_loop_reads_are_refused(page: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="data=valid: the run reads no such split"):
        Training(page["settings"], data={"valid": Counters(0, 64)})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_loop_runs_on_two_processes_and_its_checkpoint_continues_on_the_other_engine(
    page: dict[str, Any], tmp_path: Path
) -> None:
    twice = f"{DEFINITIONS}\nfirst, second = run(4)[0], run(8)[0]\nprint(json.dumps({{**first, **second}}))"
    for line in outputs(tmp_path, twice, processes=2):
        assert losses_of(line) == pytest.approx(page["before"], rel=1e-5)
    pytest.importorskip("torch_xla")
    (line,) = outputs(tmp_path, f"{DEFINITIONS}\nprint(json.dumps(run(12, 'xla')[0]))")
    assert losses_of(line) == pytest.approx(page["after"], rel=1e-5)
