"""Convert checkpoints of this recipe to Hugging Face's format and other trainers' files, and back.

    python -m pretraining.tools.convert SOURCE TARGET [--dtype=bf16] [--tokenizer_path=FILE] [--shard_size=5e9]
        [--average_with=RUN/checkpoints/step_900,RUN/checkpoints/step_800] [--use_ema]
    python -m pretraining.tools.convert SOURCE TARGET --export_config=FILE [--hw_backend=trn1] [--vocab_size=32000]

SOURCE is a run, a checkpoints folder or a step_N folder, and TARGET becomes a Hugging Face folder: config.json,
safetensors with an index, the tokenizer. With --average_with, the weights are the mean of several checkpoints; with
--use_ema, they are the moving averages of a run with ema_decay. Or SOURCE is a Hugging Face folder, and TARGET/step_0
becomes a checkpoint without moments; so does a checkpoint of GPT-NeoX, NxD Training or NeMo with --import_config=FILE,
its trainer's configuration, and --neox_gqa=head or legacy for GPT-NeoX's grouped queries. Training starts from a
Hugging Face folder with safetensors as it is: give it as --ckpt_load_path.

The way back: --export_config=FILE, the configuration with which NxD Training or NeMo will load TARGET, says how many
ranks there are and how their tensors are named; --hw_backend=trn1 or trn2 where they hold copies of keys and values.
--vocab_size=N says how many rows are tokens where rows of padding follow them, in both directions.
"""

from __future__ import annotations

import argparse
import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from main_training import CONFIGURATION
from pretraining.checkpoint.compatibility import changes, saved_config
from pretraining.checkpoint.manifest import DTYPES, EMBEDDING, HEAD, Checkpoint, Entry, Facts, Manifest
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.shards import FilePlan, plan_file, write_files
from pretraining.checkpoint.store import IO_WORKERS, PendingSave, check_fit, is_weight
from pretraining.config.declaration import Resume
from pretraining.config.errors import UserError
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.extensions.checkpoints import (
    ALLOW_REMOTE,
    open_any_checkpoint,
    read_tensors,
    refuse_remote,
    separator_of,
)
from pretraining.extensions.huggingface.description import CONFIG, GPT_NEOX, is_gpt_neox
from pretraining.extensions.huggingface.folder import INDEX, SINGLE, is_huggingface
from pretraining.extensions.huggingface.gpt_neox import fuse, their_names
from pretraining.models.init import on_meta
from pretraining.storage import DISK, PARTIAL, Location, location, rename
from pretraining.tools.arguments import ArgumentParser, at_least, ends_on_mistakes, storable_location
from pretraining.tools.convert.description import config_json
from pretraining.tools.convert.export_tokenizer import export_tokenizer, is_qwens
from pretraining.tools.convert.pickles import (
    LAYOUTS,
    TrainerFile,
    TrainerFolders,
    Weights,
    describe_moments,
    open_pickles,
    read_trainer_file,
    trainer_folders_of,
)
from pretraining.tools.convert.write_ranks import (
    ORDERS,
    plan_stages,
    rank_files,
    rotary_frequencies,
    with_rows,
    write_ranks,
)

if TYPE_CHECKING:
    from pretraining.extensions.lora.adapter import SavedAdapter
    from pretraining.extensions.lora.settings import LoraConfig

CHOICES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_SIZE = 5_000_000_000  # bytes of one file, transformers' default before version 5
ADAPTER = "lora_adapter"  # folder next to the base model
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of writes alone
# Flags that some conversions do not read, and their defaults
OPTIONS = {
    **dict.fromkeys(("tokenizer_path", "average_with", "import_config", "hw_backend", "model_config_path"), ""),
    **dict.fromkeys(("neox_gqa", "neox_gated_ffn"), ""),
    **{"use_ema": False, "vocab_size": 0, "shard_size": SHARD_SIZE},
}
ALONE = Peers(together=False)


