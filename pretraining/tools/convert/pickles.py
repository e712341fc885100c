"""Read the weights that other trainers save as pickles: Hugging Face's .bin, GPT-NeoX's, NxD Training's and NeMo's.

Of optimizer states, those are read that have a name (nemo_states.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from main_training import CONFIGURATION
from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.manifest import EMBEDDING, HEAD
from pretraining.config.declaration import Resume
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import SETTINGS, TrainConfig
from pretraining.config.variants import CUSTOM, missing_dimensions, model_shape
from pretraining.extensions.huggingface.description import CONFIG
from pretraining.extensions.huggingface.folder import BUFFERS, files_of_index, model_fields
from pretraining.extensions.huggingface.gpt_neox import our_name
from pretraining.tools.convert import ranks
from pretraining.tools.convert.distributed import COMMON, read_distributed
from pretraining.tools.convert.nemo_states import STEP, named_states
from pretraining.tools.convert.unpickling import StandIn, load_pickle, named, unpickle
from pretraining.tools.importing.foreign import ForeignConfig
from pretraining.tools.importing.mappings import TrainerFormat
from pretraining.tools.importing.resolve import KeyReport, import_foreign

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NXDT_FILE = re.compile(r"dp_rank_00(?:_ep_rank_00)?_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
MODEL = [name for name, setting in SETTINGS.items() if setting.resume in (Resume.SHAPE, Resume.FUNCTION)]
# Tensor rank, pipeline rank and name -> tensor
Read = Iterator[tuple[int, int, dict[str, Any]]]


# ---- Weights


class Weights(NamedTuple):
    """A model's settings and tensors."""

    config: TrainConfig
    tensors: dict[str, ranks.MergedTensor]
    note: str = ""  # on the optimizer states


def open_pickles(
    path: Path, layout: TrainerFolders, import_config: str = "", neox_gqa: str = "", vocab_size: int = 0, **flags: str
) -> Weights:
    """Open a folder of one of the layouts. import_config: file of the trainer that wrote it, "" for Hugging Face's.

    neox_gqa: "head" or "legacy", the order of grouped queries in GPT-NeoX's checkpoint. vocab_size: rows of the
    vocabulary to keep, 0 for all. flags: others that the file may need. Raises UserError where the tensors are not
    those of the configuration.
    """
    if layout is LAYOUTS[0]:
        config = CONFIGURATION(**model_fields(path / CONFIG))
    else:
        if not import_config:
            raise UserError(f"this is a checkpoint of {layout.title}: give its configuration file as --import_config")
        # The embedding says how many rows there are.
        config = replace(read_trainer_file(import_config, flags).config, vocab_size=1)
        layout = _with_order_of_queries(layout, config, neox_gqa)
    if missing := missing_dimensions(config):
        raise UserError(f"{import_config}: has no {', '.join(missing)}")
    layers, expected = model_shape(config).num_layers, 1 if layout.is_whole else config.tensor_parallel_size
    by_name = _by_name(layout.read(path), layers if layout.counts_from_stage else 0)
    if others := [f"{name} in {len(tensors)}" for name, tensors in by_name.items() if len(tensors) != expected]:
        raise UserError(f"{path}: {others[0]} tensor ranks; the configuration has {expected}")
    layout = _with_order_of_copies(layout, config, by_name)
    if layout.table is ranks.nemo and any(".dense_h_to_4h_2." in name for name in by_name):
        layout = layout._replace(table=partial(ranks.nemo, has_gate=True))
    tensors = ranks.merge(by_name, layout.table(config), layers)
    if config.tie_word_embeddings:
        tensors.pop(HEAD, None)
    needed = (EMBEDDING,) if config.tie_word_embeddings else (EMBEDDING, HEAD)
    if absent := [name for name in needed if name not in tensors]:
        raise UserError(f"{path}: holds no {absent[0]}")
    rows = tensors[EMBEDDING].description.shape[0]
    if vocab_size > rows:
        raise UserError(f"--vocab_size={vocab_size}: the embedding in {path} has {rows} rows")
    fields = {name: getattr(config, name) for name in MODEL}
    fields |= {"model_variant": CUSTOM, "tie_word_embeddings": config.tie_word_embeddings}
    fields |= {"vocab_size": vocab_size or rows, "make_vocab_size_divisible_by": 1}
    fields["max_position_embeddings"] = model_shape(config).max_position_embeddings
    if layout.read is _nemo and (states := _nemo_states(path, layout, config, tensors)):
        fields["optimizer"] = config.optimizer
        note = f"{path}: with the optimizer's state after {int(states[STEP].read())} updates"
        tensors |= states
    else:
        note = describe_moments(path, layout)
    if vocab_size:
        tensors |= {name: _first_rows(x, vocab_size) for name, x in tensors.items() if name.endswith((EMBEDDING, HEAD))}
    return Weights(CONFIGURATION(**fields), tensors, note)


