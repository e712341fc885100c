"""Checkpoints in every host's own folder: a start takes the newest step that is complete there or elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import main_training
from pretraining.checkpoint.checkpoints import Checkpoints, SaveFailedError
from pretraining.checkpoint.folder import find_checkpoints
from pretraining.checkpoint.manifest import open_checkpoint, write_commit
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.config.errors import UserError
from pretraining.config.extension import Extension, Watcher
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problems
from pretraining.extensions.checkpoints import newest_checkpoint
from pretraining.extensions.local_tier import EXTENSION
from pretraining.run.configure import start_checks_of
from pretraining.run.start import parameter_shapes
from tests.checkpoint.small_run import facts_of, open_run, small_config, train
from tests.end_to_end.small import ONE_PROCESS
from tests.faults.damage import flip_bit_at
from tests.processes import ROOT, run_together
from tests.waiting import wait_until

DRIVER = ROOT / "tests" / "checkpoint" / "dtensor_driver.py"


class KilledError(Exception):
    """The run ended after this step."""


def settings(folder: Path, **fields: Any) -> dict[str, Any]:
    """A run that saves every step locally and every fourth elsewhere."""
    local = {"ckpt_local_path": str(folder / "local"), "ckpt_local_interval": 1}
    return {"checkpoint_interval": 4, **local, **fields}


def run(folder: Path, last: int = 8, **fields: Any) -> dict[int, float]:
    """Train, or continue, until the run is killed in the step after `last`; the losses of the steps that were done."""
    losses: dict[int, float] = {}

    def report(step: int, loss: float) -> None:
        if step > last:
            raise KilledError
        losses[step] = loss

    with contextlib.suppress(KilledError):
        train(small_config(folder, **settings(folder, **fields)), report)
    return losses


def names(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoints(folder).committed]


def refusals(config: TrainConfig) -> str:
    """What a start of the configuration says is wrong with its local folder."""
    return "\n".join(f"{subject}: {remedy}" for subject, remedy, _ in problems(config, start_checks_of([EXTENSION])))


def test_a_start_takes_the_newest_step_of_both_places_and_one_is_kept_locally(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", async_checkpointing=True)
    assert names(tmp_path / "whole" / "local") == ["step_7"]  # the eighth is elsewhere
    assert names(tmp_path / "whole" / "checkpoints") == ["step_8", "step_4"]
    folder = tmp_path / "killed"
    done = [run(folder, last) for last in (3, 4, 6, 8)]
    assert [list(losses) for losses in done] == [[1, 2, 3], [4], [5, 6], [7, 8]]
    assert {step: loss for losses in done for step, loss in losses.items()} == whole
    assert names(folder / "local") == ["step_7"]


def test_what_a_host_alone_has_is_saved_elsewhere_when_a_signal_asks_for_it(tmp_path: Path) -> None:
    config = small_config(tmp_path, **settings(tmp_path))
    trainee, checkpoints = open_run(config), Checkpoints(config, tmp_path)
    for asked in (False, True, True):
        checkpoints.save(trainee.state(), facts_of(config, 3), asked=asked)
    checkpoints.close()
    assert names(tmp_path / "local") == names(tmp_path / "checkpoints") == ["step_3"]


class Ended(Watcher):
    """The run is killed after step 3, and its next start gets a signal before it has made a step."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def prepare(self) -> None:
        if self._run.start_step:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: self._run.interrupt.agreed_now() > 0)

    def before_step(self, step: int) -> None:
        if step > 3:
            raise KilledError


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "code"), [(9, 128 + signal.SIGTERM), (3, 0)])
def test_what_a_host_alone_has_is_saved_elsewhere_by_a_start_that_makes_no_step(
    tmp_path: Path, steps: int, code: int
) -> None:
    flags = {**ONE_PROCESS, **settings(tmp_path), "use_dummy_dataset": True, "num_steps": 9, "log_dir": tmp_path}
    extensions = (*main_training.EXTENSIONS, Extension(watch=Ended))
    with contextlib.suppress(KilledError):
        main_training.train(flags, extensions=extensions)
    assert (names(tmp_path / "local"), names(tmp_path / "checkpoints")) == (["step_3"], [])
    assert main_training.train({**flags, "num_steps": steps}, extensions=extensions).code == code
    assert names(tmp_path / "checkpoints") == ["step_3"]


