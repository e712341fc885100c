"""The policies of a run's checkpoints: when it saves, what it keeps, where it continues, what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from main_training import CHECKS
from pretraining.checkpoint.checkpoints import Checkpoints, SaveFailedError, shortage
from pretraining.checkpoint.folder import find_checkpoints, newest_checkpoint
from pretraining.checkpoint.manifest import Facts, open_checkpoint, write_commit
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.checkpoint.store import is_weight, read_tensors
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problems
from pretraining.run.start import parameter_shapes
from pretraining.storage import FolderLock
from pretraining.tools.generate import base_weights
from tests.checkpoint.small_run import PlainTrainee, facts_of, open_run, small_config, train, train_step
from tests.selection import needs


def run(folder: Path, **fields: Any) -> list[float]:
    """Train (or continue) under `folder`; the losses of the steps that were done."""
    losses: list[float] = []
    train(small_config(folder, **fields), lambda step, loss: losses.append(loss))
    return losses


def steps(folder: Path) -> list[int]:
    """The committed steps, oldest first."""
    return [open_checkpoint(path).facts.step for path in reversed(find_checkpoints(folder / "checkpoints").committed)]


def flip(path: Path, at: int = -1) -> None:
    """Turn one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"checkpoint_interval": 3}, [3, 6, 8]),
        ({"checkpoint_interval": 100}, [8]),
        ({"checkpoint_interval": 3, "keep_last_n_checkpoints": 2}, [6, 8]),
        ({"checkpoint_interval": 1, "keep_last_n_checkpoints": 1}, [8]),
        ({"checkpoint_interval": 0}, []),
        ({"checkpoint_interval": 3, "async_checkpointing": True, "keep_last_n_checkpoints": 2}, [6, 8]),
    ],
)
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


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    run(tmp_path)
    assert run(tmp_path) == []


def test_training_in_the_background_of_a_save_does_not_change_what_is_saved(tmp_path: Path) -> None:
    config = small_config(tmp_path, async_checkpointing=True)
    model, optimizer = open_run(config)
    checkpoints = Checkpoints(config, tmp_path)
    before = {name: tensor.clone() for name, tensor in PlainTrainee(model, optimizer).state().items()}
    checkpoints.save(2, PlainTrainee(model, optimizer).state(), facts_of(config, 2))
    train_step(model, optimizer, config, 3)
    checkpoints.close()
    saved = read_tensors(tmp_path / "checkpoints" / "step_2")
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())


def test_processes_of_one_host_share_its_memory() -> None:
    assert shortage([("a", 4, 10), ("b", 9, 10), ("a", 6, 11)]) == ""
    assert shortage([("a", 4 << 30, 10 << 30), ("a", 7 << 30, 11 << 30)]) == (
        "a has 10.7 GB of memory available for copies of 11.8 GB"
    )


def test_without_memory_for_the_copy_a_save_is_not_asynchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pretraining.checkpoint.checkpoints.available_memory", lambda: 1000)
    run(tmp_path, num_steps=2, async_checkpointing=True)
    assert "this save is not asynchronous" in capsys.readouterr().out
    assert steps(tmp_path) == [2]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path, num_steps=4)
    flip(tmp_path / "checkpoints" / "step_4" / "weights-00000.safetensors")
    assert run(tmp_path, num_steps=4) == whole[2:]
    assert "step_4/weights-00000.safetensors: bytes" in capsys.readouterr().out
    assert run(tmp_path, num_steps=4) == []  # saved again
    assert (tmp_path / "checkpoints" / "step_4.damaged").is_dir()


def test_a_damaged_checkpoint_does_not_count_when_old_ones_are_removed(tmp_path: Path) -> None:
    whole = run(tmp_path, num_steps=4)
    flip(tmp_path / "checkpoints" / "step_4" / "weights-00000.safetensors")
    config = small_config(tmp_path, num_steps=4, checkpoint_interval=1, keep_last_n_checkpoints=1)
    model, optimizer = open_run(config)
    checkpoints = Checkpoints(config, tmp_path)
    assert checkpoints.restore(PlainTrainee(model, optimizer))  # type: ignore[arg-type]
    assert train_step(model, optimizer, config, 3) == whole[2]
    checkpoints.save(3, PlainTrainee(model, optimizer).state(), facts_of(config, 3))
    checkpoints.close()
    assert steps(tmp_path) == [3]  # and not the damaged 4
    assert run(tmp_path, num_steps=4) == whole[3:]