def _first_rows(tensor: ranks.MergedTensor, count: int) -> ranks.MergedTensor:
    return ranks.MergedTensor(tensor.description[:count], lambda: tensor.read()[:count])


def _nemo_states(
    path: Path, layout: TrainerFolders, config: TrainConfig, weights: Mapping[str, object]
) -> dict[str, ranks.MergedTensor]:
    """Return the optimizer's state and its fp32 weights; nothing unless every one of `weights` has them."""
    found = [(rank, stage, named_states(loaded)) for rank, stage, loaded in _nemo_files(path)]
    if not all(states for *_, states in found):
        return {}
    merged: dict[str, ranks.MergedTensor] = {}
    layers = model_shape(config).num_layers
    for prefix in next(states.tensors for *_, states in found if states):
        parts = [(rank, stage, states.tensors[prefix]) for rank, stage, states in found if states]
        tensors = ranks.merge(_by_name(parts, layers), layout.table(config), layers)
        if tensors.keys() - {HEAD} != weights.keys() - {HEAD}:
            return {}
        merged |= {prefix + name: tensor for name, tensor in tensors.items() if name in weights}
    updates = torch.tensor(float(max(states.updates for *_, states in found if states)))
    return {**merged, STEP: ranks.MergedTensor(updates.to("meta"), lambda: updates)}


def _with_order_of_queries(layout: TrainerFolders, config: TrainConfig, neox_gqa: str) -> TrainerFolders:
    """Return the layout with the order that --neox_gqa names.

    GPT-NeoX's checkpoints have the same shapes in both orders and record the sizes of the model, but no version of
    GPT-NeoX (`megatron/checkpointing.py: save_ds_checkpoint`), so that only the user can say which one it is.
    """
    shape = model_shape(config)
    if layout.table is not ranks.neox or shape.num_kv_heads == shape.num_attention_heads:
        return layout
    if not neox_gqa:
        raise UserError(
            f"num_kv_heads={shape.num_kv_heads}: GPT-NeoX's grouped queries changed their order on 2024-11-14 (commit "
            "96c242eb), and a checkpoint does not say which it has: give --neox_gqa=head if the code that wrote it is "
            "of that day or later, --neox_gqa=legacy if it is older"
        )
    return layout if neox_gqa == "legacy" else layout._replace(table=partial(ranks.neox, queries=ranks.by_rank))


def _with_order_of_copies(
    layout: TrainerFolders, config: TrainConfig, by_name: Mapping[str, ranks.Ranks]
) -> TrainerFolders:
    """Return the layout with the order in which NxD Training's ranks have the copies of keys, which depends on the
    hardware and is not written down anywhere.
    """
    if layout.table is not ranks.nxdt or config.kv_copies <= 1 or model_shape(config).num_kv_heads == 1:
        return layout
    for name, tensors in by_name.items():
        if name.endswith("qkv_proj.weight_k"):
            keys = ranks.ROWS.merge(tensors)[0]
        elif name.endswith(("qkv_proj.weight", "qkv_proj.weight_qkv")):
            keys = ranks.fused(config).merge(tensors)[1]
        else:
            continue
        return layout._replace(table=partial(ranks.nxdt, are_adjacent=ranks.copies_are_adjacent(config, keys)))
    return layout


class TrainerFile(NamedTuple):
    """The configuration file of another trainer."""

    path: str
    format: str  # of tools/importing
    title: str  # of the trainer
    config: TrainConfig  # the model's settings, and the ranks
    foreign: ForeignConfig


