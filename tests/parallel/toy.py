"""The model that both engines train in the tests of their equality."""

from __future__ import annotations

from typing import Any

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
    "num_steps": 8,
    "seed": 1,
    "learning_rate": 3e-3,
    "mixed_precision": False,
    "low_cpu_fsdp": True,
}
