"""From the configuration to the datasets of one split: folders found, shards indexed, special tokens settled.

What can be known before training is checked here: a missing folder, a dataset without tokens, a vocabulary that does
not fit, weights that do not match.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import parse_split, parse_steps, parse_weights
from pretraining.config.variants import CUSTOM, VARIANTS
from pretraining.data.checksums import verify
from pretraining.data.hashing import short_hash
from pretraining.data.index import ShardIndex, Source, index_folder, open_indexes
from pretraining.data.stores.find import KINDS, datasets_in, find_shards

SPLITS = ("train", "valid", "test")
DESCRIPTION = "meta.json"  # what prepare.py writes beside the shards
DEFAULT_SEPARATOR = 1  # fms-fsdp's sep_token


@dataclass(frozen=True)
class Dataset:
    """One dataset of a split."""

    name: str
    folder: Path
    indexes: list[ShardIndex]
    span: tuple[int, int]  # documents [first, last) that belong to the split
    fingerprint: str  # of the shards' content and names, whatever their folder

    @property
    def documents(self) -> int:
        """Documents of all shards, empty ones included."""
        return sum(index.documents for index in self.indexes)


class SpecialTokens(NamedTuple):
    """Ids put around documents and sequences; None: none."""

    eos: int
    bos: int | None
    bol: int | None
    eol: int | None


def vocabulary(config: TrainConfig) -> int | None:
    """Rows of the model's embedding; None for custom dimensions without one (validation refuses those)."""
    if config.vocab_size is not None:
        return config.vocab_size
    return None if config.model_variant == CUSTOM else VARIANTS[config.model_variant].vocab_size


def open_datasets(config: TrainConfig, split: str) -> list[Dataset]:
    """The datasets of a split, in the order of the mixture. UserError names the folder or shard that is wrong."""
    root, wanted = _where(config, split)
    names = datasets_in(root, wanted)
    strip = tuple(parse_steps(config.strip_tokens))
    found = [_open(config, root / name if name else root, name or root.name, strip) for name in names]
    elsewhere = {"train": "", "valid": config.valid_data_path, "test": config.test_data_path}[split]
    shared = bool(config.split) and not elsewhere
    limited = [_limit(dataset, config, split, shared) for dataset in found]
    for dataset in limited:
        _check_description(dataset, config)
        if config.verify_data:
            described = read_description(dataset.folder).get("shards", {})
            verify(dataset.indexes, described, index_folder(config.index_dir))
    return limited


def _where(config: TrainConfig, split: str) -> tuple[Path, str]:
    """(folder, names of datasets) of a split."""
    if split not in SPLITS:
        raise UserError(f"split={split!r}: want one of {', '.join(SPLITS)}")
    if not config.data_path:
        raise UserError("--data_path is empty: name a folder of token shards, or give --use_dummy_dataset=True")
    if split == "valid" and config.valid_data_path:
        return Path(config.valid_data_path), config.valid_datasets
    if split == "test" and config.test_data_path:
        return Path(config.test_data_path), ""
    if split != "train" and not config.split:
        raise UserError(f"no {split} data: give --{split}_data_path=FOLDER or --split=949,50,1 (train, valid, test)")
    return Path(config.data_path), config.datasets


def _open(config: TrainConfig, folder: Path, name: str, strip: tuple[int, ...]) -> Dataset:
    shards = find_shards(folder, config.file_type)
    if not shards:
        kind = "" if config.file_type == "auto" else f" of --file_type={config.file_type}"
        raise UserError(f"{folder}: no shards{kind}; want {', '.join(KINDS)} files with tokens")
    sources = [Source(path, kind, config.col_name, strip) for path, kind in shards]
    indexes = open_indexes(sources, index_folder(config.index_dir))
    parts = [f"{Path(index.path).relative_to(folder) if folder.is_dir() else ''}" for index in indexes]
    parts += [f"{index.fingerprint} {index.documents} {index.token_count}" for index in indexes]
    return Dataset(name, folder, indexes, (0, sum(index.documents for index in indexes)), short_hash(*parts))


