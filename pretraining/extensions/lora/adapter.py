"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from pretraining.checkpoint.manifest import EMBEDDING, HEAD, Checkpoint, Facts, Manifest
from pretraining.checkpoint.store import check_fit, is_weight
from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.grammar import comma_separated
from pretraining.extensions.checkpoints import read_tensors
from pretraining.extensions.files import read_json
from pretraining.extensions.huggingface.folder import safetensors_entries, shard_file
from pretraining.extensions.lora.peft import PEFT_SETTINGS, peft_settings, peft_unsupported
from pretraining.extensions.lora.settings import LoraConfig
from pretraining.extensions.lora.targets import adapted, is_saved, lora_scale, modules
from pretraining.storage import DISK

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name in the file
NO_SUCH = "is no adapter of this recipe's; merge it into its model with PEFT (merge_and_unload), and start from that"


def adapter_config(config: LoraConfig) -> dict[str, Any]:
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
        "modules_to_save": _saved_modules(config) or None,
        "init_lora_weights": "gaussian" if config.lora_init == "gaussian" else True,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _saved_modules(config: LoraConfig) -> list[str]:
    """Return the modules that PEFT replaces: with a tied embedding also the head, which it would leave as it was."""
    words = comma_separated(config.lora_modules_to_save)
    is_both = config.tie_word_embeddings and config.is_trained(EMBEDDING)
    return [*words, "lm_head"] if is_both and "lm_head" not in words else words


def their_name(config: LoraConfig, name: str) -> str:
    """Return PEFT's name of a trained parameter: the bias of a projection with an adapter is that of its base_layer."""
    module, _, kind = name.rpartition(".")
    is_wrapped = kind == "bias" and any(module.endswith(target) for target in adapted(config))
    return f"{PREFIX}{module}.base_layer.bias" if is_wrapped else f"{PREFIX}{name}"


def check_files(folder: Path) -> None:
    """Raise UserError if `folder` is no adapter in PEFT's format."""
    for name in (CONFIG, MODEL):
        if not (folder / name).is_file():
            raise UserError(f"--lora_load_path={folder}: contains no {name}; give a folder in PEFT's format")


def open_adapter(folder: Path, config: LoraConfig) -> Checkpoint:
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
    opened = Checkpoint(folder, facts, Manifest(entries, {MODEL: shard_file(folder / MODEL)}))
    if config.tie_word_embeddings and (twice := read_tensors(opened, (EMBEDDING, HEAD).__contains__)):
        if len(twice) < 2 or not torch.equal(twice[EMBEDDING], twice[HEAD]):
            remedy = "trains the embedding and the head apart; --tie_word_embeddings=False keeps them apart here, too"
            raise ConfigError([Problem(f"{path}: modules_to_save={adapter.get('modules_to_save')}", remedy)])
        del entries[HEAD]
    return opened


def check_trained(adapter: Checkpoint, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError unless the weights in `adapter` are exactly those that this run trains, with their shapes."""
    trained = {name: shape for name, shape in shapes.items() if config.is_trained(name)}
    if others := sorted(name for name in adapter.manifest.tensors if is_weight(name) and name not in trained):
        raise UserError(f"{adapter.path}: has {', '.join(others[:5])}, which this run does not train")
    if lacking := sorted(trained.keys() - adapter.manifest.tensors.keys()):
        is_last_norm = "norm" in comma_separated(config.lora_modules_to_save) and "norm." in lacking[0]
        remedy = "; the last norm alone is --lora_modules_to_save=model.norm" if is_last_norm else ""
        raise UserError(f"{adapter.path}: has no {', '.join(lacking[:5])}, which this run trains{remedy}")
    check_fit(adapter, trained)


def _meaning(config: LoraConfig) -> dict[str, Any]:
    """Return the settings that PEFT's file has, lists of modules as what they name; a tied head is the embedding."""
    values = {field: getattr(config, field) for field in PEFT_SETTINGS.values()}
    own = [name for name in modules(config) if not (config.tie_word_embeddings and name == "lm_head")]
    saved = [module for module in own if is_saved(module, config.lora_modules_to_save)]
    return {**values, "lora_target_modules": adapted(config), "lora_modules_to_save": saved}


class SavedAdapter:
    """The adapter in a checkpoint of `config`, to export."""

    def __init__(self, config: LoraConfig) -> None:
        self.config = config
        self.is_merged = config.lora_save_mode == "merged"  # an export has the sum of the weight and its adapter

    def write(self, folder: Path, names: Iterable[str], read: Callable[[str], Tensor], dtype: Any) -> None:
        """Write those of the tensors `names` that are trained as the two files of PEFT's format."""
        tensors = {name: read(name) for name in names if self.config.is_trained(name)}
        if self.config.tie_word_embeddings and EMBEDDING in tensors:
            tensors[HEAD] = tensors[EMBEDDING].clone()  # safetensors refuses two names of one memory
        renamed = {their_name(self.config, name): tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
        DISK.write_file(folder / MODEL, save(renamed, {"format": "pt"}))  # which syncs it, unlike save_file
        DISK.write_file(folder / CONFIG, json.dumps(adapter_config(self.config), indent=2).encode() + b"\n")

    def merged(self, name: str, weight: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """Return `weight` plus the product of its adapter, if it has one, in fp32."""
        module = name.removesuffix(".weight")
        if not any(module.endswith(target) for target in adapted(self.config)):
            return weight
        pair = [read(f"{module}.lora_{letter}.weight").to(torch.float32) for letter in "AB"]
        return weight.float() + lora_scale(self.config) * pair[1] @ pair[0]
