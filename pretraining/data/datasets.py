"""From the configuration to the datasets of one split: folders found, shards indexed, special tokens settled.

What can be known before training is checked here: a missing folder, a dataset without tokens, a vocabulary that does
not fit, weights that do not match.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from pretraining.config.errors import UserError
from pretraining.config.grammar import parse_split, parse_steps, parse_weights
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.hashing import short_hash
from pretraining.data.index import ShardIndex, TokenShard, index_folder, last_tokens, open_indexes
from pretraining.data.layouts import DESCRIPTION, read_dataset_json, split_folders
from pretraining.data.origin import check_origin
from pretraining.data.stores.find import find_datasets, find_shards, shard_formats
from pretraining.storage import Location, is_remote, location

SPLITS = ("train", "valid", "test")
TOKENS = "tokens"  # column that prepare.py writes, and default of --col_name
DEFAULT_SEPARATOR = 1  # fms-fsdp's sep_token
NO_SEPARATOR = -1  # value of --sep_token
_SAMPLED_ENDINGS, _FEWEST_ENDINGS = 256, 8  # documents of the first shards; fewer are no evidence
# Of the values that are read in meta.json
_KINDS = {**dict.fromkeys(("vocab_size", "separator", "seq_length", "documents", "tokens"), int), "shards": dict}


class SplitSource(NamedTuple):
    """Where the documents of a split come from."""

    folder: Location
    datasets: str = ""  # sub-folders, comma-separated; empty: all
    weights_flag: str = ""
    weights: str = ""  # one number for each dataset, comma-separated; empty: in proportion to their tokens
    shares: str = ""  # --split if the split takes a share of every dataset's documents; empty: it takes all
    note: str = ""  # where the split was found, if the user did not name its folder


@dataclass(frozen=True)
class Dataset:
    """One dataset of a split."""

    name: str
    folder: Location
    shards: list[ShardIndex]
    documents: range  # those of the split, counted over all shards
    fingerprint: str  # of the shards' content and names, whatever their folder
    description: dict[str, Any]  # contents of meta.json, empty without one

    @property
    def tokenizer(self) -> str:
        """The sha256 of the tokenizer that the data were prepared with; "" if it is not known."""
        return str(self.description.get("tokenizer_sha256") or "")


class SpecialTokens(NamedTuple):
    """Ids put around documents and sequences; None: none."""

    eos: int | None
    bos: int | None
    bol: int | None
    eol: int | None
    origin: str  # what set the separator


def split_source(config: TrainConfig, split: str) -> SplitSource:
    """Return the source of a split. UserError if it has none."""
    if split not in SPLITS:
        raise UserError(f"split={split!r}: choose one of {', '.join(SPLITS)}")
    if not config.data_path:
        raise UserError("--data_path is not set: give a folder of token shards, or --use_dummy_dataset=True")
    if split == "valid" and config.valid_data_path:
        folder = location(config.valid_data_path)
        folder = folder if config.valid_datasets else _of_split(folder, split)
        return SplitSource(folder, config.valid_datasets, "valid_weights", config.valid_weights)
    if split == "test" and config.test_data_path:
        return SplitSource(_of_split(location(config.test_data_path), split))
    root = location(config.data_path)
    layout = None if config.datasets else split_folders(root)
    if layout and not config.split and split in layout.folders:
        weights = config.weights if split == "train" else ""
        return SplitSource(layout.folders[split], "", "weights", weights, note=layout.describe())
    if split != "train" and not config.split:
        raise UserError(f"no {split} data: give --{split}_data_path=FOLDER or --split=949,50,1 (train, valid, test)")
    folder, note = (layout.folders["train"], layout.describe()) if layout else (root, "")
    return SplitSource(folder, config.datasets, "weights", config.weights, config.split, note)


def open_datasets(config: TrainConfig, split: str) -> list[Dataset]:
    """Return the datasets of a split, in the order of the mixture. UserError names the folder or shard at fault."""
    source = split_source(config, split)
    datasets = []
    for name in find_datasets(source.folder, source.datasets):
        folder = _of_split(source.folder / name, "train" if source.shares else split)
        datasets.append(_open(config, source, folder, name, split))
    check_origin(config.tokenizer_path, {str(dataset.folder): dataset.tokenizer for dataset in datasets})
    return datasets


def _of_split(folder: Location, split: str) -> Location:
    """Return the folder of a split if `folder` holds several. UserError if it does not hold this one."""
    if (layout := split_folders(folder)) and split not in layout.folders:
        raise UserError(f"{folder}: {layout.kind} without a {split} split: give the folder of one, {folder}/...")
    return layout.folders[split] if layout else folder


def _open(config: TrainConfig, source: SplitSource, folder: Location, name: str, split: str) -> Dataset:
    if not (files := find_shards(folder, config.file_type)):
        kinds = config.file_type if config.file_type in shard_formats() else ", ".join(shard_formats())
        rest = "; if it is no dataset of yours, move it elsewhere" if name and not source.datasets else ""
        raise UserError(f"{folder}: no shards of --file_type={config.file_type}: give a folder of {kinds} files{rest}")
    strip = tuple(parse_steps(config.strip_tokens))
    sources = [TokenShard(path, format, config.col_name, strip) for path, format in files]
    shards = open_indexes(sources, index_folder(config.index_dir))
    has_folder = folder.is_dir()
    parts = [str(PurePath(shard.path).relative_to(str(folder))) if has_folder else "" for shard in shards]
    parts += [f"{shard.fingerprint} {shard.documents} {shard.token_count}" for shard in shards]
    total = sum(shard.documents for shard in shards)
    description = read_dataset_json(folder / DESCRIPTION) if (folder / DESCRIPTION).is_file() else {}
    if strip or config.col_name != TOKENS:  # other documents than those that prepare.py counted
        description = {name: value for name, value in description.items() if name not in ("tokens", "blocks")}
    _check_description(folder, description, shards, model_shape(config).vocab_size)
    _check_labels(config, folder, description, shards)
    first, last = split_edges(source.shares, total)[SPLITS.index(split) :][:2] if source.shares else (0, total)
    if split == "train" and config.max_samples is not None:
        last = min(last, first + config.max_samples)
    return Dataset(name or source.folder.name, folder, shards, range(first, last), short_hash(*parts), description)


def split_edges(text: str, documents: int) -> list[int]:
    """Return the borders of train, valid and test among `documents`: "949,50,1" of 1000 is [0, 949, 999, 1000].

    Megatron's rule (`get_train_valid_test_split_`): any scale, "," or "/", missing parts are 0; each part is rounded,
    and the excess of the last border over `documents` is taken from every border but the first.
    """
    shares = parse_split(text)
    edges = [0]
    for share in shares:
        edges.append(edges[-1] + round(share / sum(shares) * documents))
    excess = edges[-1] - documents
    return [0, *(edge - excess for edge in edges[1:])]


# ---- What prepare.py wrote next to the shards


def _check_description(folder: Location, description: dict[str, Any], shards: list[ShardIndex], rows: int) -> None:
    """Raise UserError if shards are missing, or the tokenizer has more ids than the embedding has rows.

    Another program's file of this name may have other values under the names that are read.
    """
    if wrong := [name for name, kind in _KINDS.items() if not isinstance(description.get(name), kind | None)]:
        remedy = "not what prepare writes: prepare the dataset again, or remove the file if it is another program's"
        raise UserError(f"{folder / DESCRIPTION}: {wrong[0]} is {description[wrong[0]]!r}, {remedy}")
    size = description.get("vocab_size")
    if size is not None and size > rows:
        reason = f"its tokenizer has {size:,} ids, but the model's vocabulary is {rows:,}"
        raise UserError(f"{folder}: {reason}: give --vocab_size={size} or more")
    if missing := sorted(set(description.get("shards") or {}) - {location(shard.path).name for shard in shards}):
        raise UserError(f"{folder / missing[0]}: missing, but {DESCRIPTION} lists it: prepare the dataset again")
    counts = {"documents": sum(each.documents for each in shards), "tokens": sum(each.token_count for each in shards)}
    for name, count in counts.items():
        if (expected := description.get(name)) not in (None, count):
            reason = "a shard is missing, damaged or belongs to another dataset; prepare the dataset again"
            raise UserError(f"{folder}: {count:,} {name}, but {DESCRIPTION} lists {expected:,}: {reason}")


def _check_labels(config: TrainConfig, folder: Location, description: dict[str, Any], shards: list[ShardIndex]) -> None:
    """Raise UserError if only some shards have labels, or rows of whole examples would be cut or filled."""
    unlabelled = [shard.path for shard in shards if shard.documents and shard.trained is None]
    if unlabelled and any(shard.trained is not None for shard in shards):
        raise UserError(f"{unlabelled[0]}: no column of labels, but other shards of {folder} have one: separate them")
    length = description.get("seq_length")
    if length not in (None, config.seq_length):
        reason = f"rows of {length} tokens, not seq_length={config.seq_length}"
        raise UserError(f"{folder}: {reason}: give --seq_length={length}")
    added = [name for name in ("bos_token", "bol_token", "eol_token", "strip_tokens")
             if getattr(config, name) not in (None, "")]  # fmt: skip
    if length and added:
        raise UserError(f"{folder}: rows of whole examples have no place for --{added[0]}: remove it")


def special_tokens(config: TrainConfig, datasets: list[Dataset]) -> SpecialTokens:
    """Return the ids in use: the flags', and for the separator the one that the data was prepared with.

    UserError if two datasets, or a flag and a dataset, disagree on the separator, if the documents end with it already,
    or if nothing sets it and they end with another id.
    """
    prepared = {
        str(dataset.folder): int(dataset.description["separator"])
        for dataset in datasets
        if dataset.description.get("separator") is not None
    }
    flag, name = (config.eos_token, "--eos_token") if config.sep_token is None else (config.sep_token, "--sep_token")
    separators = {*prepared.values(), *([] if flag is None else [flag])}
    if len(separators) > 1:
        listing = ", ".join(f"{folder} was prepared with separator {token}" for folder, token in prepared.items())
        given = "" if flag is None else f"{name}={flag}, but "
        remedy = f"give {name}=None, or " if given and len({*prepared.values()}) == 1 else ""  # a file may have set it
        raise UserError(f"{given}{listing}: {remedy}prepare the data again with one separator")
    separator = separators.pop() if separators else DEFAULT_SEPARATOR
    for dataset in datasets:
        is_known = flag is not None and is_remote(dataset.folder)  # whose documents are not read twice for a check
        if str(dataset.folder) not in prepared and not is_known:
            _check_endings(dataset, separator, flag is not None, bool(prepared))
    origin = DESCRIPTION if prepared else "the default, --sep_token sets another"
    eos = None if separator == NO_SEPARATOR else separator
    return SpecialTokens(eos, config.bos_token, config.bol_token, config.eol_token, origin if flag is None else name)


def _check_endings(dataset: Dataset, separator: int, is_set: bool, is_prepared: bool) -> None:
    """Raise UserError if nearly all documents end with the same id, and it is the separator, or should be.

    is_set: whether a flag chose the separator. is_prepared: whether meta.json of another dataset has it.
    """
    shards = [shard for shard in dataset.shards if shard.nonempty][:_FEWEST_ENDINGS]
    endings = np.array([token for shard in shards for token in last_tokens(shard, _SAMPLED_ENDINGS // len(shards))])
    tokens, counts = np.unique(endings, return_counts=True)
    if len(endings) < _FEWEST_ENDINGS or counts.max() < 0.9 * len(endings):
        return
    token = int(tokens[counts.argmax()])
    subject = f"{dataset.folder}: {counts.max()} of {len(endings)} documents end with id {token}"
    if token == separator:
        raise UserError(f"{subject}, the separator, which would be there twice: give --strip_tokens={token}")
    if not is_set:
        remedy = f"--strip_tokens={token} if {token} separates documents"
        if not is_prepared:
            remedy = f"--sep_token={token} {remedy}, --sep_token={NO_SEPARATOR} for rows that are packed already"
        raise UserError(f"{subject}, but the separator would be {separator}: give {remedy}, or --sep_token={separator}")


def dataset_weights(source: SplitSource, datasets: list[Dataset], tokens: list[int]) -> list[float]:
    """Return the share of each dataset in the mixture, above 0: as set, or its number of tokens."""
    if not source.weights.strip():
        return [float(count) for count in tokens]
    weights = parse_weights(source.weights)
    if len(weights) != len(datasets):
        names, flag = ", ".join(dataset.name for dataset in datasets), f"--{source.weights_flag}={source.weights}"
        raise UserError(f"{flag}: {len(weights)} numbers for {len(datasets)} datasets ({names})")
    return weights
