"""A run starts from other weights, continues adapters on theirs, and refuses those that it cannot take."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("pretraining.extensions.other_weights")

from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.manifest import Facts, open_checkpoint, write_commit
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.checkpoint.store import is_weight
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.extensions.checkpoints import newest_checkpoint, read_tensors
from pretraining.run.start import parameter_shapes
from pretraining.tools.convert.convert import main as convert
from pretraining.tools.convert.convert import to_huggingface
from pretraining.tools.generate import base_weights, load_model
from tests.checkpoint.small_run import PlainTrainee, open_run, small_config, train
from tests.checkpoint.test_checkpoints import check_start_of, refuses, run
from tests.selection import needs


def restored(config: TrainConfig) -> tuple[PlainTrainee, Facts | None]:
    """What a new run starts from."""
    trainee = open_run(config)
    return trainee, Checkpoints(config, Path(config.log_dir)).restore(trainee)  # type: ignore[arg-type]


def test_without_the_folder_a_path_to_start_from_is_refused() -> None:
    with pytest.raises(UserError, match="--ckpt_load_path=x: needs pretraining/extensions/other_weights, which is not"):
        TrainConfig(ckpt_load_path="x").start(Path("checkpoints"))


def test_another_model_than_that_of_the_weights_is_refused(tmp_path: Path) -> None:
    run(tmp_path, num_steps=2)
    with pytest.raises(ConfigError, match=r"--num_layers=3 .*ckpt_load_path has 2"):
        run(tmp_path / "b", ckpt_load_path=str(tmp_path), num_layers=3)
    refuses("--hidden_size=32", tmp_path / "b", ckpt_load_path=str(tmp_path), hidden_size=32)


def test_another_run_s_checkpoint_gives_weights_and_moments_at_step_0(tmp_path: Path) -> None:
    run(tmp_path / "a", num_steps=4)
    for path in (tmp_path / "a", tmp_path / "a" / "checkpoints", tmp_path / "a" / "checkpoints" / "step_4"):
        trainee, facts = restored(small_config(tmp_path / "b", ckpt_load_path=str(path), learning_rate=1e-5))
        assert facts and (facts.step, facts.tokens_seen, facts.data) == (0, 0, None)
        saved = read_tensors(tmp_path / "a" / "checkpoints" / "step_4")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in trainee.state().items())


def test_a_change_that_load_step_refuses_is_accepted_without_it(tmp_path: Path) -> None:
    run(tmp_path / "a", num_steps=2)
    fields: dict[str, Any] = {"ckpt_load_path": str(tmp_path / "a"), "norm_eps": 1e-3, "strict_load": False}
    refuses(r"--norm_eps=0\.001 .*; use that, or --load_step=False", tmp_path / "b", **fields, load_step=True)
    assert run(tmp_path / "b", **fields, num_steps=1)
    fields["norm_eps"] = 1e-2
    refuses(r"--norm_eps=0\.01 .*; use that, or another --run_name", tmp_path / "b", **fields, load_step=True)


def test_load_weights_only_leaves_the_optimizer_fresh(tmp_path: Path) -> None:
    run(tmp_path / "a", num_steps=4)
    trainee, _ = restored(small_config(tmp_path / "b", ckpt_load_path=str(tmp_path / "a"), load_weights_only=True))
    state, saved = trainee.state(), read_tensors(tmp_path / "a" / "checkpoints" / "step_4")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.items() if is_weight(name))
    assert not any(tensor.any() for name, tensor in state.items() if not is_weight(name))


def test_the_run_s_own_checkpoint_wins_over_ckpt_load_path(tmp_path: Path) -> None:
    run(tmp_path / "a", num_steps=2)
    whole = run(tmp_path / "b", num_steps=8)
    run(tmp_path / "c", num_steps=4)
    assert run(tmp_path / "c", ckpt_load_path=str(tmp_path / "a")) == whole[4:]
    assert run(tmp_path / "d", ckpt_load_path=str(tmp_path / "a"), load_step=True) == whole[2:]
    ninth = run(tmp_path / "b", num_steps=9)  # its own checkpoint wins here, too
    assert run(tmp_path / "c", num_steps=9, ckpt_load_path=str(tmp_path / "a"), load_step=True) == ninth


@needs("lora")
def test_an_adapter_does_not_continue_without_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, other, adapter = (tmp_path / name for name in ("base", "other", "adapter"))
    run(base, num_steps=2)
    run(other, num_steps=2, seed=1)
    fields: dict[str, Any] = {"lora_rank": 2, "ckpt_load_path": str(base)}
    run(adapter, **fields, num_steps=2)
    refuses(rf"--ckpt_load_path= .*the adapter was trained on {base}; use that", adapter, lora_rank=2)
    run(adapter, **fields, num_steps=4)
    printed = capsys.readouterr().out
    assert f"the frozen weights are those of {base}/checkpoints/step_2" in printed and "ckpt_load_path" not in printed
    run(adapter, **{**fields, "ckpt_load_path": str(other)})
    assert f"ckpt_load_path {base} -> {other}" in capsys.readouterr().out
    refuses("--num_layers=3", adapter, **fields, num_layers=3)  # some frozen weights would be the initial ones
    shutil.rmtree(base)
    refuses("there is no such folder", adapter, **fields)


def test_strict_load_names_what_differs_and_can_be_told_to_let_it_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", num_steps=2)
    config = small_config(tmp_path / "b", ckpt_load_path=str(tmp_path / "a"), load_weights_only=True)
    trainee = open_run(config)
    trainee.model.add_module("value_head", torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"only in the model: value_head\.bias, value_head\.weight"):
        Checkpoints(config, tmp_path / "b").restore(trainee)  # type: ignore[arg-type]
    config = replace(config, strict_load=False)
    Checkpoints(config, tmp_path / "b").restore(trainee)  # type: ignore[arg-type]
    assert "not loaded, only in the model: value_head.bias" in capsys.readouterr().out
    for number in range(4):
        trainee.model.add_module(f"head{number}", torch.nn.Linear(2, 2))
    Checkpoints(config, tmp_path / "c").restore(trainee)  # type: ignore[arg-type]
    assert re.search(r"only in the model: (head\d\.\w+, ){4}head2\.bias and 5 others$", capsys.readouterr().out, re.M)


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
    # a setting that a run cannot change
    refuses("--hidden_size=32", tmp_path / "new", ckpt_load_path=own, load_step=True, hidden_size=32)
    for folder in (tmp_path / "a", tmp_path / "new"):
        refuses(r"--ckpt_load_path=.*typo: there is no such folder", folder, ckpt_load_path=str(tmp_path / "typo"))


@needs("lora")
def test_adapters_continue_with_the_modules_that_their_checkpoint_has(tmp_path: Path) -> None:
    """norm was the last norm once: such a checkpoint continues as model.norm."""
    run(tmp_path / "base", num_steps=2)
    fields: dict[str, Any] = {"lora_rank": 2, "ckpt_load_path": str(tmp_path / "base"), "num_steps": 4}
    run(tmp_path / "run", **fields, lora_modules_to_save="model.norm")
    checkpoint = newest_checkpoint(tmp_path / "run")
    facts = json.loads((checkpoint / "facts.json").read_text())
    facts["config"]["lora_modules_to_save"] = "norm"
    manifest = open_checkpoint(checkpoint).manifest
    for name in ("facts.json", "manifest.json", "COMMITTED"):
        (checkpoint / name).unlink()
    write_commit(checkpoint, manifest, Facts(**facts))
    check_start_of(small_config(tmp_path / "run", **fields, lora_modules_to_save="model.norm"), tmp_path / "run")
    for modules, words in (
        ("norm", r"has no .*norm.*this run trains; the last norm alone is .*=model\.norm"),
        ("lm_head", "--lora_modules_to_save=lm_head .*trained with norm"),
    ):
        refuses(words, tmp_path / "run", **fields, lora_modules_to_save=modules)


@needs("lora")
@pytest.mark.parametrize("fields", [{}, {"load_step": True}, {"lora_rank": 0}])
def test_adapters_alone_are_no_weights_to_start_from(fields: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, num_steps=2, lora_rank=2)
    words = r"step_2: has adapters without the weights .*; --lora_load_path takes what"
    refuses(words, tmp_path / "b", **{"lora_rank": 2, "ckpt_load_path": str(tmp_path), **fields})


def write_base(folder: Path, is_ours: bool, **fields: Any) -> Path:
    """Train what adapters are trained on; return its folder, or that of its export to Hugging Face's format."""
    run(folder, num_steps=2, **fields)
    exported = to_huggingface(open_checkpoint(newest_checkpoint(folder)), folder.with_name("hf"))
    return folder if is_ours else exported