def test_resume_must_does_not_pass_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, num_steps=4)
    flip(tmp_path / "checkpoints" / "step_4" / "facts.json", 3)
    with pytest.raises(UserError, match=r"facts\.json: differs"):
        run(tmp_path, resume="must")


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again_from_nothing(tmp_path: Path) -> None:
    run(tmp_path, num_steps=4)
    for path in find_checkpoints(tmp_path / "checkpoints").committed:
        flip(Path(str(path)) / "manifest.json")
    with pytest.raises(UserError, match="none of the checkpoints can be read"):
        run(tmp_path)


def test_resume_never_and_must_are_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--resume=must, but"):
        run(tmp_path, resume="must")
    run(tmp_path, resume="never")
    with pytest.raises(UserError, match="--resume=never, but"):
        run(tmp_path, resume="never")
    assert run(tmp_path, resume="must") == []


def test_strays_are_ignored_and_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("step_99", "step_007", "step_x", "step_3_ckp", "other"):
        (folder / name).mkdir(parents=True)
    (folder / "step_50").write_text("a file")
    (folder / "README").write_text("notes")
    run(tmp_path, keep_last_n_checkpoints=1)
    assert steps(tmp_path) == [8]
    assert {"step_99", "step_007", "step_x", "step_50", "README", "other"} <= {p.name for p in folder.iterdir()}
    assert "step_99 has no marker" in capsys.readouterr().out


def test_leftovers_of_interrupted_saves_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("step_5.partial", "step_1.deleted"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights-00000.safetensors").write_bytes(b"half")
    run(tmp_path, checkpoint_interval=100)
    assert {p.name for p in folder.iterdir()} == {"step_8", "lock"}


# ---- Starting from another run


def test_another_run_s_checkpoint_gives_weights_and_moments_at_step_0(tmp_path: Path) -> None:
    run(tmp_path / "a", num_steps=4)
    for path in (tmp_path / "a", tmp_path / "a" / "checkpoints", tmp_path / "a" / "checkpoints" / "step_4"):
        config = small_config(tmp_path / "b", ckpt_load_path=str(path), learning_rate=1e-5)
        model, optimizer = open_run(config)
        facts = Checkpoints(config, tmp_path / "b").restore(PlainTrainee(model, optimizer))  # type: ignore[arg-type]
        assert facts and (facts.step, facts.tokens_seen, facts.data) == (0, 0, None)
        saved = read_tensors(tmp_path / "a" / "checkpoints" / "step_4")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in PlainTrainee(model, optimizer).state().items())


def test_load_weights_only_leaves_the_optimizer_fresh(tmp_path: Path) -> None:
    run(tmp_path / "a", num_steps=4)
    config = small_config(tmp_path / "b", ckpt_load_path=str(tmp_path / "a"), load_weights_only=True)
    model, optimizer = open_run(config)
    Checkpoints(config, tmp_path / "b").restore(PlainTrainee(model, optimizer))  # type: ignore[arg-type]
    state, saved = PlainTrainee(model, optimizer).state(), read_tensors(tmp_path / "a" / "checkpoints" / "step_4")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.items() if is_weight(name))
    assert not any(tensor.any() for name, tensor in state.items() if not is_weight(name))


def test_the_run_s_own_checkpoint_wins_over_ckpt_load_path(tmp_path: Path) -> None:
    run(tmp_path / "a", num_steps=2)
    whole = run(tmp_path / "b", num_steps=8)
    run(tmp_path / "c", num_steps=4)
    assert run(tmp_path / "c", ckpt_load_path=str(tmp_path / "a")) == whole[4:]
    assert run(tmp_path / "d", ckpt_load_path=str(tmp_path / "a"), load_step=True) == whole[2:]
    assert run(tmp_path / "c", num_steps=9, ckpt_load_path=str(tmp_path / "a"), load_step=True) == run(
        tmp_path / "b", num_steps=9
    )  # its own checkpoint wins here, too


