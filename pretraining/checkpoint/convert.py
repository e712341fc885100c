"""Convert between checkpoints of this recipe and folders in Hugging Face's format, one tensor at a time.

    python -m pretraining.checkpoint.convert SOURCE TARGET [--dtype=bf16] [--tokenizer_path=FILE] [--shard_size=5e9]

SOURCE is a run, a checkpoints folder or a step_N folder, and TARGET becomes a Hugging Face folder: config.json,
safetensors with an index, the tokenizer. Or SOURCE is a Hugging Face folder, and TARGET/step_0 becomes a checkpoint
without moments. Training starts from a Hugging Face folder as it is: give it as --ckpt_load_path.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pretraining.checkpoint import adapter
from pretraining.checkpoint.adapter import MODEL, PREFIX, described, exported, is_base, merged
from pretraining.checkpoint.compatibility import saved_config
from pretraining.checkpoint.files import PARTIAL, descriptor, rename, sync_folder, write_at, write_file
from pretraining.checkpoint.huggingface import (
    CONFIG,
    INDEX,
    SINGLE,
    is_huggingface,
    open_source,
)
from pretraining.checkpoint.manifest import DTYPE_NAMES, DTYPES, Checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.shards import host_bytes, safetensors_header
from pretraining.checkpoint.store import IO_WORKERS, PendingSave, is_weight, load
from pretraining.config.errors import UserError
from pretraining.config.huggingface import config_json
from pretraining.config.lora import adapters_alone
from pretraining.config.training import TrainConfig

CHOICES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_SIZE = 5e9  # bytes of one file, transformers' default before version 5
ADAPTER = "lora_adapter"  # folder beside the base it belongs to
ALONE = Peers(together=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert and say where the result is. Exit code 2 on a mistake of the user."""
    flags = parse(arguments)
    try:
        source = open_source(flags.source)
        dtype = CHOICES[flags.dtype] if flags.dtype else None
        if is_huggingface(flags.source):
            print(to_checkpoint(source, flags.target, dtype))
        else:
            print(to_huggingface(source, flags.target, dtype, flags.tokenizer_path, int(flags.shard_size)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pretraining.checkpoint.convert", allow_abbrev=False)
    parser.add_argument("source", type=Path, help="a run, a checkpoint, or a folder in Hugging Face's format")
    parser.add_argument("target", type=Path, help="folder to write; it must not exist, or be empty")
    parser.add_argument("--dtype", choices=CHOICES, help="of the tensors written; as they are if not given")
    parser.add_argument("--tokenizer_path", default="", help="sentencepiece model to add; empty: the run's own")
    parser.add_argument("--shard_size", type=float, default=SHARD_SIZE, help="bytes of one file at most (%(default)g)")
    return parser.parse_args(arguments)


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One whole tensor, checked."""
    entry = checkpoint.manifest.tensors[name]
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    load(checkpoint, {name: tensor}, ALONE)
    return tensor


# ---- To Hugging Face


def to_huggingface(
    checkpoint: Checkpoint,
    target: Path,
    dtype: torch.dtype | None = None,
    tokenizer_path: str = "",
    shard_size: int = int(SHARD_SIZE),
) -> Path:
    """Write the weights of `checkpoint` to the new folder `target`, which appears when it is complete."""
    config = saved_config(checkpoint.facts.config)
    names = [name for name in checkpoint.manifest.tensors if is_weight(name)]
    if adapters_alone(config):
        folder = _new_folder(target)
        _write_adapter(folder, checkpoint, config, names, dtype)
        rename(folder, target)
        return target
    mine, names = names, [name for name in names if is_base(name)]
    stored = {name: dtype or DTYPES[checkpoint.manifest.tensors[name].dtype] for name in names}
    facts = config_json(replace(config, lora_rank=0), str(stored[names[0]]).removeprefix("torch."))
    folder = _new_folder(target)  # after what can be refused, so that nothing is left of a refusal
    files = _name_files(_group(checkpoint, stored, shard_size))
    for file, members in files.items():
        _write_safetensors(folder / file, checkpoint, {name: stored[name] for name in members})
    if config.lora_rank and config.lora_save_mode == "base_and_adapter":
        (folder / ADAPTER).mkdir()
        _write_adapter(folder / ADAPTER, checkpoint, config, mine, dtype)
    facts |= _copy_tokenizer(tokenizer_path or config.tokenizer_path, folder)
    _write_json(folder / CONFIG, facts)
    if len(files) > 1:
        total = sum(_size(checkpoint, name, stored[name]) for name in names)
        weight_map = {name: file for file, members in files.items() for name in members}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    sync_folder(folder)
    rename(folder, target)
    return target


def _write_adapter(
    folder: Path, checkpoint: Checkpoint, config: TrainConfig, names: list[str], dtype: torch.dtype | None
) -> None:
    """PEFT's two files."""
    tensors = {name: read_tensor(checkpoint, name) for name in exported(config, names)}
    prefixed = {f"{PREFIX}{name}": tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    save_file(prefixed, folder / MODEL, {"format": "pt"})
    _write_json(folder / adapter.CONFIG, described(config))


def _refuse_used(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: is there already; name a new folder")


def _new_folder(target: Path) -> Path:
    _refuse_used(target)
    partial = target.with_name(target.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _size(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> int:
    return torch.Size(checkpoint.manifest.tensors[name].shape).numel() * dtype.itemsize


def _group(checkpoint: Checkpoint, stored: dict[str, torch.dtype], limit: int) -> list[list[str]]:
    """Names in order, cut where the next tensor would make a file larger than `limit` bytes."""
    groups: list[list[str]] = []
    room = -1
    for name, dtype in stored.items():
        size = _size(checkpoint, name, dtype)
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def _name_files(groups: list[list[str]]) -> dict[str, list[str]]:
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _write_safetensors(path: Path, checkpoint: Checkpoint, stored: dict[str, torch.dtype]) -> None:
    described: dict[str, dict[str, object]] = {}
    end = 0
    for name, dtype in stored.items():
        size, shape = _size(checkpoint, name, dtype), list(checkpoint.manifest.tensors[name].shape)
        described[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = safetensors_header(described)
    with descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as opened:
        write_at(opened, memoryview(header), 0)
        position = len(header)
        for name, dtype in stored.items():
            data = host_bytes(_exported_tensor(checkpoint, name), dtype)
            write_at(opened, data, position)
            position += len(data)
        os.fsync(opened)


def _exported_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """A whole tensor, with its adapter where that is to be merged."""
    config, weight = saved_config(checkpoint.facts.config), read_tensor(checkpoint, name)
    if not config.lora_rank or config.lora_save_mode != "merged":
        return weight
    return merged(config, name, weight, partial(read_tensor, checkpoint))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_file(path, json.dumps(value, indent=2).encode() + b"\n")


def _copy_tokenizer(path: str, folder: Path) -> dict[str, Any]:
    """Add the sentencepiece model, if there is one, and how to use it; its special ids for config.json."""
    if not path:
        print("the checkpoint names no tokenizer: none is added; --tokenizer_path=FILE adds one", file=sys.stderr)
        return {}
    if not Path(path).is_file():
        raise UserError(f"--tokenizer_path={path}: no such file; give the sentencepiece model of the run's data")
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=path)
    ids = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id(), "pad": model.pad_id()}
    known = {kind: number for kind, number in ids.items() if number >= 0}
    write_file(folder / "tokenizer.model", Path(path).read_bytes())
    tokens = {f"{kind}_token": model.id_to_piece(number) for kind, number in known.items()}
    usage = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False, "legacy": False}
    _write_json(folder / "tokenizer_config.json", {**usage, **tokens})
    return {f"{kind}_token_id": number for kind, number in known.items() if kind != "unk"}


# ---- From Hugging Face


def to_checkpoint(source: Checkpoint, folder: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the tensors of a Hugging Face folder as `folder`/step_0."""
    _refuse_used(folder)
    tokenizer = source.path / "tokenizer.model"
    config = replace(saved_config(source.facts.config), tokenizer_path=str(tokenizer) if tokenizer.is_file() else "")
    entries = source.manifest.tensors.items()
    state = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta") for name, entry in entries}
    facts = replace(source.facts, config=asdict(config), engine="none")
    pending = PendingSave(folder, state, facts, ALONE, dtype=dtype, workers=IO_WORKERS)
    pending.fetch_from(lambda item: read_tensor(source, item.index.fqn))
    return pending.write()


if __name__ == "__main__":
    sys.exit(main())
