"""Write a checkpoint as the files of another trainer's ranks: NxD Core's, as NxD Training uses it, and NeMo's.

The trainer's own configuration file says how many ranks there are and which of its names the tensors have; the tables
of ranks.py, with which pickles.py reads these files, say how a tensor lies on the ranks. Layouts: NxD Core
`trainer/checkpoint.py` and `scripts/checkpoint_converter.py`, NeMo's `NLPSaveRestoreConnector`.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import ZipFile

import torch
from torch import Tensor

from pretraining.checkpoint.manifest import HEAD
from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import missing_dimensions, model_shape, padded_vocabulary
from pretraining.extensions.memory import available_memory
from pretraining.extensions.packages import extra_packages
from pretraining.storage import DISK
from pretraining.tools.convert.pickles import MODEL, TrainerFile
from pretraining.tools.convert.ranks import Placement, TensorRule, find_rule, nemo, nxdt

LAYER, NUMBERED = "layers.{layer}.", re.compile(r"layers\.\d+\.")
NORMS = ("input_layernorm.{end}", "post_attention_layernorm.{end}")
OWN_BLOCK = ("self_attention.dense.{end}", "mlp.dense_h_to_4h.{end}", "mlp.dense_4h_to_h.{end}", *NORMS)
GATE = "mlp.dense_h_to_4h_2.{end}"
CORE_BLOCK = (  # megatron-core's with Transformer Engine, whose products start with the norms
    *("self_attention.linear_qkv.{end}", "self_attention.linear_qkv.layer_norm_{end}"),
    *("self_attention.linear_proj.{end}", "mlp.linear_fc1.{end}", "mlp.linear_fc1.layer_norm_{end}"),
    "mlp.linear_fc2.{end}",
)
LLAMA_BLOCK = ("self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight", *NORMS)
NEMO_CLASS = "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel"
ORDERS = ("trn1", "trn2")  # of the copies of keys and values: see ranks.nxdt


class RankFiles(NamedTuple):
    """The files of one trainer's ranks."""

    title: str
    ranks: int  # tensor ranks
    stage_of: tuple[int, ...]  # the pipeline rank of each layer
    names: tuple[str, ...]  # of tensors there, with {layer} and {end}: weight or bias
    table: Sequence[TensorRule]
    path: Callable[[int, int], str]  # of a tensor rank's file, for a stage
    rows: int  # of embedding and head
    other_files: dict[str, bytes]
    counts_from_stage: bool = False  # layer numbers start at 0 on every stage
    frequencies: str = ""  # name of the rotary frequencies, which these models save
    is_xser: bool = False  # files of references, and each tensor in a file of its own

    @property
    def stages(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_of) + 1


class Source(NamedTuple):
    """What one tensor there is made of."""

    names: tuple[str, ...]  # here
    rule: Placement


# ---- Which files a configuration describes


def nxdt_files(file: TrainerFile, config: TrainConfig, order: str) -> RankFiles:
    """NxD Training's: with model_source hf the names of NxD Core's Llama, with megatron those of its own models.

    order: one of ORDERS, where the file has copies of keys and values. Raises UserError if it is not given then.
    """
    shape, copies, foreign = model_shape(config), max(config.kv_copies, 1), file.foreign
    is_grouped = shape.num_kv_heads != shape.num_attention_heads
    rows, frequencies = shape.vocab_size, ""
    if foreign.get("model_source") == "megatron":
        attention = ("query.{end}", "key_value.{end}") if is_grouped else ("query_key_value.{end}",)
        names = _megatron(
            "language_model.", "encoder.", (*(f"self_attention.{name}" for name in attention), *OWN_BLOCK)
        )
        frequencies = f"language_model.encoder.{LAYER}self_attention.core_attention.rotary_emb.inv_freq"
        rows = padded_vocabulary(config)
    else:
        if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
            raise UserError(f"head_dim={shape.head_dim}: NxD Core has hidden_size / num_attention_heads alone")
        if copies > 1 and shape.num_kv_heads > 1 and not order:
            raise UserError(
                f"{file.path}: kv_replicator={copies} has another order of the copies on Trn2 than on Trn1: give "
                f"--hw_backend={' or '.join(ORDERS)}, where the checkpoint will be trained"
            )
        if rows % config.tensor_parallel_size:
            fit = padded_vocabulary(replace(config, make_vocab_size_divisible_by=1))
            raise UserError(
                f"vocab_size={rows}: tensor_model_parallel_size={config.tensor_parallel_size} does not divide it, and "
                f"NxD Core pads no vocabulary: write vocab_size={fit} in the config.json that {file.path} names"
            )
        block = (*(f"self_attn.{name}" for name in _projections(foreign, is_grouped)), *LLAMA_BLOCK)
        names = ("model.embed_tokens.weight", *(f"model.{LAYER}{name}" for name in block))
        names = (*names, "model.norm.weight", "lm_head.weight")
    return RankFiles(
        file.title,
        config.tensor_parallel_size,
        core_stages(file, shape.num_layers),
        names,
        nxdt(config, are_adjacent=order == ORDERS[1]),
        lambda rank, stage: f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt",
        rows,
        {"checkpoint": b"1", "done": b"1"},  # a folder of NxD Core's, and a complete one
        frequencies=frequencies,
        is_xser=bool(foreign.get("exp_manager.load_xser")),
    )


