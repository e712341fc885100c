"""Small configuration files of three trainers, all of one model and one batch, written by hand for these tests."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

NEMO: dict[str, Any] = {
    "name": "small",
    "restore_from_path": None,
    "trainer": {
        "devices": 4,
        "num_nodes": 2,
        "accelerator": "gpu",
        "precision": 32,
        "max_epochs": -1,
        "max_steps": 12,
        "log_every_n_steps": 1,
        "val_check_interval": 4,
        "limit_val_batches": 0,
        "gradient_clip_val": 0.5,
    },
    "exp_manager": {
        "name": "small",
        "create_checkpoint_callback": False,
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "checkpoint_callback_params": {
            "filename": "small-{step}",
            "model_parallel_size": "${multiply:${model.tensor_model_parallel_size},1}",
        },
    },
    "model": {
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "encoder_seq_length": 32,
        "max_position_embeddings": "${.encoder_seq_length}",
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "init_method_std": 0.03,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "rmsnorm",
        "layernorm_epsilon": "1e-6",
        "make_vocab_size_divisible_by": 1,
        "bias": False,
        "activation": "fast-swiglu",
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "seed": 7,
        "data": {"seq_length": "${model.encoder_seq_length}", "num_workers": 2},
        "optim": {
            "name": "fused_adam",
            "lr": "3e-3",
            "weight_decay": 0.05,
            "betas": [0.9, 0.98],
            "sched": {"name": "CosineAnnealing", "warmup_steps": 3, "constant_steps": 0, "min_lr": "3e-4"},
        },
    },
}

NXDT: dict[str, Any] = {
    "name": "small",
    "model_source": "megatron",
    "seed": 7,
    "trainer": {key: value for key, value in NEMO["trainer"].items() if key not in ("accelerator", "precision")},
    "exp_manager": {
        **{key: value for key, value in NEMO["exp_manager"].items() if key != "checkpoint_callback_params"},
        "checkpoint_callback_params": {"filename": "small-{step}", "model_parallel_size": 1},
    },
    "distributed_strategy": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "zero1": False,
        "sequence_parallel": False,
    },
    "data": {
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "seq_length": "${model.encoder_seq_length}",
        "num_workers": 2,
    },
    "model": {
        **{
            key: value
            for key, value in NEMO["model"].items()
            if not key.endswith(("batch_size", "parallel_size"))
            and key not in ("seed", "data", "num_query_groups", "bias")
        },
        "num_kv_heads": 2,
        "has_bias": False,
        "activation": "swiglu",
        "fusions": {"softmax": True, "flash_attention": False},
        "optim": {**NEMO["model"]["optim"], "name": "adamw"},
    },
    "precision": {"type": "fp32", "xla_use_bf16": "0"},
    "compiler_flags": "--model-type transformer",
}

NEOX: dict[str, Any] = {
    "pipe_parallel_size": 1,
    "model_parallel_size": 1,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "norm": "rmsnorm",
    "rms_norm_epsilon": "1e-6",
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "activation": "swiglu",
    "intermediate_size": 192,  # two thirds of it, half for each projection: 64
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "init_method": "normal",
    "init_method_std": 0.03,
    "output_layer_init_method": "scaled_normal",
    "make_vocab_size_divisible_by": 1,
    "optimizer": {"type": "Adam", "params": {"lr": "3e-3", "betas": [0.9, 0.98], "eps": 1e-8}},
    "min_lr": "3e-4",
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "num_gpus": 4,
    "num_nodes": 2,
    "weight_decay": 0.05,
    "gradient_clipping": 0.5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": 12,
    "lr_decay_style": "cosine",
    "warmup": 0.25,
    "checkpoint_factor": 100,
    "log_interval": 1,
    "seed": 7,
    "num_workers": 2,
    "launcher": "slurm",
}

FILES = {"nemo": NEMO, "nxdt": NXDT, "neox": NEOX}


def tree(kind: str) -> dict[str, Any]:
    """A copy of one format's file, to change."""
    return copy.deepcopy(FILES[kind])


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