def _limit(dataset: Dataset, config: TrainConfig, split: str, shared: bool) -> Dataset:
    """The documents that `split` and `max_samples` leave of a dataset."""
    first, last = 0, dataset.documents
    if shared:
        edges = split_edges(config.split, dataset.documents)
        first, last = edges[SPLITS.index(split)], edges[SPLITS.index(split) + 1]
    if split == "train" and config.max_samples is not None:
        last = min(last, first + config.max_samples)
    return Dataset(dataset.name, dataset.folder, dataset.indexes, (first, last), dataset.fingerprint)


def split_edges(text: str, documents: int) -> list[int]:
    """Borders of train, valid and test among `documents`: "949,50,1" of 1000 is [0, 949, 999, 1000].

    Megatron's rule (`get_train_valid_test_split_`): any scale, "," or "/", missing parts are 0; each part is rounded,
    and the excess of the last border over `documents` is taken from every border but the first.
    """
    try:
        shares = parse_split(text)
    except ValueError as error:
        raise UserError(f"--split={text}: want numbers for train, valid and test, such as 949,50,1") from error
    edges = [0]
    for share in shares:
        edges.append(edges[-1] + round(share / sum(shares) * documents))
    excess = edges[-1] - documents
    return [0, *(edge - excess for edge in edges[1:])]


# ---- What prepare.py wrote beside the shards


def read_description(folder: Path) -> dict[str, Any]:
    """The contents of meta.json; empty if there is none. UserError if it is damaged."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); prepare the dataset again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: want a JSON object; prepare the dataset again")
    return found


def _check_description(dataset: Dataset, config: TrainConfig) -> None:
    """What the tokenizer says of the data agrees with the model and the flags."""
    description = read_description(dataset.folder)
    size, rows = description.get("vocab_size"), vocabulary(config)
    if size is not None and rows is not None and size > rows:
        raise UserError(
            f"{dataset.folder}: its tokenizer has {size:,} ids, but the model's vocabulary is {rows:,}: "
            f"--vocab_size={size} or more"
        )
    there = {Path(index.path).name for index in dataset.indexes}
    missing = sorted(set(description.get("shards", {})) - there)
    if missing:
        raise UserError(
            f"{dataset.folder / missing[0]}: missing, but {DESCRIPTION} lists it; prepare the dataset again"
        )
    counted = description.get("documents")
    if counted is not None and counted != dataset.documents:
        raise UserError(
            f"{dataset.folder}: {dataset.documents:,} documents, but {DESCRIPTION} says {counted:,}: a "
            "shard is missing or came from elsewhere; prepare the dataset again"
        )


def special_tokens(config: TrainConfig, datasets: list[Dataset]) -> SpecialTokens:
    """The ids in use: the flags', and for the separator what the data was prepared with.

    UserError if two datasets, or a flag and a dataset, disagree on the separator.
    """
    said: dict[str, int] = {}
    for dataset in datasets:
        separator = read_description(dataset.folder).get("separator")
        if separator is not None:
            said[str(dataset.folder)] = int(separator)
    given = config.sep_token if config.sep_token is not None else config.eos_token
    known = {*said.values(), *([] if given is None else [given])}
    if len(known) > 1:
        listing = ", ".join(f"{folder} was prepared for {token}" for folder, token in said.items())
        flag = "" if given is None else f"--sep_token={given}, but "
        raise UserError(f"{flag}{listing}: leave the flag out, or prepare the data again with one separator")
    separator = known.pop() if known else DEFAULT_SEPARATOR
    return SpecialTokens(separator, config.bos_token, config.bol_token, config.eol_token)


def dataset_weights(config: TrainConfig, split: str, datasets: list[Dataset], tokens: list[int]) -> list[float]:
    """Share of each dataset in the mixture: as given, or in proportion to its tokens. Above 0."""
    if split == "test" and config.test_data_path:
        return [float(count) for count in tokens]
    own = split == "valid" and config.valid_data_path
    flag, text = ("valid_weights", config.valid_weights) if own else ("weights", config.weights)
    if not text.strip():
        return [float(count) for count in tokens]
    try:
        weights = parse_weights(text)
    except ValueError as error:
        raise UserError(f"--{flag}={text}: want a number above 0 for each dataset, comma-separated") from error
    if len(weights) != len(datasets):
        names = ", ".join(dataset.name for dataset in datasets)
        raise UserError(f"--{flag}={text}: {len(weights)} numbers for {len(datasets)} datasets ({names})")
    return weights