def test_an_adapter_does_not_continue_without_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, other, adapter = (tmp_path / name for name in ("base", "other", "adapter"))
    run(base, num_steps=2)
    run(other, num_steps=2, seed=1)
    fields: dict[str, Any] = {"lora_rank": 2, "ckpt_load_path": str(base)}
    run(adapter, **fields, num_steps=2)
    initial = {**fields, "ckpt_load_path": ""}
    with pytest.raises(ConfigError, match=rf"--ckpt_load_path= .*the adapter was trained on {base}; use that"):
        check_start_of(small_config(adapter, **initial), adapter)
    run(adapter, **fields, num_steps=4)
    printed = capsys.readouterr().out
    assert f"the frozen weights are those of {base}/checkpoints/step_2" in printed and "ckpt_load_path" not in printed
    run(adapter, **{**fields, "ckpt_load_path": str(other)})
    assert f"ckpt_load_path {base} -> {other}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--num_layers=3"):  # some frozen weights would be the initial ones
        check_start_of(small_config(adapter, **fields, num_layers=3), adapter)
    shutil.rmtree(base)
    with pytest.raises(UserError, match="there is no such folder"):
        check_start_of(small_config(adapter, **fields), adapter)


@pytest.mark.parametrize("exists", [False, True])
def test_a_load_path_without_a_checkpoint_is_an_error(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "typo").mkdir()
    with pytest.raises(UserError, match=r"typo: (there is no such folder|holds no committed checkpoint)"):
        run(tmp_path / "b", ckpt_load_path=str(tmp_path / "typo"))


def test_a_checkpoint_without_moments_continues_with_fresh_ones_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, num_steps=4, save_optimizer=False)
    assert all(map(is_weight, read_tensors(tmp_path / "checkpoints" / "step_4")))
    assert len(run(tmp_path)) == 4
    assert "has no optimizer state" in capsys.readouterr().out


def test_strict_load_names_what_differs_and_can_be_told_to_let_it_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", num_steps=2)
    config = small_config(tmp_path / "b", ckpt_load_path=str(tmp_path / "a"), load_weights_only=True)
    model, optimizer = open_run(config)
    model.add_module("value_head", torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"only in the model: value_head\.bias, value_head\.weight"):
        Checkpoints(config, tmp_path / "b").restore(PlainTrainee(model, optimizer))  # type: ignore[arg-type]
    config = replace(config, strict_load=False)
    Checkpoints(config, tmp_path / "b").restore(PlainTrainee(model, optimizer))  # type: ignore[arg-type]
    assert "not loaded, only in the model: value_head.bias" in capsys.readouterr().out


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


def test_a_start_that_cannot_go_well_is_refused_before_a_model_exists(tmp_path: Path) -> None:
    def check(**fields: Any) -> None:
        check_start_of(small_config(tmp_path, **fields), tmp_path)

    check()
    with pytest.raises(UserError, match="--resume=must"):
        check(resume="must")
    with pytest.raises(UserError, match="there is no such folder"):
        check(ckpt_load_path=str(tmp_path / "typo"))
    run(tmp_path, num_steps=4)
    check(resume="must")
    with pytest.raises(UserError, match="--resume=never"):
        check(resume="never")
    with pytest.raises(ConfigError, match="--hidden_size=32"):
        check(hidden_size=32)
    with pytest.raises(ConfigError, match="--hidden_size=32"):
        check(hidden_size=32, ckpt_save_path=str(tmp_path / "other"), ckpt_load_path=str(tmp_path))
    flip(tmp_path / "checkpoints" / "step_4" / "facts.json")
    check()
    with pytest.raises(UserError, match=r"facts\.json: differs"):
        check(resume="must")


def test_a_run_prints_where_it_starts_and_does_not_ignore_a_path_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(log_dir: Path, **fields: Any) -> str:
        capsys.readouterr()
        run(log_dir, **fields)
        return capsys.readouterr().out

    assert "starting at step 0 from initial weights" in printed(tmp_path / "other", num_steps=2)
    path = tmp_path / "other" / "checkpoints" / "step_2"
    assert f"starting at step 0 from {path}" in printed(tmp_path / "a", num_steps=2, ckpt_load_path=str(path))
    again = printed(tmp_path / "a", num_steps=4, ckpt_load_path=str(path))
    assert f"continuing from {tmp_path / 'a' / 'checkpoints' / 'step_2'}" in again
    assert f"--ckpt_load_path={path} is not read: only a run without a checkpoint of its own starts there" in again
    for own in ("a", "a/checkpoints"):  # the checkpoint that it continues from
        assert "is not read" not in printed(tmp_path / "a", num_steps=4, ckpt_load_path=str(tmp_path / own))
    own = str(tmp_path / "empty" / "checkpoints")
    for _ in range(2):  # a first start, and one that was killed before its first save
        first = printed(tmp_path / "empty", num_steps=2, ckpt_load_path=own, checkpoint_interval=0)
        assert f"--ckpt_load_path={own} is this run's own folder and has no checkpoint" in first
        assert "starting at step 0 from initial weights" in first
        Path(own).mkdir(exist_ok=True)
    assert "is not read" not in printed(tmp_path / "empty", num_steps=2, ckpt_load_path=own, load_step=True)
    assert f"continuing from {own}/step_2" in printed(tmp_path / "empty", num_steps=4, ckpt_load_path=own)
    with pytest.raises(ConfigError, match="--hidden_size=32"):  # a setting that a run cannot change
        fields = {"ckpt_load_path": own, "load_step": True, "hidden_size": 32}
        check_start_of(small_config(tmp_path / "new", **fields), tmp_path / "new")
    for folder in ("a", "new"):
        with pytest.raises(UserError, match=r"--ckpt_load_path=.*typo: there is no such folder"):
            check_start_of(small_config(tmp_path / folder, ckpt_load_path=str(tmp_path / "typo")), tmp_path / folder)


