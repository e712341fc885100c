"""Folders in Hugging Face's format, read as checkpoints and described for export.

config.json and safetensors only: a folder whose weights are pickles is refused. Tensors have the same names here and
there, so reading one is describing where its bytes are.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pretraining.checkpoint.files import UnreadableError, digest, read_file
from pretraining.checkpoint.folder import newest_checkpoint
from pretraining.checkpoint.manifest import (
    DTYPES,
    Checkpoint,
    Entry,
    Facts,
    Manifest,
    Piece,
    ShardFile,
    open_checkpoint,
)
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LONGEST_HEADER = 100 << 20  # bytes; safetensors' own limit

# Names of the dimensions: ours -> theirs.
DIMENSIONS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "head_dim": "head_dim",
}
# Their families that are this model: model_type -> the class's name. Mistral is Llama with a sliding window, Qwen 3 is
# Llama with normed queries and keys.
FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}  # hidden_act, which gates there too -> activation
# What Hugging Face's Llama cannot do: field -> the only value that can be exported.
EXPORTED = {
    "norm_type": "rmsnorm",
    "parallel_residual": False,
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
}
BIASES = {"attn_bias": "attention_bias", "mlp_bias": "mlp_bias"}  # ours -> theirs


def is_huggingface(path: Path) -> bool:
    """Whether `path` is such a folder. A run's own config.json names no model_type."""
    try:
        return "model_type" in json.loads((path / CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


def open_source(path: Path) -> Checkpoint:
    """What `path` means: a folder in Hugging Face's format, a step_N folder, or the newest checkpoint of a run."""
    return open_huggingface(path) if is_huggingface(path) else open_checkpoint(newest_checkpoint(path))


def open_huggingface(path: Path) -> Checkpoint:
    """The folder as a checkpoint of step 0 without digests. UserError where this model cannot be that one."""
    config = _read_json(path / CONFIG)
    family = config.get("model_type", "llama")
    if family not in FAMILIES:
        raise UserError(f"{path / CONFIG}: model_type={family}; {', '.join(FAMILIES)} are understood")
    names = _weight_files(path)
    files = {name: shard_file(path / name) for name in names}
    tensors = {name: entry for file in names for name, entry in safetensors_entries(path / file).items()}
    if config.get("tie_word_embeddings", False) and HEAD not in tensors and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING]  # a model that keeps them apart starts from equal ones
    facts = Facts(step=0, tokens_seen=0, data=None, config=to_train_config(config, path), engine="", mesh={})
    return Checkpoint(path, facts, Manifest(tensors, files))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file(path))
    except ValueError as error:
        raise UnreadableError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UnreadableError(f"{path}: is not a JSON object")
    return value


def _weight_files(path: Path) -> list[str]:
    if (path / INDEX).is_file():
        names = sorted(set(_read_json(path / INDEX)["weight_map"].values()))
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
    piece = Piece((0,) * len(shape), shape, path.name, begin + start, end - start, digests=())
    return Entry(facts["dtype"], shape, (piece,))


# ---- config.json


def to_train_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """TrainConfig's fields for the model that `config`, read from the folder `path`, describes."""
    missing = [theirs for ours, theirs in DIMENSIONS.items() if ours not in _OPTIONAL and theirs not in config]
    if missing:
        raise UserError(f"{path / CONFIG}: {missing[0]} is missing")
    act = config.get("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise UserError(f"{path / CONFIG}: hidden_act={act}; {', '.join(ACTIVATIONS)} are understood")
    given = {ours: config[theirs] for ours, theirs in DIMENSIONS.items() if config.get(theirs) is not None}
    rope = config.get("rope_parameters") or {}  # transformers 5; before, rope_theta and rope_scaling
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    eps = config.get("rms_norm_eps", 1e-6)
    scaling = _rope_scaling(rope or config.get("rope_scaling") or {}, path)
    biases = {ours: bool(config.get(theirs, False)) for ours, theirs in BIASES.items()}
    family = config.get("model_type", "llama")
    if config.get("use_sliding_window", False):
        raise UserError(f"{path / CONFIG}: use_sliding_window=True; windows in some of the layers are not understood")
    window = config.get("sliding_window") if family == "mistral" else None
    forms = {"qk_norm": family == "qwen3", "sliding_window": window}
    fixed = {"model_variant": "custom", "norm_eps": eps, "activation": ACTIVATIONS[act], "rope_theta": float(theta)}
    return {**fixed, **given, **biases, **scaling, **forms}


_OPTIONAL = ("num_kv_heads", "head_dim", "max_position_embeddings")


def _rope_scaling(rope: dict[str, Any], path: Path) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rope_scaling_type": "linear", "rope_scaling_factor": rope["factor"]}
    if kind == "llama3":
        return {
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": rope["factor"],
            "rope_low_freq_factor": rope["low_freq_factor"],
            "rope_high_freq_factor": rope["high_freq_factor"],
            "rope_original_max_position": rope["original_max_position_embeddings"],
        }
    raise UserError(f"{path / CONFIG}: rope_type={kind}; default, linear and llama3 are understood")


def from_train_config(config: TrainConfig, dtype: str) -> dict[str, Any]:
    """config.json of the model that `config` describes, its weights being `dtype` ("float32", "bfloat16").

    In the words of transformers 4, which version 5 reads as well.
    """
    acts = [theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation]
    foreign = [f"{name}={getattr(config, name)}" for name, value in EXPORTED.items() if getattr(config, name) != value]
    foreign += [] if acts else [f"activation={config.activation}"]
    family = "qwen3" if config.qk_norm else "mistral" if config.sliding_window else "llama"
    lacks = {"qwen3": ("sliding_window", "mlp_bias"), "mistral": ("attn_bias", "mlp_bias"), "llama": ()}[family]
    foreign += [f"{name}={getattr(config, name)}" for name in lacks if getattr(config, name)]
    if foreign:
        raise UserError(f"Hugging Face's {family} has no {', '.join(foreign)}: this model has no such form")
    shape = model_shape(config)
    return {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        **({"sliding_window": config.sliding_window} if family == "mistral" else {}),
        "hidden_act": acts[0],
        **{theirs: getattr(shape, ours) for ours, theirs in DIMENSIONS.items()},
        "rms_norm_eps": config.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": _exported_scaling(config),
        **{theirs: getattr(config, ours) for ours, theirs in BIASES.items()},
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _exported_scaling(config: TrainConfig) -> dict[str, Any] | None:
    if config.rope_scaling_type == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": config.rope_scaling_type, "factor": config.rope_scaling_factor}
    if config.rope_scaling_type == "llama3":
        scaling |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_position,
        }
    return scaling