@ends_on_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Convert and print the folder of the result. Returns exit code 2 on a mistake of the user."""
    flags = parse(arguments)
    dtype = CHOICES[flags.dtype] if flags.dtype else None
    layout = trainer_folders_of(flags.source) if isinstance(flags.source, Path) else None
    _check_flags(flags, layout)
    more = {name: getattr(flags, name) for name in ("model_config_path", "neox_gated_ffn")}
    if layout:
        gqa, tokens = flags.neox_gqa, flags.vocab_size
        weights = open_pickles(flags.source, layout, flags.import_config, gqa, tokens, **more)
        _print_note(weights.note)
        print(from_pickles(weights, flags.source, flags.target, dtype))
        return 0
    source = open_any_checkpoint(flags.source, flags.allow_remote)
    if is_huggingface(flags.source):
        _print_note(describe_moments(flags.source, LAYOUTS[0]) if isinstance(flags.source, Path) else "")
        print(to_checkpoint(source, flags.target, dtype))
    else:
        if not isinstance(flags.target, Path):
            raise UserError(f"{flags.target}: an export must be local: copy it afterwards")
        if not (flags.export_config or flags.allow_remote or flags.tokenizer_path):
            saved = saved_config(source.facts.config, CONFIGURATION)
            refuse_remote("tokenizer_path", saved.tokenizer_path, flags.source)
        paths = map(location, comma_separated(flags.average_with))
        sources = [source, *(open_any_checkpoint(path, flags.allow_remote) for path in paths)]
        if flags.use_ema:
            from pretraining.extensions.moving_average.checkpoint import with_moving_averages

            sources = list(map(with_moving_averages, sources))
        source, *others = sources
        if flags.export_config:
            file = read_trainer_file(flags.export_config, more)
            print(to_ranks(source, flags.target, file, dtype, flags.vocab_size, flags.hw_backend, others))
            return 0
        print(to_huggingface(source, flags.target, dtype, flags.tokenizer_path, int(flags.shard_size), others))
    return 0


def _check_flags(flags: argparse.Namespace, layout: TrainerFolders | None) -> None:
    """Raise UserError for a flag that this conversion does not read. layout: of another trainer's folder."""
    is_theirs = layout or is_huggingface(flags.source)
    if flags.export_config and is_theirs:
        raise UserError(f"--export_config: {flags.source} is no checkpoint of this recipe; convert it to one first")
    if flags.export_config and flags.tokenizer_path:
        raise UserError("--tokenizer_path: the file of --export_config names the tokenizer; leave it out")
    if flags.vocab_size < 0:
        raise UserError(f"--vocab_size={flags.vocab_size}: a number from 1")
    if layout:
        kind, read = f"a checkpoint of {layout.title}", layout.flags
    elif is_theirs:
        kind, read = "safetensors in Hugging Face's format", ()
    elif flags.export_config:
        kind, read = "--export_config", ("vocab_size", "hw_backend", "model_config_path", "average_with", "use_ema")
    else:
        kind, read = "an export to Hugging Face's format", ("tokenizer_path", "shard_size", "average_with", "use_ema")
    given = {name: value for name, default in OPTIONS.items() if (value := getattr(flags, name)) != default}
    if idle := [f"--{name}={value}" for name, value in given.items() if name not in read]:
        raise UserError(f"{idle[0]}: does nothing for {kind}; leave it out")


