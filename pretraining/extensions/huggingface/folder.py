"""Folders in Hugging Face's format, opened as checkpoints of step 0.

config.json and safetensors only: a folder whose weights are pickles is refused. Tensors have the same names in both
formats, those of GPT-NeoX apart (gpt_neox.py), so opening one means finding where its bytes are. The header is parsed
here because safetensors' safe_open does not return offsets, and a load reads only the rows that a process needs, in
several threads.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

from pretraining.checkpoint.files import UnreadableError, digest, parse_json, unreadable
from pretraining.checkpoint.manifest import (
    DTYPES,
    EMBEDDING,
    HEAD,
    Checkpoint,
    Chunk,
    Entry,
    Facts,
    Manifest,
    ShardFile,
)
from pretraining.config.errors import UserError
from pretraining.config.variants import REQUIRED_OF_CUSTOM
from pretraining.extensions.files import read_json
from pretraining.extensions.huggingface.description import (
    CONFIG,
    DIMENSIONS,
    ModelDescription,
    describes_model,
    is_gpt_neox,
)
from pretraining.extensions.huggingface.gpt_neox import our_entries
from pretraining.storage import Location, size_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Saved by old versions, and not parameters
BUFFERS = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
STATES = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # pickles of transformers' Trainer
LONGEST_HEADER = 100 << 20  # bytes; safetensors' own limit
_AT_ONCE = 16 << 20  # bytes of a tensor compared together


def is_huggingface(path: Location) -> bool:
    """Return whether `path` is such a folder."""
    return (path / CONFIG).is_file() and describes_model(read_json(path / CONFIG))


def open_huggingface(path: Location) -> Checkpoint:
    """Open the folder as a checkpoint of step 0 without digests. Raises UserError if it is malformed or another model.

    A tied head is read as a matrix of its own: a model that keeps them apart starts from equal ones.
    """
    files = _weight_files(path)
    fields = model_fields(path / CONFIG)
    found = {file: safetensors_entries(path / file) for file in files}
    tensors = {name: entry for file in files for name, entry in found[file].items()}
    for file, names in files.items():
        if missing := sorted(names - found[file].keys()):
            raise UnreadableError(f"{path / INDEX}: {file} does not contain {missing[0]}")
        tensors |= {name: found[file][name] for name in names}
    if is_gpt_neox(fields.get("norm_type")):
        tensors = our_entries(tensors, fields["num_attention_heads"])
    if fields.pop("tie_word_embeddings", False) and EMBEDDING in tensors:
        if HEAD in tensors and not _are_equal(path, tensors[HEAD], tensors[EMBEDDING]):
            remedy = "set it to false, which is what transformers 5 does, or remove the head"
            raise UserError(f"{path / CONFIG}: tie_word_embeddings=True, but {HEAD} is not {EMBEDDING}: {remedy}")
        tensors[HEAD] = tensors[EMBEDDING]
    facts = Facts(step=0, tokens_seen=0, data=None, config=fields, engine="", mesh={})
    return Checkpoint(path, facts, Manifest(tensors, {file: shard_file(path / file) for file in files}))


def _are_equal(path: Location, one: Entry, other: Entry) -> bool:
    """Whether two tensors in files of the folder have the same bytes."""
    (first,), (second,) = one.pieces, other.pieces
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with (path / first.file).open("rb") as file, (path / second.file).open("rb") as second_file:
        file.seek(first.start)
        second_file.seek(second.start)
        sizes = [min(_AT_ONCE, first.size - start) for start in range(0, first.size, _AT_ONCE)]
        return all(file.read(size) == second_file.read(size) for size in sizes)


def _weight_files(path: Location) -> dict[str, set[str]]:
    """Return the safetensors files of the folder, and the tensors that the index says are in each."""
    if not (path / INDEX).is_file():
        if (path / SINGLE).is_file():
            return {SINGLE: set()}
        raise UserError(f"{path}: contains {_pickled_weights(path) or 'no weights'}")
    return files_of_index(path / INDEX, "safetensors")


def _pickled_weights(path: Location) -> str:
    """Return a description of weights that are pickles, with the way to convert them; "" if there are none."""
    names = sorted(file.name for file in path.iterdir() if re.fullmatch(r"\.bin|\.pt.*", file.suffix))
    if not (names := [name for name in names if not name.startswith(STATES)]):
        return ""
    remedy = f"convert them: python -m pretraining.tools.convert {shlex.quote(str(path))} TARGET"
    if not any(name.startswith("pytorch_model") or name.endswith(".pt") for name in names):  # litgpt writes model.pth
        remedy = f"rename {names[0]} to pytorch_model.bin, then {remedy}"
    return f"weights as pickles; {remedy}"


def files_of_index(path: Location, suffix: str) -> dict[str, set[str]]:
    """Return the files that the index at `path` names, all of them in its folder, and the parameters in each."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnreadableError(f"{path}: has no weight_map with the file of each tensor")
    files: dict[str, set[str]] = {}
    for name, file in sorted(weight_map.items()):
        if not isinstance(file, str) or not re.fullmatch(rf"[\w.+-]*\.{suffix}", file, re.ASCII):
            raise UnreadableError(f"{path}: {file!r} is not the name of a {suffix} file in the folder")
        files.setdefault(file, set())
        if not name.endswith(BUFFERS):
            files[file].add(name)
    return dict(sorted(files.items()))