def test_adapters_continue_with_the_modules_that_their_checkpoint_has(tmp_path: Path) -> None:
    """norm was the last norm once: such a checkpoint continues as model.norm."""
    run(tmp_path / "base", num_steps=2)
    fields = {"lora_rank": 2, "ckpt_load_path": str(tmp_path / "base"), "num_steps": 4}
    train(small_config(tmp_path / "run", **fields, lora_modules_to_save="model.norm"), lambda step, loss: None)
    checkpoint = newest_checkpoint(tmp_path / "run")
    facts = json.loads((checkpoint / "facts.json").read_text())
    facts["config"]["lora_modules_to_save"] = "norm"
    manifest = open_checkpoint(checkpoint).manifest
    for name in ("facts.json", "manifest.json", "COMMITTED"):
        (checkpoint / name).unlink()
    write_commit(checkpoint, manifest, Facts(**facts))
    check_start_of(small_config(tmp_path / "run", **fields, lora_modules_to_save="model.norm"), tmp_path / "run")
    with pytest.raises(UserError, match=r"has no .*norm.*this run trains; the last norm alone is .*=model\.norm"):
        check_start_of(small_config(tmp_path / "run", **fields, lora_modules_to_save="norm"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--lora_modules_to_save=lm_head .*trained with norm"):
        check_start_of(small_config(tmp_path / "run", **fields, lora_modules_to_save="lm_head"), tmp_path / "run")


def test_another_model_is_refused_with_the_field_and_both_values(tmp_path: Path) -> None:
    run(tmp_path, num_steps=2)
    with pytest.raises(ConfigError, match=r"(?s)--hidden_size=32 .*trained with 16.*--norm_eps=0.001 .*with 1e-05"):
        run(tmp_path, hidden_size=32, norm_eps=1e-3)
    with pytest.raises(ConfigError, match=r"--num_layers=3 .*ckpt_load_path has 2"):
        run(tmp_path / "b", ckpt_load_path=str(tmp_path), num_layers=3)


def test_another_rotary_base_needs_strict_load_off(tmp_path: Path) -> None:
    run(tmp_path, num_steps=2)
    with pytest.raises(ConfigError, match="rope_theta"):
        run(tmp_path / "b", ckpt_load_path=str(tmp_path), rope_theta=5e5)
    assert len(run(tmp_path / "b", ckpt_load_path=str(tmp_path), rope_theta=5e5, strict_load=False)) == 8


def test_another_learning_rate_needs_its_flag(tmp_path: Path) -> None:
    run(tmp_path, num_steps=2)
    with pytest.raises(ConfigError, match=r"--learning_rate=0.001 .*override_lr_on_resume"):
        run(tmp_path, learning_rate=1e-3)
    assert len(run(tmp_path, learning_rate=1e-3, override_lr_on_resume=True)) == 6


def test_other_changes_are_made_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, num_steps=2)
    run(tmp_path, num_steps=4, weight_decay=0.2, report_interval=7)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since step_2"))
    assert line == "changed since step_2: weight_decay 0.1 -> 0.2, num_steps 2 -> 4"


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
    assert f"learning rate of step 5: 0.0001 -> 0.000378{reason}" in printed(num_steps=8)
    kept = {"log_dir": str(tmp_path / "kept"), "lr_decay_steps": 4, **fields}
    assert not problems(small_config(tmp_path, **kept, use_dummy_dataset=True), CHECKS)
    run(tmp_path, num_steps=8, **kept)
    run(tmp_path, num_steps=12, **kept)
    assert "learning rate" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--lr_decay_steps=5 .* was trained with 4"):
        run(tmp_path, num_steps=12, **{**kept, "lr_decay_steps": 5})


@needs("huggingface", "lora")
@pytest.mark.parametrize("is_ours", [True, False])
def test_adapters_do_not_continue_on_other_weights_than_they_were_trained_on(tmp_path: Path, is_ours: bool) -> None:
    base, log_dir = tmp_path / "base", tmp_path / "lora"
    run(base, num_steps=2)
    from pretraining.tools.convert.convert import to_huggingface

    exported = to_huggingface(open_checkpoint(newest_checkpoint(base)), tmp_path / "hf")
    config = small_config(log_dir, num_steps=2, lora_rank=2, ckpt_load_path=str(base if is_ours else exported))
    train(config, lambda step, loss: None)
    shapes = parameter_shapes(config)
    check_starting_point(config, log_dir, shapes)
    assert base_weights(open_checkpoint(newest_checkpoint(log_dir)), config)
    if is_ours:
        run(base, num_steps=4)
    else:
        tensors = load_file(exported / "model.safetensors")
        tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] += 1
        save_file(tensors, exported / "model.safetensors")
    with pytest.raises(UserError, match=r"--ckpt_load_path=.* not the weights that the adapters of .*step_2"):
        check_starting_point(config, log_dir, shapes)
    with pytest.raises(UserError, match=r"--ckpt_load_path=.* put those there"):
        base_weights(open_checkpoint(newest_checkpoint(log_dir)), config)
    check_starting_point(replace(config, strict_load=False), log_dir, shapes)


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
    first = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
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
    parent = subprocess.run([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, check=True)
    orphan = int(parent.stdout)
    try:
        FolderLock(tmp_path).release()
    finally:
        subprocess.run(["kill", "-9", str(orphan)], check=True)


# ---- Failures


def test_a_failing_disk_is_reported_and_stops_the_run_after_so_many_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, num_steps=2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SaveFailedError, match=r"2 saves in a row failed, .*No space left"):
        run(tmp_path, ckpt_max_failures=2)
    assert capsys.readouterr().out.count("earlier checkpoints are untouched") == 2
    monkeypatch.undo()
    assert steps(tmp_path) == [2]
    assert len(run(tmp_path)) == 6