def read_trainer_file(path: str, more: Mapping[str, str]) -> TrainerFile:
    """Return the settings in the trainer's file. Keys that are refused for training alone do not matter.

    more: flags that the file may need. Raises UserError where its weights would mean another function here.
    """
    flags = {"import_config": path, "neox_era": "head"} | {name: text for name, text in more.items() if text}
    result = import_foreign({**flags, "engine": "xla"}, (), CONFIGURATION)  # which keeps the copies of key/value heads
    idle = [str(report) for report in [*result.keys, *result.defaults] if not _concerns_model(result.format, report)]
    if problems := [problem for problem in result.problems if problem.subject not in idle]:
        raise ConfigError(problems)
    one_less = result.foreign.get("model.layernorm_zero_centered_gamma")
    if one_less or result.foreign.get("model.normalization") == "layernorm1p":
        raise UserError(f"{path}: norms are stored minus 1 (layernorm1p), which is not undone here")
    if result.foreign.get("model.rotary_interleaved"):
        raise UserError(f"{path}: rotary_interleaved has channels in another order, which is not undone here")
    return TrainerFile(path, result.format.name, result.format.title, result.config, result.foreign)


def _concerns_model(format_: TrainerFormat, report: KeyReport) -> bool:
    """Return whether a key may change the model: it has no field of ours, or one of the model's."""
    mapping = format_.mapping_of(report.source_key)
    fields = set(mapping.fields if mapping else ())
    return not fields or bool(fields & {*MODEL, "model_config_path"})


# ---- Folders


def _bins(path: Path) -> Read:
    index = path / BIN_INDEX
    files = files_of_index(index, "bin") if index.is_file() else {BIN: set[str]()}
    for file, names in files.items():
        loaded = {name: tensor for name, tensor in load_pickle(path / file).items() if not name.endswith(BUFFERS)}
        if missing := sorted(names - loaded.keys()):
            raise UnreadableError(f"{index}: {file} does not contain {missing[0]}")
        yield 0, 0, {our_name(name): tensor for name, tensor in loaded.items() if not names or name in names}


def _neox(path: Path) -> Read:
    """One file for each layer and tensor rank, or without a pipeline one for each rank; the blocks begin at layer 2."""
    for file in sorted(path.glob("layer_*-model_*-model_states.pt")):
        layer, rank = map(int, re.findall(r"\d+", file.name))
        yield rank, layer, {_neox_name(layer, name): tensor for name, tensor in load_pickle(file).items()}
    for file in sorted(path.glob("mp_rank_*_model_states.pt")):
        module = named(load_pickle(file).get("module") or {}, file)
        parts = ((name.split(".", 2), tensor) for name, tensor in module.items() if name.startswith("sequential."))
        yield int(re.findall(r"\d+", file.name)[0]), 0, {_neox_name(int(n), rest): t for (_, n, rest), t in parts}


def _neox_name(layer: int, name: str) -> str:
    name = name.replace(".scale", ".weight")
    in_block = name.startswith(("input_layernorm", "post_attention_layernorm", "attention.", "mlp."))
    return f"layers.{layer - 2}.{name}" if in_block else name


def _nxdt(path: Path) -> Read:
    """One file for each rank, or with xser one of references and a folder of tensors; layers have their numbers."""
    folder = path / "model" if (path / "model").is_dir() else path
    for file in sorted(folder.glob("dp_rank_00_*.pt")):
        if not (match := NXDT_FILE.fullmatch(file.name)):
            continue
        tensors = load_pickle(file)
        for name, value in tensors.items():
            if isinstance(value, StandIn):
                tensors[name] = unpickle(Path(f"{file}.tensors") / f"tensor_{value.__dict__.get('tid')}.pt")
        yield int(match[1]), int(match[2]), tensors


def _nemo(path: Path) -> Read:
    """Layers are counted from the stage's first."""
    for rank, stage, loaded in _nemo_files(path):
        yield rank, stage, named(loaded.get("state_dict", loaded), path)


