"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretraining.checkpoint.files import read_json
from pretraining.checkpoint.huggingface import safetensors_entries, shard_file
from pretraining.checkpoint.manifest import Checkpoint, Facts, Manifest
from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.lora import adapted, lora_scale
from pretraining.config.training import TrainConfig

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name in the file


def adapter_config(config: TrainConfig) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.ckpt_load_path or None,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.lora_use_rslora,
        "lora_dropout": config.lora_dropout,
        "bias": config.lora_bias,
        "target_modules": sorted(name.rpartition(".")[2] for name in adapted(config)),
        "modules_to_save": config.lora_modules_to_save.split(",") if config.lora_modules_to_save else None,
        "init_lora_weights": "gaussian" if config.lora_init == "gaussian" else True,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def their_name(config: TrainConfig, name: str) -> str:
    """Return PEFT's name of a trained parameter: the bias of a projection with an adapter is that of its base_layer."""
    module, _, kind = name.rpartition(".")
    is_wrapped = kind == "bias" and any(module.endswith(target) for target in adapted(config))
    return f"{PREFIX}{module}.base_layer.bias" if is_wrapped else f"{PREFIX}{name}"


def adapter_folder(config: TrainConfig) -> Path | None:
    """Return the folder of the adapter to start from, or None if --lora_load_path is not set."""
    return Path(config.lora_load_path) / config.lora_load_tag if config.lora_load_path else None


def open_adapter(folder: Path, config: TrainConfig) -> Checkpoint:
    """Open the adapter in `folder` as a checkpoint with our names.

    Raises UserError if there is none, and ConfigError if it has another rank or other projections than `config`.
    """
    for name in (CONFIG, MODEL):
        if not (folder / name).is_file():
            raise UserError(f"--lora_load_path={folder}: contains no {name}; give a folder in PEFT's format")
    theirs, ours = read_json(folder / CONFIG), adapter_config(config)
    fields = {"r": "lora_rank", "target_modules": "lora_target_modules", "bias": "lora_bias"}
    values = {key: theirs.get(key) for key in fields}
    values = {key: sorted(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}
    problems = [
        Problem(f"--{field}={getattr(config, field)}", f"the adapter at lora_load_path has {values[key]}; use that")
        for key, field in fields.items()
        if values[key] != ours[key]
    ]
    if problems:
        raise ConfigError(problems)
    entries = {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): entry
        for name, entry in safetensors_entries(folder / MODEL).items()
    }
    facts = Facts(0, 0, None, asdict(config), "none", {})
    return Checkpoint(folder, facts, Manifest(entries, {MODEL: shard_file(folder / MODEL)}))


def merge_adapter(config: TrainConfig, name: str, weight: Tensor, read: Any) -> Tensor:
    """Return `weight` plus the product of its adapter, if it has one; `read` returns a tensor by its name."""
    module = name.removesuffix(".weight")
    if not any(module.endswith(target) for target in adapted(config)):
        return weight
    pair: list[Tensor] = [read(f"{module}.lora_{letter}.weight").to(torch.float32) for letter in "AB"]
    return (weight.float() + lora_scale(config) * pair[1] @ pair[0]).to(weight.dtype)
