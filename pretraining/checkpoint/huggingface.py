"""Folders in Hugging Face's format, read as checkpoints and described for export.

config.json and safetensors only: a folder whose weights are pickles is refused. Tensors have the same names here and
there, so reading one is describing where its bytes are.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pretraining.checkpoint.files import UnreadableError, digest, read_json
from pretraining.checkpoint.folder import newest_checkpoint
from pretraining.checkpoint.manifest import (
    DTYPES,
    Checkpoint,
    Chunk,
    Entry,
    Facts,
    Manifest,
    ShardFile,
    open_checkpoint,
)
from pretraining.config.errors import UserError
from pretraining.config.huggingface import DIMENSIONS, ModelDescription

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
REQUIRED = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "intermediate_size")
LONGEST_HEADER = 100 << 20  # bytes; safetensors' own limit


def is_huggingface(path: Path) -> bool:
    """Whether `path` is such a folder. A run's own config.json names no model_type."""
    return (path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)


def open_any_checkpoint(path: Path) -> Checkpoint:
    """What `path` means: a folder in Hugging Face's format, a step_N folder, or the newest checkpoint of a run."""
    return open_huggingface(path) if is_huggingface(path) else open_checkpoint(newest_checkpoint(path))


def open_huggingface(path: Path) -> Checkpoint:
    """The folder as a checkpoint of step 0 without digests. UserError where this model cannot be that one."""
    names, config = _weight_files(path), read_json(path / CONFIG)
    fields = _model_fields(path / CONFIG, config)
    files = {name: shard_file(path / name) for name in names}
    tensors = {name: entry for file in names for name, entry in safetensors_entries(path / file).items()}
    if config.get("tie_word_embeddings", False) and HEAD not in tensors and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    facts = Facts(step=0, tokens_seen=0, data=None, config=fields, engine="", mesh={})
    return Checkpoint(path, facts, Manifest(tensors, files))


def _weight_files(path: Path) -> list[str]:
    if (path / INDEX).is_file():
        names = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    elif (path / SINGLE).is_file():
        names = [SINGLE]
    else:
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
        reason = "holds weights as pickles, which could run any program" if pickled else "holds no weights"
        raise UserError(f"{path}: {reason}; save the model as safetensors (transformers' save_pretrained does)")
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise UnreadableError(f"{path / INDEX}: {outside[0]} lies outside the folder")
    return names


def shard_file(path: Path) -> ShardFile:
    """Size and hash of a safetensors file's header."""
    header = _header_bytes(path)
    return ShardFile(path.stat().st_size, digest(header), len(header))


def _header_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            length = file.read(8)
            size = int.from_bytes(length, "little")
            header = length + file.read(min(size, LONGEST_HEADER))
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    if len(length) < 8 or len(header) != 8 + size:
        raise UnreadableError(f"{path}: is not a safetensors file, or is cut off")
    return header


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """Tensors of one safetensors file; UnreadableError where its header contradicts itself or the file."""
    header = _header_bytes(path)
    try:
        described = json.loads(header[8:])
        return {
            name: _entry(path, len(header), facts)
            for name, facts in described.items()
            if name != "__metadata__" and not name.endswith("rotary_emb.inv_freq")  # a buffer of old versions
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path}: its header is not a safetensors header ({error!r})") from error


def _entry(path: Path, begin: int, facts: dict[str, Any]) -> Entry:
    dtype, shape = DTYPES[facts["dtype"]], tuple(facts["shape"])
    start, end = facts["data_offsets"]
    if not 0 <= start <= end <= path.stat().st_size - begin or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"data_offsets {start}, {end}")
    chunk = Chunk((0,) * len(shape), shape, path.name, begin + start, end - start, digests=())
    return Entry(facts["dtype"], shape, (chunk,))


def _model_fields(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return TrainConfig's fields for the model that config.json describes. Raises UserError with every problem."""
    model = ModelDescription(config)
    missing = [key for key, field in DIMENSIONS.items() if field in REQUIRED and config.get(key) is None]
    problems = [f"{problem.subject}: {problem.remedy}" for problem in model.problems]
    problems += [f"{key} is missing" for key in missing]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    # A tied head is read as a matrix of its own: a model that keeps them apart starts from equal ones.
    return {name: value for name, value in model.fields.items() if name != "tie_word_embeddings"}
