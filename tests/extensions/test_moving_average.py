"""The moving average of the weights is the one that the saved weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from main_training import CONFIGURATION, configure
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight, read_tensors
from pretraining.config.errors import ConfigError
from pretraining.models.init import build_model
from pretraining.tools.convert.convert import main
from tests.end_to_end.small import FLAGS, finish
from tests.tools.importing.test_rules import config as imported

DECAY, STEPS = 0.75, 4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("xla", marks=pytest.mark.exhaustive)])
def test_the_moving_average_follows_every_update_and_is_exported(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if engine == "xla":
        pytest.importorskip("torch_xla")
    fields: dict[str, Any] = {"engine": engine, "num_steps": STEPS, "checkpoint_interval": 1, "use_dummy_dataset": True}
    fields |= {"ema_decay": DECAY, "lr_decay_steps": STEPS}
    for steps in (2, STEPS) if engine == "torch" else (STEPS,):  # the second run continues the first
        finish(tmp_path / "run", devices=2, **{**fields, "num_steps": steps})
    checkpoints = tmp_path / "run" / "checkpoints"
    config = CONFIGURATION(**{**FLAGS, **fields})
    average = {name: weight.detach() for name, weight in build_model(config).named_parameters()}
    for step in range(1, STEPS + 1):
        weights = read_tensors(open_checkpoint(checkpoints / f"step_{step}"), is_weight)
        average = {name: DECAY * average[name] + (1 - DECAY) * weight for name, weight in weights.items()}
    assert main([str(tmp_path / "run"), str(tmp_path / "hf"), "--use_ema"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == average.keys()
    for name, tensor in exported.items():
        assert torch.allclose(tensor, average[name], atol=1e-6), name
        assert not torch.allclose(tensor, weights[name], atol=1e-4), name


def test_an_average_that_would_not_move_in_bf16_is_refused() -> None:
    fields = {"use_dummy_dataset": True, "precision": "manual", "master_weights": False, "ema_decay": 0.9}
    with pytest.raises(ConfigError, match=r"--ema_decay=0.9 .*stochastic_rounding=True"):
        configure(fields)
    assert configure({**fields, "stochastic_rounding": True}).ema_decay == 0.9


def test_a_run_has_the_default_name_that_it_had_when_this_setting_stood_in_the_core() -> None:
    fields = {"ema_decay": 0.9, "optimizer": "muon", "optimizer_args": "momentum=0.9", "tie_word_embeddings": True}
    assert CONFIGURATION(**fields).default_run_name == "llama2_7b-431280"


def test_nemo_s_moving_average_is_imported(tmp_path: Path) -> None:
    enabled, other = {"exp_manager.ema.enable": True}, {"exp_manager.ema.decay": 0.9999}
    decays = [vars(imported("nemo", tmp_path, keys))["ema_decay"] for keys in (enabled, {**enabled, **other}, other)]
    assert decays == [0.999, 0.9999, 0]  # the first is NeMo's default


def test_a_run_without_a_moving_average_has_none_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parents[1] / "golden" / "checkpoint" / "step_4"
    assert main([str(golden), str(tmp_path / "hf"), "--use_ema"]) == 2
    assert "has no moving averages of weights; the run needs --ema_decay" in capsys.readouterr().err
