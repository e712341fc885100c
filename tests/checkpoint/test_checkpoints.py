"""The policies of a run's checkpoints: when it saves, what it keeps, where it continues, what it refuses."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from main_training import CHECKS
from pretraining.checkpoint.checkpoints import Checkpoints, SaveFailedError
from pretraining.checkpoint.folder import find_checkpoints
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.checkpoint.store import is_weight
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problems
from pretraining.extensions.checkpoints import read_tensors
from pretraining.run.start import parameter_shapes
from pretraining.storage import FolderLock
from tests.checkpoint.small_run import facts_of, open_run, small_config, train, train_step
from tests.faults.damage import fill_disk, flip_bit_at
from tests.processes import ROOT


def run(folder: Path, **fields: Any) -> list[float]:
    """Train (or continue) under `folder`; the losses of the steps that were done."""
    losses: list[float] = []
    train(small_config(folder, **fields), lambda step, loss: losses.append(loss))
    return losses


def steps(folder: Path) -> list[int]:
    """The committed steps, oldest first."""
    return [open_checkpoint(path).facts.step for path in reversed(find_checkpoints(folder / "checkpoints").committed)]


LEFT: list[tuple[dict[str, Any], list[int]]] = [  # settings, and the steps that are left
    ({"checkpoint_interval": 3}, [3, 6, 8]),
    ({"checkpoint_interval": 100}, [8]),
    ({"checkpoint_interval": 3, "keep_last_n_checkpoints": 2}, [6, 8]),
    ({"checkpoint_interval": 1, "keep_last_n_checkpoints": 1}, [8]),
    ({"checkpoint_interval": 0}, []),
    ({"checkpoint_interval": 3, "async_checkpointing": True, "keep_last_n_checkpoints": 2}, [6, 8]),
]


@pytest.mark.parametrize(("fields", "expected"), LEFT)
def test_a_run_leaves_the_checkpoints_that_were_asked_for(
    tmp_path: Path, fields: dict[str, Any], expected: list[int]
) -> None:
    run(tmp_path, **fields)
    assert steps(tmp_path) == expected


@pytest.mark.parametrize("background", [False, True])
def test_a_continued_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, background: bool) -> None:
    whole = run(tmp_path / "whole")
    first = run(tmp_path / "halves", num_steps=4, async_checkpointing=background)
    second = run(tmp_path / "halves", async_checkpointing=background)
    assert first + second == whole
    assert all(map(math.isfinite, whole)) and len(set(whole)) == 8
    left, right = (read_tensors(tmp_path / part / "checkpoints" / "step_8") for part in ("whole", "halves"))
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_training_in_the_background_of_a_save_does_not_change_what_is_saved(tmp_path: Path) -> None:
    config = small_config(tmp_path, async_checkpointing=True)
    checkpoints, trainee = Checkpoints(config, tmp_path), open_run(config)
    before = {name: tensor.clone() for name, tensor in trainee.state().items()}
    checkpoints.save(trainee.state(), facts_of(config, 2))
    train_step(*trainee, config, 3)
    checkpoints.close()
    saved = read_tensors(tmp_path / "checkpoints" / "step_2")
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used_until_none_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path, num_steps=4)
    flip_bit_at(tmp_path / "checkpoints" / "step_4" / "weights-00000.safetensors")
    assert run(tmp_path, num_steps=4) == whole[2:]
    assert "step_4/weights-00000.safetensors: bytes" in capsys.readouterr().out
    assert run(tmp_path, num_steps=4) == []  # saved again
    assert (tmp_path / "checkpoints" / "step_4.damaged").is_dir()
    for path in find_checkpoints(tmp_path / "checkpoints").committed:
        flip_bit_at(Path(str(path)) / "manifest.json")
    with pytest.raises(UserError, match="none of the checkpoints can be read"):
        run(tmp_path)


def test_a_damaged_checkpoint_does_not_count_when_old_ones_are_removed(tmp_path: Path) -> None:
    whole = run(tmp_path, num_steps=4)
    flip_bit_at(tmp_path / "checkpoints" / "step_4" / "weights-00000.safetensors")
    config = small_config(tmp_path, num_steps=4, checkpoint_interval=1, keep_last_n_checkpoints=1)
    checkpoints, trainee = Checkpoints(config, tmp_path), open_run(config)
    assert checkpoints.restore(trainee)  # type: ignore[arg-type]
    assert train_step(*trainee, config, 3) == whole[2]
    checkpoints.save(trainee.state(), facts_of(config, 3))
    checkpoints.close()
    assert steps(tmp_path) == [3]  # and not the damaged 4
    assert run(tmp_path, num_steps=4) == whole[3:]


def test_strays_survive_and_leftovers_of_interrupted_saves_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("step_99", "step_007", "step_x", "step_3_ckp", "other", "step_5.partial", "step_1.deleted"):
        (folder / name).mkdir(parents=True)
    (folder / "step_5.partial" / "weights-00000.safetensors").write_bytes(b"half")
    for name in ("step_50", "README"):
        (folder / name).write_text("a file")
    run(tmp_path, keep_last_n_checkpoints=1)
    assert steps(tmp_path) == [8]
    strays = {"step_99", "step_007", "step_x", "step_3_ckp", "other", "step_50", "README"}
    assert {path.name for path in folder.iterdir()} == {*strays, "step_8", "lock"}
    assert "step_99 has no marker" in capsys.readouterr().out


# ---- Starting from another run


def test_a_checkpoint_without_moments_continues_with_fresh_ones_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, num_steps=4, save_optimizer=False)
    assert all(map(is_weight, read_tensors(tmp_path / "checkpoints" / "step_4")))
    assert len(run(tmp_path)) == 4
    assert "has no optimizer state" in capsys.readouterr().out


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(tmp_path: Path) -> None:
    run(tmp_path / "other", num_steps=2)
    target = (tmp_path / "other" / "checkpoints" / "step_2").rename(tmp_path / "archived")
    run(tmp_path, num_steps=2, keep_last_n_checkpoints=1)
    folder = tmp_path / "checkpoints"
    (folder / "step_1").symlink_to(target)
    (folder / "step_4").symlink_to(tmp_path / "nowhere")
    (folder / "step_1.deleted").symlink_to(target)
    for stop in (4, 6):
        run(tmp_path, num_steps=stop, keep_last_n_checkpoints=1)
        assert steps(tmp_path) == [stop]
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "step_4.damaged", "step_6"]
    assert read_tensors(target)


# ---- What may change


def check_start_of(config: TrainConfig, log_dir: Path) -> None:
    """See check_starting_point, for the configured model."""
    check_starting_point(config, log_dir, parameter_shapes(config))


def refuses(words: str, folder: Path, **fields: Any) -> None:
    """Check that a start with these settings is refused, in these words, before a model exists."""
    with pytest.raises(UserError, match=words):
        check_start_of(small_config(folder, **fields), folder)


def test_a_start_that_cannot_go_well_is_refused_before_a_model_exists_and_by_the_run(tmp_path: Path) -> None:
    def both_refuse(words: str, **fields: Any) -> None:
        refuses(words, tmp_path, **fields)
        with pytest.raises(UserError, match=words):
            run(tmp_path, **fields)

    def check(**fields: Any) -> None:
        check_start_of(small_config(tmp_path, **fields), tmp_path)

    check()
    both_refuse("--resume=must, but", resume="must")
    run(tmp_path, num_steps=4, resume="never")
    check(resume="must")
    both_refuse("--resume=never, but", resume="never")
    both_refuse(r"(?s)--hidden_size=32 .*trained with 16.*--norm_eps=0.001 .*with 1e-05", hidden_size=32, norm_eps=1e-3)
    both_refuse(r"--optimizer=lion .*trained with adamw", optimizer="lion")
    both_refuse(r"--learning_rate=0.001 .*override_lr_on_resume", learning_rate=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretraining.checkpoint.manifest.FORMAT", 3)  # of a newer program
        run(tmp_path, num_steps=5)
    both_refuse(r"step_5/COMMITTED: in format 3, .*: update it, or move the folder")
    shutil.rmtree(tmp_path / "checkpoints" / "step_5")  # where it was
    flip_bit_at(tmp_path / "checkpoints" / "step_4" / "facts.json")
    check()
    both_refuse(r"facts\.json: differs.*; --resume=auto continues", resume="must")
    (tmp_path / "checkpoints" / "step_4" / "facts.json").unlink()
    both_refuse(r"facts\.json: .*; --resume=auto continues", resume="must")
    assert len(run(tmp_path, num_steps=4, learning_rate=1e-3, override_lr_on_resume=True)) == 2  # after step 2
    (tmp_path / "checkpoints" / "step_2").rename(tmp_path / "checkpoints" / "step_80")  # as if it were the newest
    both_refuse("step_80: has the state of step 2; rename the folder to step_2")


def test_only_learned_positions_must_have_the_number_of_the_checkpoint(tmp_path: Path) -> None:
    rotary, learned = tmp_path / "rotary", {"position_embedding_type": "learned_absolute"}
    run(tmp_path, num_steps=1, max_position_embeddings=64, **learned)
    words = "--max_position_embeddings=128 .*trained with 64; use that"
    refuses(words, tmp_path, max_position_embeddings=128, **learned)
    run(rotary, num_steps=1, max_position_embeddings=64)
    check_start_of(small_config(rotary, max_position_embeddings=128), rotary)


def test_other_changes_are_made_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, num_steps=2)
    run(tmp_path, num_steps=4, weight_decay=0.2, report_interval=7, datasets="a")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since step_2"))
    assert line == "changed since step_2: weight_decay 0.1 -> 0.2, num_steps 2 -> 4, datasets an empty value -> a"


def test_a_larger_num_steps_prints_the_rate_before_and_after_and_what_keeps_the_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"learning_rate": 1e-3}
    run(tmp_path, num_steps=4, **fields)
    reason = ": the schedule spans num_steps; --lr_decay_steps=4 keeps it as it was\n"

    def printed(**more: Any) -> str:
        capsys.readouterr()
        run(tmp_path, **fields, **more)
        return capsys.readouterr().out

    assert "learning rate" not in printed(num_steps=4)
    shutil.copytree(tmp_path, tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", tmp_path / "other")
    other = {"log_dir": str(tmp_path / "other"), "lr_schedule": "cosine", "min_lr": 1e-4, "override_lr_on_resume": True}
    assert "learning rate of step 5: 0.0001 -> 0.00055\n" in printed(num_steps=8, **other)  # nothing keeps the schedule
    assert f"learning rate of step 5: 0.0001 -> 0.000378{reason}" in printed(num_steps=8)
    shutil.rmtree(tmp_path / "checkpoints" / "step_8")
    assert "learning rate" not in printed(num_steps=6)  # no step follows
    kept = {"log_dir": str(tmp_path / "kept"), "lr_decay_steps": 4, **fields}
    assert not problems(small_config(tmp_path, **kept, use_dummy_dataset=True), CHECKS)
    run(tmp_path, num_steps=8, **kept)
    run(tmp_path, num_steps=12, **kept)
    assert "learning rate" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--lr_decay_steps=5 .* was trained with 4"):
        run(tmp_path, num_steps=12, **{**kept, "lr_decay_steps": 5})


# ---- One run to a folder


@pytest.mark.parametrize(
    ("folder", "settings", "setting"),
    [("checkpoints", {}, "ckpt_save_path"), ("", {"checkpoint_interval": 0}, "log_dir")],
)
def test_a_second_run_on_the_same_folder_is_refused_while_the_first_lives(
    tmp_path: Path, folder: str, settings: dict[str, Any], setting: str
) -> None:
    holder = "import sys; from pathlib import Path; from pretraining.storage import FolderLock;"
    holder += "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(tmp_path / folder)]
    first = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdin and first.stdout and first.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"process {first.pid} on .*, which is still running.* --{setting}"):
        run(tmp_path, **settings)
    first.kill()
    first.wait()
    assert len(run(tmp_path)) == 8


def test_a_forked_child_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    holder = (
        "import os, signal, sys; from pathlib import Path; from pretraining.storage import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child == 0: os.close(1); signal.pause()\n"
        "print(child, flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    parent = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    try:
        FolderLock(tmp_path).release()
    finally:
        os.kill(int(parent.stdout), signal.SIGKILL)


# ---- Failures


def test_a_failing_disk_is_reported_and_stops_the_run_after_so_many_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, num_steps=2)
    monkeypatch.setattr("os.fsync", fill_disk)
    with pytest.raises(SaveFailedError, match=r"2 saves in a row failed, .*No space left"):
        run(tmp_path, ckpt_max_failures=2)
    assert capsys.readouterr().out.count("earlier checkpoints are untouched") == 2
    for background in (False, True):
        with pytest.raises(SaveFailedError, match="the last save"):
            run(tmp_path, checkpoint_interval=100, async_checkpointing=background)
    monkeypatch.undo()
    assert steps(tmp_path) == [2]
    assert len(run(tmp_path)) == 6


@pytest.mark.parametrize("background", [False, True])
def test_after_a_failed_save_the_newest_checkpoint_is_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    config = small_config(tmp_path, async_checkpointing=background)
    checkpoints, trainee = Checkpoints(config, tmp_path), open_run(config)
    for step, disk_is_full, newest in ((2, False, 2), (4, True, 2), (6, True, 2), (6, False, 6)):
        if disk_is_full:
            monkeypatch.setattr("os.fsync", fill_disk)
        checkpoints.save(trainee.state(), facts_of(config, step))
        checkpoints.wait()
        monkeypatch.undo()
        assert checkpoints.newest == newest and checkpoints.due(6) == (newest != 6)
    checkpoints.close()
    assert steps(tmp_path) == [2, 6]


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_run_on_dummy_data_does_not_continue_one_on_real_data_nor_the_reverse(tmp_path: Path, is_dummy: bool) -> None:
    run(tmp_path, num_steps=2, use_dummy_dataset=is_dummy)
    check_start_of(small_config(tmp_path, use_dummy_dataset=is_dummy), tmp_path)
    words = f"--use_dummy_dataset={not is_dummy} .*{is_dummy}; .*--run_name"
    refuses(words, tmp_path, use_dummy_dataset=not is_dummy, checkpoint_interval=0)