@needs("huggingface", "lora")
@pytest.mark.parametrize("is_ours", [True, False])
def test_adapters_of_a_model_with_a_tied_head_are_read_with_their_base(tmp_path: Path, is_ours: bool) -> None:
    tied, log_dir = {"tie_word_embeddings": True}, tmp_path / "lora"
    base = write_base(tmp_path / "base", is_ours, **tied)
    fields: dict[str, Any] = {"num_steps": 2, "lora_rank": 2, "ckpt_load_path": str(base), **tied}
    run(log_dir, **fields)
    config, checkpoint = small_config(log_dir, **fields), open_checkpoint(newest_checkpoint(log_dir))
    load_model(config, {**base_weights(checkpoint, config), **read_tensors(checkpoint, is_weight)})


@needs("huggingface", "lora")
@pytest.mark.parametrize("is_ours", [True, False])
def test_adapters_do_not_continue_on_other_weights_than_they_were_trained_on(tmp_path: Path, is_ours: bool) -> None:
    base, log_dir = write_base(tmp_path / "base", is_ours), tmp_path / "lora"
    config = small_config(log_dir, num_steps=2, lora_rank=2, ckpt_load_path=str(base))
    train(config, lambda step, loss: None)
    shapes = parameter_shapes(config)
    check_starting_point(config, log_dir, shapes)
    assert base_weights(open_checkpoint(newest_checkpoint(log_dir)), config)
    if is_ours:
        run(base, num_steps=4)
    else:
        tensors = load_file(base / "model.safetensors")
        tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] += 1
        save_file(tensors, base / "model.safetensors")
    with pytest.raises(UserError, match=r"--ckpt_load_path=.* not the weights that the adapters of .*step_2"):
        check_starting_point(config, log_dir, shapes)
    with pytest.raises(UserError, match=r"--ckpt_load_path=.* put those there"):
        base_weights(open_checkpoint(newest_checkpoint(log_dir)), config)
    check_starting_point(replace(config, strict_load=False), log_dir, shapes)
    base.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"^ckpt_load_path=.*the adapters of .*step_2 .* not there; put them back"):
        base_weights(open_checkpoint(newest_checkpoint(log_dir)), config)


