"""A run through another trainer's file is the run with the equivalent flags, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.small import ROOT, environment
from tests.importing.files import put, tree, write

pytestmark = pytest.mark.slow

# What the three files say, as somebody would write it here. One CPU process: accumulation is derived, 16 passes a step.
FLAGS = {
    "model_variant": "custom",
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "max_position_embeddings": 32,
    "norm_eps": 1e-6,
    "init_std": 0.03,
    "mixed_precision": False,
    "seq_length": 32,
    "batch_size": 2,
    "global_batch_size": 32,
    "num_steps": 12,
    "learning_rate": 3e-3,
    "min_lr": 3e-4,
    "adam_beta2": 0.98,
    "weight_decay": 0.05,
    "grad_clip_thresh": 0.5,
    "seed": 7,
    "num_workers": 2,
    "report_interval": 1,
}
CURVES = {
    "nemo": {"lr_schedule": "cosine", "lr_warmup_steps": 3},
    "nxdt": {"lr_schedule": "cosine", "lr_warmup_steps": 3},
    "neox": {"lr_schedule": "neox_cosine", "lr_warmup_steps": 3},
}
HERE = ("--engine=torch", "--device=cpu", "--use_dummy_dataset", "--vocab_size=100", "--checkpoint_interval=0")
SAME = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")


def losses(folder: Path, *words: str, here: tuple[str, ...] = HERE) -> list[dict[str, float]]:
    """What each step of a run reports."""
    command = [sys.executable, "main_training.py", *words, *here, f"--log_dir={folder}"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in SAME} for line in lines if "loss" in line]


def test_each_format_trains_as_the_equivalent_flags_do(tmp_path: Path) -> None:
    with_flags: dict[str, list[dict[str, float]]] = {}
    for kind, curve in CURVES.items():
        with_file = losses(tmp_path / kind, f"--import_config={write(tmp_path, tree(kind))}")
        schedule = str(curve["lr_schedule"])
        if schedule not in with_flags:
            words = [f"--{name}={value}" for name, value in {**FLAGS, **curve}.items()]
            with_flags[schedule] = losses(tmp_path / schedule, *words)
        assert len(with_file) == FLAGS["num_steps"]
        assert with_file == with_flags[schedule]
        assert with_file[-1]["loss"] < with_file[0]["loss"]


# scripts/train.sh's model, batch and rate, as a file of each format says them
SHAPES: dict[str, dict[str, Any]] = {
    "nemo": {
        **{"trainer.max_steps": 8, "trainer.gradient_clip_val": 1.0, "model.micro_batch_size": 2},
        **{"model.global_batch_size": 16, "model.encoder_seq_length": 256, "model.max_position_embeddings": 512},
        **{"model.num_layers": 6, "model.hidden_size": 192, "model.ffn_hidden_size": 512},
        **{"model.num_attention_heads": 6, "model.num_query_groups": 3, "model.layernorm_epsilon": 1e-5},
        **{"model.init_method_std": 0.07, "model.optim.weight_decay": 0.1, "model.optim.betas": [0.9, 0.95]},
        **{"model.optim.sched.warmup_steps": 2},
    },
    "neox": {
        **{"train_iters": 8, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2, "num_nodes": 1},
        **{"seq_length": 256, "max_position_embeddings": 512, "num_layers": 6, "hidden_size": 192},
        **{"intermediate_size": 1536, "num_attention_heads": 6, "num_kv_heads": 3, "rms_norm_epsilon": 1e-5},
        **{"init_method_std": 0.07, "weight_decay": 0.1, "optimizer.params.betas": [0.9, 0.95]},
        **{"eval_iters": 1},
    },
}
SHAPES["nxdt"] = {
    {
        "model.micro_batch_size": "data.micro_batch_size",
        "model.global_batch_size": "data.global_batch_size",
        "model.num_query_groups": "model.num_kv_heads",
    }.get(key, key): value
    for key, value in SHAPES["nemo"].items()
}
QUICKSTART = (
    *("--model_variant=tiny", "--seq_length=256", "--global_batch_size=16", "--batch_size=2", "--num_steps=8"),
    *("--learning_rate=3e-3", "--init_std=0.07", "--mixed_precision=False", "--seed=7", "--report_interval=1"),
    *("--lr_warmup_steps=2", "--min_lr=3e-4", "--num_workers=2"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's text."""
    folder = tmp_path_factory.mktemp("data") / "stdlib"
    prepare = [sys.executable, "-m", "pretraining.data.prepare", "--stdlib", f"--output={folder}"]
    subprocess.run(prepare, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(("kinds", "schedule"), [(("nemo", "nxdt"), "cosine"), (("neox",), "neox_cosine")])
def test_the_quickstart_s_text_trains_through_a_file_as_it_does_with_flags(
    tmp_path: Path, corpus: Path, kinds: tuple[str, ...], schedule: str
) -> None:
    data = (f"--data_path={corpus / 'train'}", "--vocab_size=4096", "--checkpoint_interval=0")
    here = ("--engine=torch", "--device=cpu", *data)
    # GPT-NeoX divides one corpus, unless its file says otherwise
    parts = ("--split=969,30,1", "--val_interval=1000", "--val_steps=1", "--test_steps=1") if "neox" in kinds else ()
    with_flags = losses(tmp_path / "flags", *QUICKSTART, *parts, f"--lr_schedule={schedule}", here=here)
    assert len(with_flags) == 8
    assert with_flags[-1]["loss"] < with_flags[0]["loss"] - 0.5
    for kind in kinds:
        file = tree(kind)
        for key, value in SHAPES[kind].items():
            put(file, key, value)
        assert losses(tmp_path / kind, f"--import_config={write(tmp_path, file)}", here=here) == with_flags
