"""An adapter trained on a base, stopped and continued, and taken away in PEFT's and in Hugging Face's format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining.checkpoint.convert import to_huggingface
from pretraining.checkpoint.huggingface import open_source
from pretraining.checkpoint.store import is_weight, read_tensors
from pretraining.config.lora import is_adapter
from pretraining.config.training import TrainConfig
from pretraining.generate import base_weights, load_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOY = (
    *("--model_variant=custom", "--vocab_size=64", "--hidden_size=32", "--num_layers=2", "--num_attention_heads=4"),
    *("--intermediate_size=48", "--seq_length=32", "--use_dummy_dataset", "--batch_size=4", "--mixed_precision=False"),
    *("--engine=torch", "--device=cpu", "--report_interval=1", "--learning_rate=0.01", "--lr_schedule=constant"),
)
LORA = ("--lora_rank=4", "--lora_target_modules=q_proj,v_proj,down_proj", "--lora_dropout=0.1")


def train(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """The records of a run."""
    command = [sys.executable, "main_training.py", *TOY, f"--log_dir={folder}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "checkpoints" / f"step_{step}", is_weight)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    train(folder, "--num_steps=6", "--checkpoint_interval=6")
    return folder


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    """The adapter alone, trained without a stop."""
    folder = base.parent / "tuned"
    train(folder, *LORA, "--num_steps=8", "--checkpoint_interval=4", f"--ckpt_load_path={base}")
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_first_loss_is_the_base_s_and_it_falls(base: Path, tuned: Path) -> None:
    went_on = base.parent / "went_on"
    train(went_on, "--num_steps=1", "--checkpoint_interval=1", f"--ckpt_load_path={base}", "--load_weights_only")
    assert losses(tuned)[0] == pytest.approx(losses(went_on)[0], abs=1e-6)
    assert losses(tuned)[-1] < losses(tuned)[0]


def test_a_checkpoint_holds_the_adapter_alone(base: Path, tuned: Path) -> None:
    assert all(map(is_adapter, weights(tuned, 8)))
    sizes = [sum(file.stat().st_size for file in run.glob("checkpoints/step_*/*")) for run in (tuned, base)]
    assert sizes[0] < 2 * sizes[1]  # two checkpoints, moments and manifests included


def test_a_stopped_run_goes_on_bit_for_bit_with_dropout(base: Path, tuned: Path) -> None:
    folder = base.parent / "halves"
    flags = (*LORA, "--checkpoint_interval=4", f"--ckpt_load_path={base}")
    train(folder, *flags, "--num_steps=4")
    train(folder, *flags, "--num_steps=8")
    assert losses(folder) == losses(tuned)
    left, right = weights(tuned, 8), weights(folder, 8)
    assert left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_with_the_base_in_the_checkpoint_it_is_unchanged_bit_for_bit_and_merges(base: Path, tuned: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = base.parent / "merged"
    train(
        folder, *LORA, "--num_steps=8", "--checkpoint_interval=4", f"--ckpt_load_path={base}", "--lora_save_mode=merged"
    )
    assert losses(folder) == losses(tuned)
    frozen, held = weights(base, 6), weights(folder, 8)
    assert all(torch.equal(tensor, held[name]) for name, tensor in frozen.items())
    config = TrainConfig(**json.loads((tuned / "config.json").read_text()))
    ours = load_model(config, {**base_weights(config), **weights(tuned, 8)})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(to_huggingface(open_source(folder), folder / "hf"))
    tokens = torch.randint(0, 64, (2, 20))
    torch.testing.assert_close(theirs.float()(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)


def test_the_adapter_loads_in_peft_and_back(base: Path, tuned: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    adapter = to_huggingface(open_source(tuned), tuned / "adapter")
    below = to_huggingface(open_source(base), base / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(below)
    theirs = peft.PeftModel.from_pretrained(model, str(adapter)).float().eval()
    config = TrainConfig(**json.loads((tuned / "config.json").read_text()))
    ours = load_model(config, {**base_weights(config), **weights(tuned, 8)})
    tokens = torch.randint(0, 64, (2, 20))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)
    # And back: a run that starts from PEFT's files on Hugging Face's weights sees the same function
    again = base.parent / "again"
    flags = (*LORA[:2], "--num_steps=1", "--checkpoint_interval=0", f"--ckpt_load_path={below}")
    train(again, *flags, f"--lora_load_path={adapter}")
    whole = base.parent / "whole"
    train(whole, "--num_steps=1", "--checkpoint_interval=0", f"--ckpt_load_path={base.parent / 'merged' / 'hf'}")
    assert losses(again)[0] == pytest.approx(losses(whole)[0], abs=1e-5)