@needs("optimizers")
def test_another_optimizer_takes_weights_alone_from_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, num_steps=2)
    fields: dict[str, Any] = {"num_steps": 4, "optimizer": "lion", "ckpt_load_path": str(tmp_path / "checkpoints")}
    refuses("--optimizer=lion .*has the state of adamw; --load_weights_only=True", tmp_path / "other", **fields)
    check_start_of(small_config(tmp_path / "other", **fields, load_weights_only=True), tmp_path / "other")


@pytest.mark.slow
@needs("optimizers", "lora")
def test_an_adapter_starts_on_a_run_of_any_optimizer_and_keeps_its_scale(tmp_path: Path) -> None:
    run(tmp_path / "base", num_steps=2, optimizer="muon")
    fields: dict[str, Any] = {"ckpt_load_path": str(tmp_path / "base"), "lora_rank": 2, "lora_alpha": 32.0}
    assert run(tmp_path / "lora", **fields, num_steps=2)
    assert run(tmp_path / "lora", **fields, num_steps=4)
    for name, value in (("lora_alpha", 16.0), ("lora_use_rslora", True)):
        refuses(rf"--{name}={value} .*; use that, or another --run_name", tmp_path / "lora", **{**fields, name: value})
    whole = {**fields, "lora_save_mode": "base_and_adapter"}
    assert run(tmp_path / "whole", **whole, num_steps=2)
    whole |= {"ckpt_load_path": str(tmp_path / "whole"), "lora_alpha": 16.0}
    refuses(r"--lora_alpha=16\.0 .*path has 32\.0; use that, or --strict_load", tmp_path / "new", **whole)


@needs("optimizers", "huggingface")
def test_a_checkpoint_of_an_optimizer_that_the_core_lacks_starts_other_runs_and_is_exported(tmp_path: Path) -> None:
    run(tmp_path, num_steps=2, optimizer="muon")
    for optimizer, weights_only in (("muon", False), ("adamw", True)):
        fields = {"optimizer": optimizer, "load_weights_only": weights_only, "ckpt_load_path": str(tmp_path)}
        check_start_of(small_config(tmp_path / optimizer, **fields), tmp_path / optimizer)
    assert convert([str(tmp_path), str(tmp_path / "hf")]) == 0
