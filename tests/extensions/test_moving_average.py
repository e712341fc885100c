"""The moving average of the weights is the one that the saved weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from main_training import CONFIGURATION
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.extensions.checkpoints import read_tensors
from pretraining.models.init import build_model
from tests.end_to_end.small import FLAGS, finish, train
from tests.processes import Refusal
from tests.selection import needs_xla

main = pytest.importorskip("pretraining.tools.convert.convert").main
DECAY, STEPS = 0.75, 4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("xla", marks=[pytest.mark.exhaustive, needs_xla])])
def test_the_moving_average_follows_every_update_and_is_exported(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_moving_average_that_the_other_run_lacks_begins_at_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("pretraining.extensions.other_weights")
    fields: dict[str, Any] = {"sharding_strategy": "ddp", "checkpoint_interval": 1, "num_steps": 1}
    train(tmp_path / "first", **fields)
    other = {"ckpt_load_path": tmp_path / "first", "ema_decay": DECAY, "learning_rate": 1e-3}
    train(tmp_path / "second", **fields, **other)
    before, after = (read_tensors(tmp_path / run / "checkpoints" / "step_1") for run in ("first", "second"))
    for name in filter(is_weight, before):
        average = DECAY * before[name] + (1 - DECAY) * after[name]
        assert torch.allclose(after[f"optimizer.ema.{name}"], average, atol=1e-6), name
    assert after["optimizer.step"] == 2  # with the other run's moments


def test_a_run_without_a_moving_average_has_none_to_export(tmp_path: Path, refusal: Refusal) -> None:
    golden = Path(__file__).parents[1] / "golden" / "checkpoint" / "step_4"
    error = refusal(main, [str(golden), str(tmp_path / "hf"), "--use_ema"])
    assert "has no moving averages of weights; the run needs --ema_decay" in error