def shard_file(path: Location) -> ShardFile:
    """Return the size of a safetensors file and the digest of its header."""
    header = _header_bytes(path)
    return ShardFile(size_of(path), digest(header), len(header))


def _header_bytes(path: Location) -> bytes:
    if not path.is_file():
        raise UnreadableError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            length = file.read(8)
            size = int.from_bytes(length, "little")
            header = length + file.read(min(size, LONGEST_HEADER))
    except OSError as error:
        raise unreadable(error, path) from error
    if len(length) < 8 or len(header) != 8 + size:
        raise UnreadableError(f"{path}: is not a safetensors file, or is truncated")
    return header


def safetensors_entries(path: Location) -> dict[str, Entry]:
    """Return the tensors of a safetensors file. Raises UnreadableError if its header is malformed."""
    header, size = _header_bytes(path), size_of(path)
    tensors = parse_json(header[8:], path)
    return {
        name: _entry(path, name, tensor, len(header), size)
        for name, tensor in tensors.items()
        if name != "__metadata__" and not name.endswith(BUFFERS)
    }


def _entry(path: Location, name: str, tensor: Any, begin: int, file_size: int) -> Entry:
    """Read one tensor of a header of `begin` bytes."""
    tensor = tensor if isinstance(tensor, dict) else {}
    dtype, shape, offsets = tensor.get("dtype"), tensor.get("shape"), tensor.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnreadableError(
            f"{path}: dtype {dtype!r} of {name!r} is not supported; supported are {', '.join(DTYPES)}"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise UnreadableError(f"{path}: shape {shape!r} or data_offsets {offsets!r} of {name!r} are not whole numbers")
    start, end = offsets
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if end - start != size or begin + end > file_size:
        raise UnreadableError(f"{path}: data_offsets {start} to {end} of {name!r} do not match its {size} bytes")
    chunk = Chunk((0,) * len(shape), tuple(shape), path.name, begin + start, size, digests=())
    return Entry(dtype, tuple(shape), (chunk,))


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def model_fields(path: Location) -> dict[str, Any]:
    """Return TrainConfig's fields for the model that config.json describes. Raises UserError with every problem."""
    config = read_json(path)
    model = ModelDescription(config)
    problems = [f"{problem.subject}: {problem.remedy}" for problem in model.problems]
    if model.origins:  # of a family that is refused, nothing was read
        required = (key for key, field in DIMENSIONS.items() if field in REQUIRED_OF_CUSTOM)
        problems += [f"{key} is missing" for key in required if config.get(key) is None]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return model.fields
