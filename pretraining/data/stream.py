"""The global batch of every step, and this process's rows of it.

A batch is a function of the data, the settings of its order and the step alone: not of the number of processes,
threads or interruptions. Knows no torch device.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.arrow import SUFFIX
from pretraining.data.corpus import Corpus
from pretraining.data.order import Dealer, Mixture, hash_key

Tokens = npt.NDArray[np.int32]
Batch = dict[str, Tokens]
META = "meta.json"  # what preparation writes beside the shards
FMS_SEPARATOR = 1  # fms-fsdp's sep_token, where neither the flag nor the corpus says


class Source(Protocol):
    """Rows of the global order of sequences."""

    def row(self, sequence: int, out: Tokens) -> None:
        """Fill `out` [length + 1] with the tokens of this sequence and the one after them."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the order depends on; a resumed run must have the same."""
        ...

    def describe(self) -> list[str]:
        """Lines for a reader."""
        ...

    def close(self) -> None: ...


class Stream:
    """See the module. Step 0 is the first after `state`."""

    def __init__(self, source: Source, config: TrainConfig, rank: int, world_size: int, consumed: int) -> None:
        assert config.global_batch_size
        if config.global_batch_size % world_size:
            raise ValueError(f"world size {world_size} does not divide global_batch_size={config.global_batch_size}")
        self._source, self._rank = source, rank
        self._vocabulary = model_shape(config).vocab_size
        self.length, self.global_rows = config.seq_length, config.global_batch_size
        self.rows = self.global_rows // world_size
        self.consumed = consumed

    def batch(self, step: int) -> Batch:
        """This process's rows: `tokens` and `labels`, int32 [rows, seq_length]."""
        first = self.consumed + step * self.global_rows + self._rank * self.rows
        tokens = np.empty((self.rows, self.length + 1), np.int32)
        for row in range(self.rows):
            self._source.row(first + row, tokens[row])
        highest, lowest = int(tokens.max()), int(tokens.min())
        if highest >= self._vocabulary or lowest < 0:
            wrong = highest if highest >= self._vocabulary else lowest
            raise UserError(
                f"the data holds token id {wrong}, but --vocab_size={self._vocabulary}; give the tokenizer's "
                "vocabulary, or data that was made with this one"
            )
        return {"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}

    def state(self, steps: int) -> dict[str, Any]:
        """Where the data stands after `steps` steps of this stream."""
        return {"sequences": self.consumed + steps * self.global_rows, "identity": self._source.identity()}

    def describe(self) -> list[str]:
        return self._source.describe()

    def close(self) -> None:
        self._source.close()


class DummySource:
    """Counters: each row starts at a hash of (seed, sequence) and counts up modulo the vocabulary."""

    def __init__(self, config: TrainConfig, split: str) -> None:
        self._seed, self._vocabulary = config.seed, model_shape(config).vocab_size
        self._split = int(split != "train")

    def row(self, sequence: int, out: Tokens) -> None:
        start = int(hash_key(self._seed, self._split, sequence)) % self._vocabulary
        out[:] = (start + np.arange(len(out))) % self._vocabulary

    def identity(self) -> dict[str, Any]:
        return {"dummy": self._vocabulary, "seed": self._seed}

    def describe(self) -> list[str]:
        return ["a deterministic stream of counters (use_dummy_dataset)"]

    def close(self) -> None: ...


class ShardSource:
    """Datasets of shards, mixed by weight."""

    def __init__(self, config: TrainConfig, root: Path, names: str, weights: str) -> None:
        folders = dataset_folders(root, names)
        self._settings = {"seed": config.seed, "seq_length": config.seq_length, "logical_shards": config.logical_shards}
        cache = config.run_folder / "index"
        self.corpora = [self._open(config, folder, number, cache) for number, folder in enumerate(folders)]
        given = [float(text) for text in weights.split(",") if text.strip()]
        self.weights = given or [float(corpus.tokens) for corpus in self.corpora]
        self._mixture = Mixture(self.weights)
        slots = config.logical_shards
        self._dealers = [Dealer(corpus.tokens, config.seq_length, slots) for corpus in self.corpora]

    @staticmethod
    def _open(config: TrainConfig, folder: Path, number: int, cache: Path) -> Corpus:
        meta = read_meta(folder)
        vocabulary = model_shape(config).vocab_size
        if meta.get("vocab_size", 0) > vocabulary:
            remedy = f"give --vocab_size={meta['vocab_size']}"
            raise UserError(f"{folder}: its tokenizer has {meta['vocab_size']} ids, the model {vocabulary}; {remedy}")
        separator = config.sep_token if config.sep_token is not None else meta.get("separator", FMS_SEPARATOR)
        seed = int(hash_key(config.seed, number))
        return Corpus(folder, config.col_name, cache, seed, separator, config.logical_shards)

    def row(self, sequence: int, out: Tokens) -> None:
        dataset, turn = self._mixture.locate(sequence)
        self.corpora[dataset].read(self._dealers[dataset].position(turn), out)

    def identity(self) -> dict[str, Any]:
        data = [corpus.identity() for corpus in self.corpora]
        digest = hashlib.blake2b(json.dumps(data).encode(), digest_size=16).hexdigest()
        separators = [corpus.separator for corpus in self.corpora]
        names = [corpus.name for corpus in self.corpora]
        return {"data": digest, "datasets": names, "weights": self.weights, "sep_token": separators, **self._settings}

    def describe(self) -> list[str]:
        shares = np.array(self.weights) / sum(self.weights)
        return [
            f"{corpus.name}: {corpus.tokens:,} tokens, {corpus.documents:,} documents, {len(corpus.shards)} shards, "
            f"{share:.1%} of the mixture"
            for corpus, share in zip(self.corpora, shares, strict=True)
        ]

    def close(self) -> None:
        for corpus in self.corpora:
            corpus.close()


def open_stream(
    config: TrainConfig,
    rank: int = 0,
    world_size: int = 1,
    split: str = "train",
    state: dict[str, Any] | None = None,
) -> Stream:
    """The stream of a split ("train" or "valid") for process `rank` of `world_size`, going on after `state`.

    Needs global_batch_size. Raises UserError where the data is missing or damaged, or is not what `state` came from;
    ValueError where the world size does not divide the global batch.
    """
    if config.global_batch_size is None:
        raise ValueError("open_stream needs global_batch_size; on its own it knows no device count to derive it from")
    source: Source
    if config.use_dummy_dataset:
        source = DummySource(config, split)
    elif split == "train":
        source = ShardSource(config, Path(config.data_path), config.datasets, config.weights)
    else:
        source = ShardSource(config, Path(config.valid_data_path), config.valid_datasets, "")
    if state:
        _same_data(state["identity"], source.identity())
    return Stream(source, config, rank, world_size, state["sequences"] if state else 0)


def _same_data(saved: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    changed = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    if not changed:
        return
    told = "; ".join(f"{key} was {saved.get(key)}, is {now.get(key)}" for key in changed)
    raise UserError(f"the data is not what the checkpoint was trained on: {told}; restore it, or start a new run")


def dataset_folders(root: Path, names: str) -> list[Path]:
    """The folders of the datasets that `names` lists under `root`; all of them, or root itself, where it lists none."""
    if not root.is_dir():
        raise UserError(f"--data_path={root}: no such folder{_nearest(root.name, root.parent)}")
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if listed:
        for name in listed:
            if not (root / name).is_dir():
                raise UserError(f"--datasets: {root / name} is no folder{_nearest(name, root)}")
        return [root / name for name in listed]
    if any(path.suffix == SUFFIX for path in root.iterdir()):
        return [root]
    folders = sorted(path for path in root.iterdir() if path.is_dir() and any(path.rglob(f"*{SUFFIX}")))
    if not folders:
        raise UserError(f"{root}: holds no {SUFFIX} shard; python -m pretraining.data.prepare makes some from text")
    return folders


def _nearest(name: str, parent: Path) -> str:
    there = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(name, there, n=1)
    return f"; did you mean {parent / near[0]}?" if near else ""


def read_meta(folder: Path) -> dict[str, Any]:
    """What preparation wrote beside the shards of `folder` (or of the folder above); empty where it wrote nothing."""
    for place in (folder, folder.parent):
        if (place / META).is_file():
            return json.loads((place / META).read_text())
    return {}
