"""The model that both engines train in the tests of their equality."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.data import IGNORED
from pretraining.parallel.engine import Batch
from tests.data.corpora import write_instructions

HALFWAY = 3  # steps after which a run of the toy is saved and resumed
TOY: dict[str, Any] = {
    "model_variant": "custom",
    "num_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 512,
    "seq_length": 64,
    "use_dummy_dataset": True,
    "global_batch_size": 16,
    "batch_size": 2,
    "num_steps": 5,
    "seed": 1,
    "learning_rate": 3e-3,
    "mixed_precision": False,
    "low_cpu_fsdp": True,
}
# Forms of the model that both engines and a step of one program train
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "ffn_dropout": 0.1, "mlp_bias": True}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_target_modules": ".*_proj", "lora_init": "gaussian"}
LORA |= {"lora_bias": "all", "lora_modules_to_save": "norm", "learning_rate": 1e-2}
ADAPTERS: dict[str, Any] = {**LORA, "lora_dropout": 0.1, "attn_bias": True, "mlp_bias": True}
# The second of six updates is skipped, the third is applied, the fourth is one too many, and the others are healthy
POISONED: dict[str, Any] = {"poison_steps": [1, 3], "max_skipped_steps": 1, "num_steps": 6}
# Four global batches of 8 sequences, then 16; saved among the first ones
RAMP: dict[str, Any] = {"rampup_batch_size": "8,8,32", "batch_size": 1, "num_steps": 6, "sharding_strategy": "fsdp"}


def without_labels(batch: Batch) -> Batch:
    """Return the batch with no trained token."""
    return {**batch, "labels": np.full_like(batch["labels"], IGNORED)}


@functools.cache
def instruction_cases() -> dict[str, dict[str, Any]]:
    """The same 32 examples with prompts of any length as one global batch: in 16 rows, and padded, one per row."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    length = TOY["seq_length"]
    drawn = np.random.default_rng(5)
    firsts = drawn.integers(8, length - 8, 16).tolist()
    sizes = [size for first in firsts for size in (first, length - first - int(drawn.integers(0, 6)))]
    examples = [(drawn.integers(2, 512, size).tolist(), int(drawn.integers(1, size))) for size in sizes]
    write_instructions(folder / "packed", [examples[at : at + 2] for at in range(0, 32, 2)], length)
    write_instructions(folder / "padded", [[example] for example in examples], length)
    fields = {"use_dummy_dataset": False, "sep_token": -1, "index_dir": f"{folder}/index"}
    packed = {"reset_attention_mask": True, "reset_position_ids": True, "data_path": f"{folder}/packed"}
    return {
        "packed": {**fields, **packed, "global_batch_size": 16},
        "padded": {**fields, "global_batch_size": 32, "data_path": f"{folder}/padded"},
    }
