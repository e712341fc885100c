"""Small configuration files of three trainers, all of one model and one batch, written by hand for these tests."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FILES: dict[str, dict[str, Any]] = {
    kind: yaml.safe_load((HERE / f"{kind}.yaml").read_text()) for kind in ("nemo", "nxdt", "neox")
}
# What all of them say, as settings of this recipe
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "norm_eps": 1e-6,
    "init_std": 0.03,
    "batch_size": 2,
    "global_batch_size": 32,
    "num_steps": 12,
    "learning_rate": 3e-3,
    "min_lr": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "optimizer_eps": 1e-8,
    "weight_decay": 0.05,
    "grad_clip_thresh": 0.5,
    "precision": "fp32",
    "mixed_precision": False,
    "seed": 7,
    "num_workers": 2,
    "report_interval": 1,
}

LLAMA: dict[str, Any] = {  # a config.json of Hugging Face's
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def tree(kind: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of one format's file with other values of these dotted keys."""
    node = copy.deepcopy(FILES[kind])
    for key, value in (changes or {}).items():
        put(node, key, value)
    return node


def put(node: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`node` with a dotted key set."""
    *above, name = key.split(".")
    inner = node
    for part in above:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[name] = value
    return node


def drop(node: dict[str, Any], key: str) -> dict[str, Any]:
    """`node` without a dotted key."""
    *above, name = key.split(".")
    inner = node
    for part in above:
        inner = inner[part]
    del inner[name]
    return node


def write(folder: Path, node: dict[str, Any], name: str = "config.json") -> str:
    """Write the file and return its path. Numbers such as "3e-3" are without quotes, as people write them.

    JSON by default, because it is read ten times as fast as YAML.
    """
    path = folder / name
    text = json.dumps(node) if path.suffix == ".json" else yaml.safe_dump(node, sort_keys=False)
    path.write_text(re.sub("""['"](3e-3|3e-4|1e-6)['"]""", r"\1", text))
    return str(path)
