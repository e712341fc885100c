"""Train a Hugging Face model on prepared batches, as benchmarks.peers.train does for each peer.

    python -m benchmarks.peers.hf_loop trainer|loop|compiled MODEL_FOLDER BATCHES.npz STEPS LOSSES.json

trainer: transformers' Trainer. loop: what people write in twenty lines; compiled: the same with torch.compile. AdamW,
a constant learning rate of 1e-3 and clipping to 1, in fp32. Writes the loss of every step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.modules["torch_xla"] = None  # type: ignore[assignment]  # where it is installed, Trainer takes its device
from transformers import AutoModelForCausalLM  # noqa: E402

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Batches = list[dict[str, torch.Tensor]]


def load_batches(path: str, steps: int) -> Batches:
    """Return the batches of `steps` steps; the labels are those of the next token already."""
    arrays = np.load(path)
    tokens, labels = (torch.from_numpy(arrays[name]).long() for name in ("tokens", "labels"))
    return [{"input_ids": tokens[step], "labels": labels[step], "shift_labels": labels[step]} for step in range(steps)]


def loop(model: Any, batches: Batches, *, is_compiled: bool) -> list[float]:
    """Train in a bare loop."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others: Any = {"params": [weight for weight in model.parameters() if weight.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": matrices}, others], **ADAMW)
    forward = torch.compile(model) if is_compiled else model
    losses = []
    for batch in batches:
        loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainer(model: Any, batches: Batches) -> list[float]:
    """Train with transformers' Trainer, which logs each step's loss."""
    from transformers import Trainer, TrainingArguments

    count = len(batches[0]["labels"])
    rows = [{name: tensor[row] for name, tensor in batch.items()} for batch in batches for row in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=count,
            max_steps=len(batches),
            learning_rate=ADAMW["lr"],
            adam_beta1=ADAMW["betas"][0],
            adam_beta2=ADAMW["betas"][1],
            weight_decay=ADAMW["weight_decay"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        run = Trainer(model=model, args=arguments, train_dataset=rows)
        run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def main(kind: str, folder: str, batches_path: str, steps: str, losses_path: str) -> None:
    """Train and write the losses."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    batches = load_batches(batches_path, int(steps))
    losses = trainer(model, batches) if kind == "trainer" else loop(model, batches, is_compiled=kind == "compiled")
    Path(losses_path).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