def test_a_corrupt_local_checkpoint_is_one_line_and_the_run_continues_from_the_other_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path, 6)
    flip_bit_at(next((tmp_path / "local" / "step_6").glob("weights-*")))
    assert run(tmp_path, 5, resume="must") == {5: whole[5]}
    assert re.search("local/step_6/weights.* differ from what was saved.*is skipped", capsys.readouterr().out)
    assert names(tmp_path / "local") == ["step_5"]  # no later one is left, which would be of another run's course
    flip_bit_at(next((tmp_path / "local" / "step_5").glob("facts*")))
    config = small_config(tmp_path, **settings(tmp_path, resume="must"))
    facts = check_starting_point(config, tmp_path, parameter_shapes(config))
    assert facts and facts.step == 4


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_full_local_disk_is_named_and_ends_no_run_whose_other_folder_still_counts_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], background: bool
) -> None:
    fsync = os.fsync

    def fill_disk(name: str) -> None:
        def fail(file: int) -> None:
            if f"/{name}" in str(Path(f"/proc/self/fd/{file}").readlink()):
                raise OSError(28, "No space left on device")
            fsync(file)

        monkeypatch.setattr("os.fsync", fail)

    fill_disk("local")
    assert len(run(tmp_path, num_steps=10, async_checkpointing=background)) == 8
    output = capsys.readouterr().out
    assert output.count(f"saving to {tmp_path}/local failed: [Errno 28] No space left on device") == 6
    # in the background, step 8 may be saved before the kill
    assert names(tmp_path / "checkpoints")[-1] in ("step_4", "step_8")[: 1 + background]
    assert not names(tmp_path / "local")
    fill_disk("checkpoints")
    with pytest.raises(SaveFailedError, match="2 saves in a row failed"):  # saves between them do not fail
        run(tmp_path, 20, num_steps=20, ckpt_max_failures=2, async_checkpointing=background)


def test_local_checkpoints_alone_count_for_resume_and_the_folder_is_another_one(tmp_path: Path) -> None:
    run(tmp_path, 2)
    with pytest.raises(UserError, match=r"--resume=never, but .*local/step_2 exists"):
        run(tmp_path, resume="never")
    (tmp_path / "config.json").write_text(json.dumps({"ckpt_local_path": str(tmp_path / "local")}))
    with pytest.raises(UserError, match=r"no committed checkpoint .*; --ckpt_local_path=.*/local of its hosts"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "local").name == "step_2"
    assert list(run(tmp_path, 3, resume="must")) == [3]
    config = small_config(tmp_path, **settings(tmp_path, ckpt_local_path=str(tmp_path / "checkpoints")))
    assert re.search(r"--ckpt_local_path=.*: is the folder of the other checkpoints", refusals(config))


def test_the_local_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    local = {"ckpt_local_path": str(tmp_path / "local")}
    run(tmp_path / "a", 2, **local)
    assert not refusals(small_config(tmp_path / "a", **settings(tmp_path, **local), num_steps=9))
    mistake = refusals(small_config(tmp_path / "b", **settings(tmp_path, **local)))
    assert re.search(r"local: step_2 is of the run that saves to .*/a/checkpoints; give another", mistake)


# ---- Several hosts


HOSTS = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from tests.checkpoint.small_run import small_config, train
from tests.extensions.test_local_tier import KilledError, settings

dist.init_process_group("gloo")
torch.set_num_threads(1)
os.environ["LOCAL_RANK"] = "0"
folder, last = Path(sys.argv[1]), int(sys.argv[2])
config = small_config(folder, **settings(folder, ckpt_local_path=str(folder / f"host{os.environ['RANK']}")))
def report(step, loss):
    if step > last:
        raise KilledError
    print(step, loss.hex(), flush=True)
try:
    train(config, report)
except KilledError:
    pass
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_hosts_continue_from_their_own_folders_or_without_one_of_them_from_the_shared_one(tmp_path: Path) -> None:
    whole = {step: f"{step} {loss.hex()}" for step, loss in run(tmp_path / "one").items()}
    (_, first), _ = run_together("-c", HOSTS, tmp_path, "6")
    assert [line for line in first if line[0].isdigit()] == [whole[step] for step in range(1, 7)]
    (_, first), _ = run_together("-c", HOSTS, tmp_path, "7")
    assert f"continuing from {tmp_path}/host0/step_6" in "\n".join(first) and whole[7] in first
    saved = open_checkpoint(tmp_path / "host1" / "step_7")  # as saved after another start, when it was another host
    for name in ("facts.json", "manifest.json", "COMMITTED"):
        (saved.path / name).unlink()
    other = {**saved.facts.config, "learning_rate": 1.0}
    write_commit(saved.path, saved.manifest, dataclasses.replace(saved.facts, config=other))
    (_, first), _ = run_together("-c", HOSTS, tmp_path, "7")
    assert "step_7 is not the same on every host, so it is not used" in "\n".join(first)
    assert [line for line in first if line[0].isdigit()] == [whole[step] for step in range(5, 8)]
    for file in (tmp_path / "host1" / "step_7").iterdir():  # another host is in the place of the second one
        file.unlink()
    (_, first), (code, _) = run_together("-c", HOSTS, tmp_path, "8")
    output = "\n".join(first)
    assert code == 0 and f"{tmp_path}/host0: " in output and "has no step_7, so it is not used" in output
    assert f"continuing from {tmp_path}/checkpoints/step_4" in output
    assert [line for line in first if line[0].isdigit()] == [whole[step] for step in range(5, 9)]


@pytest.mark.slow
def test_a_host_has_what_its_devices_hold_and_refuses_another_mesh(tmp_path: Path) -> None:
    for code, output in run_together(DRIVER, tmp_path, "hosts"):
        assert code == 0, output
        assert "this host has not all of even that its devices take now" in output[-1]
