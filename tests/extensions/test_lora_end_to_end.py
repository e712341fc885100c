"""An adapter is trained on a base, stopped and continued, and exported in PEFT's and in Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("pretraining.extensions.huggingface")
pytest.importorskip("pretraining.extensions.other_weights")

from main_training import CONFIGURATION
from main_training import train as run_training
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from pretraining.extensions.checkpoints import open_any_checkpoint, read_tensors
from pretraining.extensions.lora.targets import is_adapter
from pretraining.models.llama import Llama
from pretraining.models.ops import next_token_loss
from pretraining.tools.convert.convert import to_huggingface
from pretraining.tools.generate import base_weights, load_model
from tests.end_to_end.small import reports
from tests.processes import call
from tests.warm import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = "--model_variant=custom --vocab_size=64 --hidden_size=32 --num_layers=2 --num_attention_heads=4"
SIZES = "--intermediate_size=48 --seq_length=32 --use_dummy_dataset --batch_size=4 --mixed_precision=False"
RUN = "--engine=torch --device=cpu --report_interval=1 --learning_rate=0.01 --lr_schedule=constant"
TOY = f"{MODEL} {SIZES} {RUN}".split()
LORA = ("--lora_rank=4", "--lora_target_modules=q_proj,v_proj,down_proj", "--lora_dropout=0.1")


def train(folder: Path, *flags: str) -> None:
    """Run the script."""
    call([*python(), "main_training.py", *TOY, f"--log_dir={folder}", *flags])


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "checkpoints" / f"step_{step}", is_weight)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    train(folder, "--num_steps=6", "--checkpoint_interval=6")
    return folder


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    """Return the folder of a run that trained the adapter alone and stopped once on the way."""
    folder = base.parent / "tuned"
    flags = (*LORA, "--checkpoint_interval=4", f"--ckpt_load_path={base}")
    train(folder, *flags, "--num_steps=4")
    train(folder, *flags, "--num_steps=8")
    return folder


@pytest.fixture(scope="module")
def merged(base: Path) -> Path:
    """Return the folder of the same run without a stop, which saved the base with the adapter."""
    folder = base.parent / "merged"
    train(
        folder, *LORA, "--num_steps=8", "--checkpoint_interval=8", f"--ckpt_load_path={base}", "--lora_save_mode=merged"
    )
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in reports(folder).values()]


def adapted_model(run: Path) -> tuple[TrainConfig, Llama]:
    """Return the base with the adapter of the run's last checkpoint."""
    config = CONFIGURATION(**json.loads((run / "config.json").read_text()))
    checkpoint = open_checkpoint(run / "checkpoints" / "step_8")
    return config, load_model(config, {**base_weights(checkpoint, config), **weights(run, 8)})


@torch.inference_mode()
def first_loss(config: TrainConfig, model: Llama) -> float:
    """Return the loss of the first global batch."""
    batch = {name: torch.from_numpy(array).long() for name, array in open_stream(config).batch(0).items()}
    return next_token_loss(model(batch["tokens"]), batch["labels"]).item() / batch["labels"].numel()


def test_the_first_loss_is_that_of_the_base_and_it_falls(base: Path, tuned: Path) -> None:
    config = CONFIGURATION(**json.loads((base / "config.json").read_text()))
    assert losses(tuned)[0] == pytest.approx(first_loss(config, load_model(config, weights(base, 6))), abs=1e-6)
    assert losses(tuned)[-1] < losses(tuned)[0]


def test_a_checkpoint_holds_the_adapter_alone(base: Path, tuned: Path) -> None:
    assert all(map(is_adapter, weights(tuned, 8)))
    sizes = [sum(file.stat().st_size for file in run.glob("checkpoints/step_*/*")) for run in (tuned, base)]
    assert sizes[0] < 2 * sizes[1]  # two checkpoints, moments and manifests included


def test_a_stopped_run_continues_bit_for_bit_with_dropout(merged: Path, tuned: Path) -> None:
    assert losses(tuned) == losses(merged)
    stopped, uninterrupted = weights(tuned, 8), weights(merged, 8)
    assert all(torch.equal(tensor, uninterrupted[name]) for name, tensor in stopped.items())


def test_with_the_base_in_the_checkpoint_it_is_unchanged_bit_for_bit_and_merges(
    base: Path, tuned: Path, merged: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    frozen, saved = weights(base, 6), weights(merged, 8)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in frozen.items())
    exported = to_huggingface(open_any_checkpoint(merged), merged / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.randint(0, 64, (2, 20))
    ours = adapted_model(tuned)[1](tokens)
    torch.testing.assert_close(theirs.float()(tokens).logits, ours, atol=1e-5, rtol=1e-5)


def test_trained_biases_load_in_peft_and_back(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    toy = dict(flag.removeprefix("--").split("=", 1) for flag in TOY if "=" in flag)
    toy |= {"use_dummy_dataset": "True", "attn_bias": "True", "checkpoint_interval": "9"}

    def run(name: str, **flags: str) -> Path:
        assert run_training({**toy, "log_dir": str(tmp_path / name), **flags}).code == 0
        return to_huggingface(open_any_checkpoint(tmp_path / name), tmp_path / f"{name}_exported")

    base = run("base", num_steps="1")
    lora = {"lora_rank": "2", "lora_bias": "all", "ckpt_load_path": str(base)}
    adapter = run("tuned", num_steps="8", **lora)
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), str(adapter))
    _, ours = adapted_model(tmp_path / "tuned")
    tokens = torch.randint(0, 64, (2, 20))
    torch.testing.assert_close(theirs.float().eval()(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)
    run("again", num_steps="1", learning_rate="1e-30", lora_load_path=str(adapter), **lora)
    for name, tensor in weights(tmp_path / "tuned", 8).items():
        assert torch.equal(tensor, weights(tmp_path / "again", 1)[name]), name