def _print_note(note: str) -> None:
    if note:
        print(f"note: {note}", file=sys.stderr)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog="python -m pretraining.tools.convert", allow_abbrev=False)
    parser.add_argument(
        "source", type=storable_location, help="a run, a checkpoint, or a folder in Hugging Face's format"
    )
    parser.add_argument("target", type=storable_location, help="folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=CHOICES, help="of the written tensors (default: unchanged)")
    parser.add_argument(
        "--tokenizer_path", default="", help="sentencepiece model or tokenizer.json to add (default: the run's)"
    )
    parser.add_argument("--average_with", default="", help="more checkpoints, comma-separated, for the mean of all")
    parser.add_argument("--use_ema", action="store_true", help="write the moving averages of the weights (ema_decay)")
    parser.add_argument("--allow_remote", action="store_true", help=ALLOW_REMOTE)
    parser.add_argument("--import_config", default="", help="configuration file of the trainer that wrote `source`")
    parser.add_argument(
        "--export_config", default="", help="configuration file of NxD Training or NeMo, which will load `target`"
    )
    parser.add_argument(
        "--hw_backend",
        choices=ORDERS,
        default="",
        help="whose order the copies of keys and values have (kv_replicator)",
    )
    parser.add_argument("--vocab_size", type=int, default=0, help="tokens, where rows of padding follow them")
    parser.add_argument("--model_config_path", default="", help="config.json that the configuration file refers to")
    parser.add_argument(
        "--neox_gqa",
        choices=("head", "legacy"),
        default="",
        help="order of GPT-NeoX's grouped queries: written by its code of 2024-11-14 or later, or by an older one",
    )
    parser.add_argument("--neox_gated_ffn", default="", help="as in training, for the file of --import_config")
    size = at_least(1, float)
    parser.add_argument(
        "--shard_size", type=size, default=SHARD_SIZE, help="bytes of a file at most (default: %(default)g)"
    )
    return parser.parse_args(arguments)


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read one unsharded tensor and check it."""
    return read_tensors(checkpoint, name.__eq__)[name]


def _placeholders(checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors without memory that describe those of these names, floating ones as `dtype` if given."""
    entries = {name: checkpoint.manifest.tensors[name] for name in names}
    return {
        name: torch.empty(entry.shape, dtype=dtype or DTYPES[entry.dtype], device="meta")
        for name, entry in entries.items()
    }


# ---- To Hugging Face


def to_huggingface(
    checkpoint: Checkpoint,
    target: Path,
    dtype: torch.dtype | None = None,
    tokenizer_path: str = "",
    shard_size: int = SHARD_SIZE,
    others: Sequence[Checkpoint] = (),
) -> Path:
    """Write the weights of `checkpoint` to the new folder `target`, which appears when it is complete.

    others: the mean of their weights and its own is written.
    """
    config = saved_config(checkpoint.facts.config, CONFIGURATION)
    _check_average(checkpoint, config, others)
    names = [name for name in checkpoint.manifest.tensors if is_weight(name)]
    tokenizer_path = tokenizer_path or config.tokenizer_path
    separator = separator_of(checkpoint.facts, config, tokenizer_path)
    special_ids, tokenizer = export_tokenizer(tokenizer_path, config.bos_token, separator)
    adapter = _adapter_of(checkpoint)
    if adapter and not adapter.is_merged and is_gpt_neox(config.norm_type):  # whose names differ: gpt_neox.py
        remedy = "--lora_load_path reads them, and for PEFT train with --lora_save_mode=merged"
        _print_note(f"adapters have Llama's names, and Hugging Face's GPT-NeoX has no such modules: {remedy}")
    if adapter and not config.saves_frozen:
        with _new_folder(target, tokenizer) as folder:
            adapter.write(folder, names, partial(read_tensor, checkpoint), dtype)
        return target
    ours = _placeholders(checkpoint, filterfalse(config.is_added, names), dtype)
    stored = str(next(iter(ours.values())).dtype).removeprefix("torch.")
    fields = config_json(config, stored) | special_ids
    if fields["model_type"] == "qwen2" and tokenizer and not is_qwens(tokenizer):
        remedy = "load it with PreTrainedTokenizerFast.from_pretrained"
        _print_note(f"AutoTokenizer of transformers 5 takes Qwen's rules for a qwen2 model, and other ids: {remedy}")
    parts = their_names(ours) if fields["model_type"] == GPT_NEOX else {name: (name,) for name in ours}
    heads = fields["num_attention_heads"]
    state = {name: fuse([ours[part] for part in group], heads) for name, group in parts.items()}
    plans = _plan_shards(state, shard_size)

    def read(item: WriteItem) -> Tensor:
        return fuse([_mean([checkpoint, *others], name) for name in parts[item.index.fqn]], heads)

    with _new_folder(target, tokenizer) as folder:  # after what can be refused, so that nothing is left of a refusal
        write_files(folder, plans, read, IO_WORKERS)
        if adapter and not adapter.is_merged:
            (folder / ADAPTER).mkdir()
            adapter.write(folder / ADAPTER, names, partial(read_tensor, checkpoint), dtype)
        _write_json(folder / CONFIG, fields)
        if len(plans) > 1:
            total = sum(chunk.size for plan in plans for chunk in plan.chunks)
            weight_map = {chunk.item.index.fqn: plan.name for plan in plans for chunk in plan.chunks}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return target


def to_ranks(
    checkpoint: Checkpoint,
    target: Path,
    file: TrainerFile,
    dtype: torch.dtype | None = None,
    vocab_size: int = 0,
    order: str = "",
    others: Sequence[Checkpoint] = (),
) -> Path:
    """Write the weights of `checkpoint` to the new folder `target`, as the ranks that another trainer's file describes.

    vocab_size: rows of the vocabulary, 0 for the checkpoint's. order: of copies, see nxdt_files. others: as above.
    """
    config = saved_config(checkpoint.facts.config, CONFIGURATION)
    _check_average(checkpoint, config, others)
    if (adapter := _adapter_of(checkpoint)) and not adapter.is_merged:
        raise UserError("--export_config: no other trainer has these adapters; train with --lora_save_mode=merged")
    config = replace(config, vocab_size=vocab_size) if vocab_size else config
    files, tokens = rank_files(file, config, order), model_shape(config).vocab_size
    names = {name: name for name in checkpoint.manifest.tensors if is_weight(name) and not config.is_added(name)}
    if config.tie_word_embeddings and HEAD in files.names:
        names[HEAD] = EMBEDDING

    def fitted(name: str, tensor: Tensor) -> Tensor:
        return with_rows(tensor, tokens, files.rows) if name in (EMBEDDING, HEAD) else tensor

    def read(name: str) -> Tensor:
        return fitted(name, _mean([checkpoint, *others], names[name]).to(ours[name].dtype))

    described = _placeholders(checkpoint, names.values(), dtype)
    if tokens > (rows := len(described[EMBEDDING])):
        raise UserError(f"--vocab_size={tokens}: the embedding in {checkpoint.path} has {rows} rows")
    ours = {name: fitted(name, described[source]) for name, source in names.items()}
    stages = plan_stages(files, ours)
    with _new_folder(target, files.other_files) as folder:
        write_ranks(folder, files, stages, ours, read, rotary_frequencies(config))
    return target


def _adapter_of(checkpoint: Checkpoint) -> SavedAdapter | None:
    """Return what writes and merges the adapter in `checkpoint`; None: it has none."""
    config = saved_config(checkpoint.facts.config, CONFIGURATION)
    if not any(map(config.is_added, checkpoint.manifest.tensors)):
        return None
    from pretraining.extensions.lora.adapter import SavedAdapter

    return SavedAdapter(cast("LoraConfig", config))


def _refuse_used(target: Location) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists already; give a new folder")


@contextmanager
def _new_folder(target: Path, files: Mapping[str, bytes]) -> Iterator[Path]:
    """Yield the folder with these files that becomes `target` when it is complete."""
    if not target.name:
        raise UserError(f"{target}: give the new folder by its name, because it appears when it is complete")
    _refuse_used(target)
    folder = target.with_name(target.name + PARTIAL)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for name, content in files.items():
            DISK.write_file(folder / name, content)
        yield folder
        DISK.sync(folder)
    except BaseException as error:  # a disk that it has filled gets its room back
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            remedy = "make room, or give another folder"
            raise UserError(f"{target}: cannot be written: {error.strerror}; {remedy}") from error
        raise
    rename(folder, target)


def _write_items(state: dict[str, Tensor]) -> list[WriteItem]:
    """Return what is to be written of these tensors, in their order."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan().items


def _plan_shards(state: dict[str, Tensor], limit: int) -> list[FilePlan]:
    """Plan files of at most `limit` bytes of tensors each, or one tensor if that is larger."""
    groups: list[list[WriteItem]] = [[]]
    room = limit
    for item in _write_items(state):
        size = state[item.index.fqn].nbytes
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [plan_file(name, group, None) for name, group in zip(names, groups, strict=True)]


def _exported_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read an unsharded tensor, with its adapter merged if lora_save_mode says so, and with its factor.

    What was merged or multiplied is in fp32, whose dtype is changed when it is written.
    """
    config, weight = saved_config(checkpoint.facts.config, CONFIGURATION), read_tensor(checkpoint, name)
    if (scale := config.folded_scale(name)) != 1:
        return weight.float() * scale
    adapter = _adapter_of(checkpoint)
    if not adapter or not adapter.is_merged:
        return weight
    return adapter.merged(name, weight, partial(read_tensor, checkpoint))


def _check_average(checkpoint: Checkpoint, config: TrainConfig, others: Sequence[Checkpoint]) -> None:
    """Raise UserError if the mean of the weights is not a model."""
    if others and (adapter := _adapter_of(checkpoint)) and not adapter.is_merged:
        raise UserError("--average_with: the mean of two adapters is another function than their mean; merge them")
    shapes = [{name: entry.shape for name, entry in each.manifest.tensors.items() if is_weight(name)}
              for each in (checkpoint, *others)]  # fmt: skip
    for other, theirs in zip(others, shapes[1:], strict=True):
        if different := sorted(name for name in {*shapes[0], *theirs} if shapes[0].get(name) != theirs.get(name)):
            raise UserError(f"--average_with: {other.path} has another {different[0]} than {checkpoint.path}")
        if changed := [each for each in changes(other.facts.config, config) if each.policy is Resume.FUNCTION]:
            raise UserError(f"--average_with: {other.path} is of another model than {checkpoint.path}: {changed[0]}")


def _mean(checkpoints: Sequence[Checkpoint], name: str) -> Tensor:
    """Return one exported tensor; the mean of several is in fp32, whose dtype is changed when it is written."""
    total = _exported_tensor(checkpoints[0], name)
    for checkpoint in checkpoints[1:]:
        total = total.float() + _exported_tensor(checkpoint, name).float()
    return total / len(checkpoints) if len(checkpoints) > 1 else total


def _write_json(path: Path, value: dict[str, Any]) -> None:
    DISK.write_file(path, json.dumps(value, indent=2).encode() + b"\n")


# ---- From Hugging Face


def to_checkpoint(source: Checkpoint, folder: Location, dtype: torch.dtype | None = None) -> Location:
    """Write the tensors of a Hugging Face folder as `folder`/step_0."""
    names = dict(source.manifest.tensors)
    tied = HEAD in names and names[HEAD] is names.get(EMBEDDING)
    if tied:
        del names[HEAD]
    config = replace(saved_config(source.facts.config, CONFIGURATION), tie_word_embeddings=tied)
    state = _placeholders(source, names)
    return _write_step_0(folder, source.path, config, state, partial(read_tensor, source), dtype)


def from_pickles(weights: Weights, source: Path, folder: Location, dtype: torch.dtype | None = None) -> Location:
    """Write the tensors of another trainer's folder `source` as `folder`/step_0."""
    state = {name: tensor.description for name, tensor in weights.tensors.items()}
    return _write_step_0(folder, source, weights.config, state, lambda name: weights.tensors[name].read(), dtype)


def _check_model(source: Location, config: TrainConfig, state: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the weights that `state` describes are those of the model of `config`, as train does."""
    expected = {name: tuple(weight.shape) for name, weight in on_meta(config).named_parameters()}
    entries = {name: Entry("F32", tuple(tensor.shape), ()) for name, tensor in state.items() if is_weight(name)}
    if unknown := sorted(entries.keys() - expected.keys()):
        raise UserError(f"{source}: {', '.join(unknown[:5])}: this model has no such tensor (of {len(unknown)})")
    facts = Facts(step=0, tokens_seen=0, data=None, config={}, engine="", mesh={})
    check_fit(Checkpoint(source, facts, Manifest(entries, {})), expected)


def _write_step_0(
    folder: Location,
    source: Location,
    config: TrainConfig,
    state: dict[str, Tensor],
    read: Callable[[str], Tensor],
    dtype: torch.dtype | None,
) -> Location:
    """Write the tensors that `state` describes, with the tokenizer next to the source."""
    _check_model(source, config, state)
    _refuse_used(folder)
    tokenizers = [path for name in ("tokenizer.model", "tokenizer.json") if (path := source / name).is_file()]
    config = replace(config, tokenizer_path=str(tokenizers[0]) if tokenizers else "")
    facts = Facts(step=0, tokens_seen=0, data=None, config=asdict(config), engine="none", mesh={})
    pending = PendingSave(folder, state, facts, ALONE, dtype=dtype)
    pending.fetch = lambda item: read(item.index.fqn)
    return pending.write()