def core_stages(file: TrainerFile, layers: int) -> tuple[int, ...]:
    """Return NxD Core's stage of each layer: stage s of S has the pieces s, s + S, .. of consecutive layers, which
    pipeline_cuts divides, or which are equal but for the last ones, that have a layer more where layers remain.

    Raises UserError where the file divides the layers into other numbers of pieces.
    """
    stages = max(file.foreign.integer("distributed_strategy.pipeline_model_parallel_size"), 1)
    count = stages * max(file.foreign.integer("distributed_strategy.virtual_pipeline_model_parallel_size"), 1)
    if stages == 1:
        return (0,) * layers
    if count > layers:
        raise UserError(f"{file.path}: its pipeline has {count} pieces, which is more than num_layers={layers}")
    small, larger = divmod(layers, count)
    sizes = [small] * (count - larger) + [small + 1] * larger
    if value := file.foreign.get("model.pipeline_cuts"):
        last_layers = [int(number) for number in re.findall(r"(\d+)(?=\W*(?:,|$))", str(value))]
        sizes = [last - first for first, last in pairwise([-1, *last_layers, layers - 1])]
        if len(sizes) != count or min(sizes) < 1:
            raise UserError(f"{file.path}: pipeline_cuts={value} does not cut {layers} layers into {count} pieces")
    return tuple(piece % stages for piece, size in enumerate(sizes) for _ in range(size))


def _projections(foreign: Any, is_grouped: bool) -> tuple[str, ...]:
    if foreign.get("model.qkv_linear"):
        fused, parts = "qkv_proj.weight_qkv", tuple(f"qkv_proj.weight_{letter}" for letter in "qkv")
        return (fused,) if foreign.get("model.fuse_qkv") else parts
    if foreign.get("model.fuse_qkv") and not is_grouped:
        return ("qkv_proj.weight",)
    return tuple(f"{letter}_proj.weight" for letter in "qkv")