def _nemo_files(path: Path) -> Read:
    """One file for each rank, in a folder of its own unless there is one rank."""
    for file in sorted(path.rglob("model_optim_rng.ckpt")) or sorted(path.rglob("model_weights.ckpt")):
        numbers = [int(number) for number in re.findall(r"\d+", file.parent.name)] if file.parent != path else []
        tensor_rank, stage = [*numbers, 0, 0][:2]
        yield tensor_rank, stage, load_pickle(file)


_FLAT = "flat partitions of data-parallel ranks"
_NUMBERED = "numbered in the order of that program's parameter groups, without names"
_NEOX_MOMENTS = (("*optim_states.pt", ""), ("mp_rank_*_model_states.pt", "optimizer"))
_DISTRIBUTED_MOMENTS = ((f"**/{COMMON}", "optimizer"), (f"**/{COMMON}", "optimizer_states"))
_NEMO_MOMENTS = (("**/model_optim_rng.ckpt", "optimizer_states"),)
_DESCRIBED = ("vocab_size", "import_config", "model_config_path")


class TrainerFolders(NamedTuple):
    """The folders of one trainer."""

    title: str
    pattern: str  # of a file in the folder
    read: Callable[[Path], Read]
    table: Callable[[TrainConfig], Sequence[ranks.TensorRule]]
    moments: str  # why optimizer states are not read
    moment_files: tuple[tuple[str, str], ...]  # patterns of the files that hold them, below a key or "" as a whole
    counts_from_stage: bool = False  # layer numbers start at 0 on every pipeline rank
    is_whole: bool = False  # the tensors of all ranks are stored as one
    flags: tuple[str, ...] = _DESCRIBED  # of pretraining.tools.convert, for what the folder does not say


LAYOUTS = (
    TrainerFolders(
        "Hugging Face", f"{BIN}*", _bins, ranks.huggingface, _NUMBERED, (("optimizer.*", ""),), flags=("vocab_size",)
    ),
    TrainerFolders(
        "GPT-NeoX",
        "*model_states.pt",
        _neox,
        ranks.neox,
        _FLAT,
        _NEOX_MOMENTS,
        flags=(*_DESCRIBED, "neox_gqa", "neox_gated_ffn"),
    ),
    TrainerFolders("NxD Training", "**/dp_rank_00_*.pt", _nxdt, ranks.nxdt, _FLAT, (("optim/*", ""),)),
    TrainerFolders(
        "NeMo (distributed)",
        f"**/{COMMON}",
        read_distributed,
        ranks.nemo,
        "not read",
        _DISTRIBUTED_MOMENTS,
        is_whole=True,
    ),
    TrainerFolders("NeMo", "**/model_*.ckpt", _nemo, ranks.nemo, _NUMBERED, _NEMO_MOMENTS, counts_from_stage=True),
)


def describe_moments(path: Path, layout: TrainerFolders) -> str:
    """Return why the optimizer states in the folder `path` are not converted, "" if it has none."""
    files = ((next(path.glob(pattern), None), key) for pattern, key in layout.moment_files)
    if not any(file and (not key or load_pickle(file).get(key)) for file, key in files):
        return ""
    return f"{path}: the optimizer states of {layout.title} are {layout.moments}; training starts with moments of 0"


def trainer_folders_of(path: Path) -> TrainerFolders | None:
    """Return the layout of the folder `path`, None if it is not one of these or holds safetensors too."""
    if any(path.glob("*.safetensors")):
        return None
    return next((layout for layout in LAYOUTS if any(path.glob(layout.pattern))), None)


def _by_name(parts: Iterable[tuple[int, int, dict[str, Any]]], layers: int) -> dict[str, list[Tensor]]:
    """Return each tensor of every tensor rank. layers: of the model, 0 where the parts count them from the first."""
    found: dict[str, dict[int, Tensor]] = {}
    read = sorted(parts, key=lambda part: part[:2])
    stages = 1 + max((stage for _, stage, _ in read), default=0)
    for rank, stage, tensors in read:
        first = stage * layers // stages
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                found.setdefault(_shifted(name, first), {}).setdefault(rank, tensor)
    return {name: [by_rank[rank] for rank in sorted(by_rank)] for name, by_rank in found.items()}


def _shifted(name: str, first: int) -> str:
    return re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + first}.", name, count=1)
