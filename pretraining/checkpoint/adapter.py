"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretraining.checkpoint.files import read_json
from pretraining.checkpoint.huggingface import safetensors_entries, shard_file
from pretraining.checkpoint.manifest import Checkpoint, Facts, Manifest
from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.grammar import comma_separated
from pretraining.config.lora import (
    MODULES,
    PEFT_SETTINGS,
    adapted,
    is_saved,
    lora_scale,
    peft_settings,
    peft_unsupported,
)
from pretraining.config.training import TrainConfig

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name in the file
NO_SUCH = "is no adapter of this recipe's; merge it into its model with PEFT (merge_and_unload), and start from that"


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
        "modules_to_save": comma_separated(config.lora_modules_to_save) or None,
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


def check_files(folder: Path) -> None:
    """Raise UserError if `folder` is no adapter in PEFT's format."""
    for name in (CONFIG, MODEL):
        if not (folder / name).is_file():
            raise UserError(f"--lora_load_path={folder}: contains no {name}; give a folder in PEFT's format")


def open_adapter(folder: Path, config: TrainConfig) -> Checkpoint:
    """Open the adapter in `folder` as a checkpoint with our names.

    Raises UserError if there is none, and ConfigError if it is of a kind that this recipe does not have, or another
    one than `config` describes.
    """
    check_files(folder)
    path = folder / CONFIG
    adapter = read_json(path)
    try:
        settings = peft_settings(adapter)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    problems = [Problem(f"{path}: {key}", NO_SUCH) for key in peft_unsupported(adapter)]
    theirs = _meaning(replace(config, **settings))
    problems += [
        Problem(f"--{field}={getattr(config, field)}", f"the adapter at lora_load_path has {settings[field]}; use that")
        for field, meaning in _meaning(config).items()
        if theirs[field] != meaning
    ]
    if problems:
        raise ConfigError(problems)
    entries = {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): entry
        for name, entry in safetensors_entries(folder / MODEL).items()
    }
    facts = Facts(0, 0, None, asdict(config), "none", {})
    return Checkpoint(folder, facts, Manifest(entries, {MODEL: shard_file(folder / MODEL)}))


def _meaning(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that PEFT's file has, lists of modules as what they name."""
    values = {field: getattr(config, field) for field in PEFT_SETTINGS.values()}
    saved = [module for module in MODULES if is_saved(module, config.lora_modules_to_save)]
    return {**values, "lora_target_modules": adapted(config), "lora_modules_to_save": saved}


def merge_adapter(config: TrainConfig, name: str, weight: Tensor, read: Any) -> Tensor:
    """Return `weight` plus the product of its adapter, if it has one; `read` returns a tensor by its name."""
    module = name.removesuffix(".weight")
    if not any(module.endswith(target) for target in adapted(config)):
        return weight
    pair: list[Tensor] = [read(f"{module}.lora_{letter}.weight").to(torch.float32) for letter in "AB"]
    return (weight.float() + lora_scale(config) * pair[1] @ pair[0]).to(weight.dtype)