def nemo_files(file: TrainerFile, config: TrainConfig, order: str) -> RankFiles:
    """NeMo's: an unpacked .nemo archive, with the names of megatron-core where the file has mcore_gpt."""
    shape, stages = model_shape(config), max(file.foreign.integer("model.pipeline_model_parallel_size"), 1)
    virtual = file.foreign.get("model.virtual_pipeline_model_parallel_size")
    if shape.num_layers % stages or virtual not in (None, 1):
        raise UserError(
            f"{file.path}: files of equal stages alone are written: pipeline_model_parallel_size={stages} must divide "
            f"num_layers={shape.num_layers}, and virtual_pipeline_model_parallel_size={virtual} must be null"
        )
    is_core = bool(file.foreign.get("model.mcore_gpt"))
    has_gate = shape.gated and not is_core and not str(file.foreign.get("model.activation")).startswith("fast-")
    if is_core:
        names = _megatron("model.", "decoder.", CORE_BLOCK)
    elif shape.num_kv_heads != shape.num_attention_heads:
        raise UserError(
            f"{file.path}: num_query_groups={shape.num_kv_heads} is below num_attention_heads, which NeMo has with "
            "megatron-core alone: write mcore_gpt: True and transformer_engine: True"
        )
    else:
        block = ("self_attention.query_key_value.{end}", *OWN_BLOCK, *((GATE,) if has_gate else ()))
        names = _megatron("model.language_model.", "encoder.", block)

    def path(rank: int, stage: int) -> str:
        folder = f"mp_rank_{rank:02d}/" if stages == 1 else f"tp_rank_{rank:02d}_pp_rank_{stage:03d}/"
        return f"{folder if stages * config.tensor_parallel_size > 1 else ''}model_weights.ckpt"

    return RankFiles(
        file.title,
        config.tensor_parallel_size,
        tuple(layer * stages // shape.num_layers for layer in range(shape.num_layers)),
        names,
        nemo(config, has_gate),
        path,
        padded_vocabulary(config),
        {"model_config.yaml": _model_config(file)},
        counts_from_stage=True,
        frequencies="" if is_core else "model.language_model.rotary_pos_emb.inv_freq",
    )


def _megatron(prefix: str, stack: str, block: Sequence[str]) -> tuple[str, ...]:
    embeddings = (f"embedding.{kind}_embeddings.weight" for kind in ("word", "position"))
    layers = (f"{stack}{LAYER}{name}" for name in block)
    return tuple(
        prefix + name for name in (*embeddings, *layers, f"{stack}final_layernorm.{{end}}", "output_layer.weight")
    )


def _model_config(file: TrainerFile) -> bytes:
    """Return the file's model section as model_config.yaml, with what NeMo adds to it when it saves a model."""
    tree: dict[str, Any] = {"target": NEMO_CLASS, "precision": file.foreign.get("trainer.precision")}
    for key, value in file.foreign.values.items():
        *above, name = key.split(".")
        if above[:1] == ["model"]:
            node = tree
            for part in above[1:]:
                node = node.setdefault(part, {})
            node[name] = value
    with extra_packages("model_config.yaml"):
        import yaml
    return yaml.safe_dump(tree, sort_keys=False).encode()


FILES_OF = {"nxdt": nxdt_files, "nemo": nemo_files}


def rank_files(file: TrainerFile, ours: TrainConfig, order: str) -> RankFiles:
    """Return the files that the trainer of `file` reads for a checkpoint of `ours`.

    Raises UserError where it describes another model or ranks that this model cannot be divided into.
    """
    if file.format not in FILES_OF:
        raise UserError(
            f"{file.path}: checkpoints are written for NxD Training, NxD Core and NeMo, not for {file.title}"
        )
    if order and file.format != "nxdt":
        raise UserError(f"--hw_backend={order}: the files of {file.title} hold no copies of keys and values")
    tokens = model_shape(ours).vocab_size
    theirs = replace(file.config, vocab_size=file.config.vocab_size or tokens)
    if missing := missing_dimensions(theirs):
        raise UserError(f"{file.path}: has no {', '.join(missing)}")
    pairs = [
        {**vars(config), **vars(model_shape(config)), "qkv_bias": config.qkv_bias and not config.attn_bias}
        for config in (ours, theirs)  # attn_bias has the biases of qkv_bias, too
    ]
    problems = [
        Problem(f"{name}={pairs[0][name]}", f"{file.path} describes a model with {name}={pairs[1][name]}")
        for name in (*MODEL, "tie_word_embeddings")
        if name != "vocab_size" and pairs[0][name] != pairs[1][name]
    ]
    if problems:
        raise ConfigError(problems)
    files = FILES_OF[file.format](file, theirs, order)
    if files.rows < tokens:
        raise UserError(
            f"{file.path}: its embedding has {files.rows} rows, the checkpoint's vocab_size={tokens}: if some of these "
            "are padding, give --vocab_size=N, the tokens without it"
        )
    _check_division(file, theirs, files)
    return files


def _check_division(file: TrainerFile, config: TrainConfig, files: RankFiles) -> None:
    """Raise UserError where a rank would have a part of a head, or two stages the same tensor."""
    shape, copies = model_shape(config), max(config.kv_copies, 1)
    tensor, pipeline = f"tensor_model_parallel_size={files.ranks}", f"pipeline_model_parallel_size={files.stages}"
    remainders = {
        f"{tensor} does not divide num_attention_heads={shape.num_attention_heads}": shape.num_attention_heads
        % files.ranks,
        f"{tensor} does not divide num_kv_heads={shape.num_kv_heads} x {copies} copies": (
            shape.num_kv_heads * copies % files.ranks
        ),
        f"{pipeline} with tied embeddings, of which the last stage has a copy": (
            config.tie_word_embeddings and HEAD not in files.names and files.stages > 1
        ),
    }
    for words, is_refused in remainders.items():
        if is_refused:
            raise UserError(f"{file.path}: {words}: such files are not written; divide the model in another way")


# ---- What is in each file


def plan_stages(files: RankFiles, ours: Mapping[str, Tensor]) -> list[dict[str, Source]]:
    """Return the tensors of each stage by their names there. Raises UserError for one of ours that has no place.

    ours: descriptions of the tensors to be written.
    """
    stages: list[dict[str, Source]] = [{} for _ in range(files.stages)]
    used = set[str]()
    for template in files.names:
        for end in ("weight", "bias"):
            row, pattern, in_layer = find_rule(template.format(layer=0, end=end), files.table)
            for layer in range(len(files.stage_of)) if in_layer else (0,):
                names = tuple(name.format(layer) for name in pattern)
                if not ours.keys() >= set(names):
                    continue
                stage = files.stage_of[layer] if in_layer else 0 if ".embed" in names[0] else files.stages - 1
                number = layer - files.stage_of.index(stage) if files.counts_from_stage else layer
                stages[stage][template.format(layer=number, end=end)] = Source(names, row.rule)
                used.update(names)
    if rest := sorted(ours.keys() - used):
        raise UserError(f"{files.title} has no tensor for {', '.join(rest[:5])} (of {len(rest)}): not exported")
    for name, source in ((name, source) for stage in stages for name, source in stage.items()):
        try:
            source.rule.split([ours[each] for each in source.names], files.ranks)
        except RuntimeError as error:
            shape = list(ours[source.names[0]].shape)
            raise UserError(f"{name}: shape {shape} cannot be divided over {files.ranks} tensor ranks") from error
    return stages


def with_rows(embedding: Tensor, tokens: int, rows: int) -> Tensor:
    """Return `tokens` rows and, up to `rows`, copies of the last one, as Megatron pads.

    A row of zeros would be as probable as a token whose logit is 0; a copy is as rare as the last token.
    """
    return torch.cat([embedding[:tokens], embedding[tokens - 1 : tokens].expand(rows - tokens, -1)])


def rotary_frequencies(config: TrainConfig) -> Tensor | None:
    """Return the frequencies of rotary positions without scaling, fp32 [rotary channels / 2]; None: other positions."""
    if config.position_embedding_type != "rope":
        return None
    shape = model_shape(config)
    channels = int(shape.head_dim * config.rotary_percentage)
    return 1.0 / (shape.rope_theta ** (torch.arange(0, channels, 2).float() / channels))


# ---- Writing


def write_ranks(
    folder: Path,
    files: RankFiles,
    stages: Sequence[Mapping[str, Source]],
    ours: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    frequencies: Tensor | None,
) -> None:
    """Write the files of all ranks, on the disk on return.

    ours: descriptions of the tensors that `read` returns by their names here. frequencies: of rotary positions.
    """
    for stage, sources in enumerate(stages):
        for turn in _turns(files, sources, ours):
            states: dict[int, dict[str, Tensor]] = {rank: {} for rank in turn}
            for name, source in sources.items():
                shards = source.rule.split([read(each) for each in source.names], files.ranks)
                for rank, state in states.items():
                    state[name] = shards[rank].clone(memory_format=torch.contiguous_format)  # not the whole of a view
            for rank, state in states.items():
                if frequencies is not None and files.frequencies:
                    layers = dict.fromkeys(match[0] for name in sources if (match := NUMBERED.search(name)))
                    state |= {files.frequencies.replace(LAYER, layer): frequencies for layer in layers}
                path = folder / files.path(rank, stage)
                path.parent.mkdir(exist_ok=True)
                with refused_writes(path):
                    _save_with_references(state, path) if files.is_xser else _save(state, path)
                    DISK.sync(path.parent)


def _turns(files: RankFiles, sources: Mapping[str, Source], ours: Mapping[str, Tensor]) -> Iterator[range]:
    """Yield the ranks that are written together.

    Every turn reads all tensors of a stage again, so half of the free memory is used for the shards of one.
    """
    shards = [source.rule.split([ours[name] for name in source.names], files.ranks)[0] for source in sources.values()]
    at_once = max(available_memory() // 2 // max(sum(shard.nbytes for shard in shards), 1), 1)
    for first in range(0, files.ranks, at_once):
        yield range(first, min(first + at_once, files.ranks))


@contextmanager
def refused_writes(path: Path) -> Iterator[None]:
    """Raise UserError where the system refuses to write, which torch reports as an error of its own."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be written: {error.__context__ or error}") from error


def _save(value: object, path: Path) -> None:
    with _synced(path) as file:
        torch.save(value, file)


@contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


class TensorReference:
    """What torch_xla.utils.serialization has in the place of a tensor: the number of its file."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


def _save_with_references(state: Mapping[str, Tensor], path: Path) -> None:
    """Write torch-xla's format: each tensor in a file of its own, their dtypes and shapes, and the references."""
    folder = Path(f"{path}.tensors")
    folder.mkdir()
    for number, tensor in enumerate(state.values()):
        _save(tensor, folder / f"tensor_{number}.pt")
    DISK.sync(folder)
    described = {number: {"dtype": x.dtype, "shape": x.shape} for number, x in enumerate(state.values())}
    _save(described, Path(f"{path}.info.pt"))
    with _synced(path) as file:
        _write_references(list(state), file)


def _write_references(names: Sequence[str], file: IO[bytes]) -> None:
    """Write an archive that torch.load reads as TensorReference of torch-xla, which need not be installed here."""
    references = {name: TensorReference(number) for number, name in enumerate(names)}
    own, theirs = (
        f"c{module}\n{TensorReference.__name__}\n".encode() for module in (__name__, "torch_xla.utils.serialization")
    )
    data = pickle.dumps(references, protocol=2)  # torch.save's, in which a class is a line of text
    assert own in data
    with ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": data.replace(own, theirs), "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", content)