@pytest.mark.parametrize("background", [False, True])
def test_a_run_whose_last_save_fails_does_not_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(SaveFailedError, match="the last save"):
        run(tmp_path, checkpoint_interval=100, async_checkpointing=background)


def test_newest_checkpoint_takes_a_run_a_folder_or_a_step(tmp_path: Path) -> None:
    run(tmp_path)
    folder = tmp_path / "checkpoints"
    assert {newest_checkpoint(path) for path in (tmp_path, folder, folder / "step_8")} == {folder / "step_8"}


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_run_on_dummy_data_does_not_continue_one_on_real_data_nor_the_reverse(tmp_path: Path, is_dummy: bool) -> None:
    run(tmp_path, num_steps=2, use_dummy_dataset=is_dummy)
    check_start_of(small_config(tmp_path, use_dummy_dataset=is_dummy), tmp_path)
    other = small_config(tmp_path, use_dummy_dataset=not is_dummy, checkpoint_interval=0)
    with pytest.raises(ConfigError, match=f"--use_dummy_dataset={not is_dummy} .*{is_dummy}; .*--run_name"):
        check_start_of(other, tmp_path)


def test_another_optimizer_takes_weights_alone_from_a_checkpoint_and_none_from_its_own_run(tmp_path: Path) -> None:
    run(tmp_path, num_steps=2)
    source = str(tmp_path / "checkpoints")
    other = small_config(tmp_path / "other", num_steps=4, optimizer="adam", ckpt_load_path=source)
    with pytest.raises(ConfigError, match=r"--optimizer=adam .*has the state of adamw; --load_weights_only=True"):
        check_start_of(other, tmp_path / "other")
    check_start_of(replace(other, load_weights_only=True), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"--optimizer=adam .*trained with adamw"):
        check_start_of(small_config(tmp_path, num_steps=4, optimizer="adam"), tmp_path)
