"""Train with `litgpt pretrain` on prepared batches, as benchmarks.peers.train does for each peer.

    .venv-peers/bin/python -m benchmarks.peers.litgpt_run MODEL_FOLDER BATCHES.npz STEPS LOSSES.json

AdamW, a constant learning rate of 1e-3 and clipping to 1, in fp32 on the CPU; litgpt compiles the model itself. Writes
the loss of every step.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file
from torch.utils.data import DataLoader

RATE = 1e-3


class AdamW(torch.optim.AdamW):
    """Decays matrices only, as the other contenders do; litgpt's default decays the norms, too."""

    def __init__(self, weights: Iterable[torch.nn.Parameter], **settings: Any) -> None:
        several = list(weights)
        matrices: Any = {"params": [weight for weight in several if weight.ndim > 1]}
        others: Any = {"params": [weight for weight in several if weight.ndim == 1], "weight_decay": 0.0}
        super().__init__([matrices, others], **settings)


class Batches(DataModule):  # type: ignore[misc]
    """Rows of length + 1 tokens, in their order."""

    def __init__(self, path: str, steps: int) -> None:
        super().__init__()
        arrays = np.load(path)
        tokens, labels = arrays["tokens"][:steps], arrays["labels"][:steps]
        rows = np.concatenate([tokens, labels[..., -1:]], axis=-1)  # the labels are the next tokens
        self._batch_size, self._rows = tokens.shape[1], torch.from_numpy(rows.reshape(-1, rows.shape[-1]).astype(int))

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        """Take nothing: the rows are ready."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self._rows, batch_size=self._batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return a batch for litgpt's check of itself, which it does before it trains."""
        return DataLoader(self._rows[: self._batch_size], batch_size=self._batch_size)  # type: ignore[arg-type]


def describe(settings: dict[str, Any], length: int) -> Config:
    """Return litgpt's configuration of a Hugging Face Llama."""
    return Config(
        name="peer",
        block_size=length,
        vocab_size=settings["vocab_size"],
        padded_vocab_size=settings["vocab_size"],
        n_layer=settings["num_hidden_layers"],
        n_head=settings["num_attention_heads"],
        n_query_groups=settings["num_key_value_heads"],
        n_embd=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        rope_base=int(settings["rope_parameters"]["rope_theta"]),
        norm_eps=settings["rms_norm_eps"],
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )


def main(folder: str, batches_path: str, steps: str, losses_path: str) -> None:
    """Train and write the losses."""
    rows, length = np.load(batches_path)["tokens"].shape[1:]
    config = describe(json.loads((Path(folder) / "config.json").read_text()), int(length))
    weights: dict[str, torch.Tensor] = {}
    sys.argv = ["litgpt", "pretrain", config.name]  # which it reads again to note its settings
    copy_weights_hf_llama(config, {}, weights, load_file(f"{folder}/model.safetensors"))
    with tempfile.TemporaryDirectory() as work:
        torch.save(weights, f"{work}/lit_model.pth")
        setup(
            "peer",
            model_config=config,
            out_dir=Path(work) / "out",
            precision="32-true",
            initial_checkpoint_dir=Path(work),
            data=Batches(batches_path, int(steps)),
            train=TrainArgs(
                save_interval=None,
                global_batch_size=int(rows),
                micro_batch_size=int(rows),
                max_tokens=int(rows * length) * int(steps),
                max_norm=1.0,
                min_lr=RATE,
                lr_warmup_steps=0,
            ),
            eval=EvalArgs(interval=10**9, initial_validation=False, final_validation=False),
            optimizer={
                "class_path": f"{Batches.__module__}.AdamW",
                "init_args": {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
            },
            devices=1,
            logger_name="csv",
        )
        (logged,) = Path(work).glob("out/**/metrics.csv")
        with logged.open() as file:
            losses = [float(line["loss"]) for line in csv.DictReader(file) if line["loss"]]
    Path(losses_path).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
