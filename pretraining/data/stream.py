"""The global batch of step k, as a pure function of the data and the configuration.

Sequence g of the run -> dataset and its m-th sequence (the mixture's table) -> position in that dataset's endless
shuffled stream (dealing.py) -> tokens (corpus.py). Ranks, steps and reader threads only choose which g are asked for;
the state is the number of sequences consumed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data import datasets as room
from pretraining.data import state as states
from pretraining.data.corpus import Corpus, Order, Views
from pretraining.data.dealing import PERIOD, Dealer, Table, mixture_table
from pretraining.data.dummy import counter
from pretraining.data.files import OpenFile, OpenFiles
from pretraining.data.hashing import short_hash

IGNORED = -100  # label of a position that is not trained: torch's and Hugging Face's default ignore_index

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """Where a stream's sequences come from."""

    def row(self, sequence: int, out: np.ndarray, seen: set[OpenFile]) -> list[int]:
        """Fill `out` (int32 [seq_length + 1]) with sequence `sequence`; where documents begin in it."""
        ...

    def check(self, sequence: int, lines: np.ndarray) -> None:
        """UserError if `lines`, sequences from `sequence` on, hold an id that the model has no row for."""
        ...

    def close(self) -> None:
        """Let go of open files."""
        ...


class Cut(NamedTuple):
    """How a rank takes its part of a step."""

    rows: int  # sequences of this rank in a step
    first: int  # its first row in the global batch
    step: int  # sequences of the global batch
    length: int  # tokens of a sequence


class Wants(NamedTuple):
    """What a batch carries besides tokens."""

    segments: bool
    positions: bool
    mask_separators: bool


class Stream:
    """Batches by step. Safe to share between threads."""

    def __init__(
        self,
        source: Source,
        cut: Cut,
        wants: Wants,
        *,
        state: dict[str, Any],
        facts: dict[str, Any],
        total: int | None = None,
        counted: int | None = None,
    ) -> None:
        """state: of step 0. total: sequences that exist, counted from the beginning of the run; None: endless.
        counted: those of them whose labels count, None: all; the others fill up the last batch.
        """
        self._source, self._cut, self._wants = source, cut, wants
        self._state, self._facts, self._total, self._counted = state, facts, total, counted

    @property
    def batch_bytes(self) -> int:
        """Memory that one batch keeps, about."""
        return self._cut.rows * (self._cut.length + 1) * 4 * (1 + sum(self._wants))

    @property
    def steps(self) -> int | None:
        """Whole batches from step 0 on; None: as many as asked for."""
        if self._total is None:
            return None
        return max(0, self._total - int(self._state["sequences"])) // self._cut.step

    def batch(self, step: int) -> Batch:
        """This rank's rows of global batch `step`, counted from 0 at the state the stream was opened with.

        "tokens" and "labels", int32 [rows, seq_length], and when asked for "segments" and "positions" of that shape.
        UserError names the shard if it changed, vanished or holds what the model has no row for; IndexError after
        the last batch of num_epochs, or of the one pass over validation and test data.
        """
        if step < 0 or (self._total is not None and step >= (self.steps or 0)):
            raise IndexError(f"step {step} of a stream with {self.steps} steps")
        cut = self._cut
        first = self._state["sequences"] + step * cut.step + cut.first
        lines = np.empty((cut.rows, cut.length + 1), np.int32)
        seen: set[OpenFile] = set()
        beginnings = [self._source.row(first + row, line, seen) for row, line in enumerate(lines)]
        self._source.check(first, lines)
        batch = assemble(lines, beginnings, self._wants)
        if self._counted is not None and first + cut.rows > self._counted:
            batch["labels"] = batch["labels"].copy()
            batch["labels"][max(0, self._counted - first) :] = IGNORED
        return batch

    def state(self, step: int) -> dict[str, Any]:
        """The state after `step` steps: what `open_stream` continues from. JSON, the same on every rank."""
        return {**self._state, "sequences": int(self._state["sequences"]) + step * self._cut.step}

    def consumed(self, step: int) -> dict[str, int]:
        """Sequences of each dataset that the run has taken before step `step`; empty for the dummy dataset."""
        return states.consumed_at(self._state, int(self.state(step)["sequences"]))

    def facts(self) -> dict[str, Any]:
        """What is worth printing before training: the datasets with their tokens, shares and epochs."""
        return self._facts

    def close(self) -> None:
        """Let go of the open files. The stream can still be read: they are opened again."""
        self._source.close()


def assemble(lines: np.ndarray, beginnings: list[list[int]], wants: Wants) -> Batch:
    """A batch from lines of seq_length + 1 tokens, int32 [rows, seq_length + 1].

    beginnings: per row, where documents begin in its line. Tokens and labels share the lines' memory.
    """
    tokens, labels = lines[:, :-1], lines[:, 1:]
    if wants.mask_separators:
        labels = labels.copy()
        for row, places in enumerate(beginnings):
            labels[row, [place - 1 for place in places if place > 0]] = IGNORED
    batch = {"tokens": tokens, "labels": labels}
    if wants.segments or wants.positions:
        starts = np.zeros(tokens.shape, bool)
        for row, places in enumerate(beginnings):
            starts[row, [place for place in places if 0 < place < tokens.shape[1]]] = True
        if wants.segments:
            batch["segments"] = np.cumsum(starts, axis=1, dtype=np.int32) + np.int32(1)
        if wants.positions:
            here = np.arange(tokens.shape[1], dtype=np.int32)
            batch["positions"] = here - np.maximum.accumulate(np.where(starts, here, 0), axis=1).astype(np.int32)
    return batch


class Counters:
    """The dummy dataset."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._seed, self._vocabulary = seed, vocabulary

    def row(self, sequence: int, out: np.ndarray, seen: set[OpenFile]) -> list[int]:
        """Sequence `sequence` of the counters; one document."""
        counter(self._seed, sequence, self._vocabulary, out)
        return []

    def check(self, sequence: int, lines: np.ndarray) -> None:
        """Counters stay below the vocabulary."""

    def close(self) -> None:
        """Nothing is open."""


class Mixture:
    """Several datasets in fixed proportions."""

    def __init__(
        self,
        corpora: list[Corpus],
        table: Table,
        phase: states.Phase,
        special: room.SpecialTokens,
        *,
        config: TrainConfig,
        files: OpenFiles,
    ) -> None:
        self._files = files
        self._corpora, self._table, self._phase, self._special = corpora, table, phase, special
        slots = config.logical_shards if config.shuffle == "shards" else 1
        self._dealers = [Dealer(corpus.tokens, payload(config, special), slots) for corpus in corpora]
        self._dataset, self._earlier = table.dataset.data, table.earlier.data
        self._vocabulary = room.vocabulary(config)

    def row(self, sequence: int, out: np.ndarray, seen: set[OpenFile]) -> list[int]:
        """Sequence `sequence` of the run: [bol,] tokens of one dataset, and one more as the last label."""
        number, ordinal = self.locate(sequence)
        corpus = self._corpora[number]
        start = self._dealers[number].position(ordinal)
        lead = 0 if self._special.bol is None else 1
        beginnings = corpus.fill(start, out[lead:] if lead else out, seen)
        if lead:
            out[0] = self._special.bol
            beginnings = [place + 1 for place in beginnings if place > 0]
        if self._special.eol is not None:
            out[-1] = self._special.eol
        return beginnings

    def check(self, sequence: int, lines: np.ndarray) -> None:
        """UserError names the shard of an id that the model has no row for."""
        unsigned = lines.view(np.uint32)  # a negative id is a large one
        if self._vocabulary is None or int(unsigned.max()) < self._vocabulary:
            return
        row = int(unsigned.max(axis=1).argmax())
        number, ordinal = self.locate(sequence + row)
        start = self._dealers[number].position(ordinal)
        self._refuse(int(unsigned[row].max()), self._corpora[number].sources(start, lines.shape[1]))

    def close(self) -> None:
        """Let go of open files."""
        self._files.close()

    def locate(self, sequence: int) -> tuple[int, int]:
        """(dataset, which of its sequences) of sequence `sequence` of the run."""
        period, place = divmod(sequence - self._phase.start, PERIOD)
        number = self._dataset[place]
        before = period * self._table.counts[number] + self._earlier[place]
        return number, self._phase.consumed[number] + before

    def _refuse(self, wrong: int, shards: list[str]) -> None:
        where = "a special token" if wrong in self._special else " or ".join(shards)
        raise UserError(
            f"{where}: token id {wrong}, but the model's vocabulary is {self._vocabulary:,}; the data was made with "
            f"another tokenizer, or --vocab_size must be at least {wrong + 1}"
        )


def payload(config: TrainConfig, special: room.SpecialTokens) -> int:
    """Tokens of the data in one sequence: the first place is bol_token's if there is one."""
    return config.seq_length - (special.bol is not None)


def open_stream(
    config: TrainConfig, rank: int = 0, world_size: int = 1, split: str = "train", state: dict[str, Any] | None = None
) -> Stream:
    """The stream of one rank. split: "train", "valid" or "test". state: of an earlier stream, to continue it.

    global_batch_size None counts one device per rank: batch_size x world_size x gradient_accumulation_steps.
    UserError (a ValueError) names the flag or path that is wrong, or what changed since `state`.
    """
    cut = _cut(config, rank, world_size)
    wants = Wants(config.reset_attention_mask, config.reset_position_ids, config.eod_mask_loss)
    if config.use_dummy_dataset:
        return _open_dummy(config, split, cut, wants, state)
    found = room.open_datasets(config, split)
    special = room.special_tokens(config, found)
    files, views = OpenFiles(), Views()
    corpora = [
        Corpus(
            dataset.indexes,
            dataset.span,
            _order(config, special, dataset.name, any(wants)),
            number=number,
            files=files,
            views=views,
        )
        for number, dataset in enumerate(found)
    ]
    _check_sizes(config, found, corpora, split)
    weights = room.dataset_weights(config, split, found, [corpus.tokens for corpus in corpora])
    table = mixture_table(weights)
    if split == "train":
        _check_batch(config, found, corpora, table, cut.step * payload(config, special))
    begun, phase = states.begin(config, found, special, table.counts, split=split, state=state)
    source = Mixture(corpora, table, phase, special, config=config, files=files)
    total, counted = _extent(config, corpora, payload(config, special), cut, split)
    facts = _facts(config, found, corpora, table, payload(config, special) if split == "train" else 0)
    return Stream(source, cut, wants, state=begun, facts=facts, total=total, counted=counted)


def parts_of(config: TrainConfig) -> list[str]:
    """The splits that a run reads, "train" first."""
    return ["train", *(["valid"] if config.val_interval else []), *(["test"] if config.test_steps else [])]


def check_data(config: TrainConfig) -> None:
    """UserError for everything about the run's data that can be known without the number of devices."""
    for part in parts_of(config):
        open_stream(config, split=part).close()


def _cut(config: TrainConfig, rank: int, world_size: int) -> Cut:
    accumulation = config.gradient_accumulation_steps or 1
    step = config.global_batch_size or config.batch_size * world_size * accumulation
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} of a world of {world_size}: want 0 to {world_size - 1}")
    if step % world_size:
        raise UserError(f"--global_batch_size={step} is not a multiple of the {world_size} ranks that read data")
    rows = step // world_size
    return Cut(rows, rank * rows, step, config.seq_length)


def _open_dummy(config: TrainConfig, split: str, cut: Cut, wants: Wants, state: dict[str, Any] | None) -> Stream:
    rows = room.vocabulary(config)
    if rows is None:
        raise UserError("--use_dummy_dataset counts modulo the vocabulary: --model_variant=custom needs --vocab_size")
    begun = states.begin_dummy(config, rows, state)
    facts = {"datasets": [{"name": "dummy", "tokens": None, "share": 1.0, "epochs": None}], "vocabulary": rows}
    seed = config.seed if split == "train" else config.seed + 1 + room.SPLITS.index(split)
    return Stream(Counters(seed, rows), cut, wants, state=begun, facts=facts)


def _order(config: TrainConfig, special: room.SpecialTokens, name: str, marked: bool) -> Order:
    """The name is part of the key: a dataset keeps its order whatever else is mixed with it."""
    key = (config.seed, int(short_hash(name), 16))
    return Order(key, config.shuffle != "none", special.eos, special.bos, marked)


def _check_sizes(config: TrainConfig, found: list[room.Dataset], corpora: list[Corpus], split: str) -> None:
    for dataset, corpus in zip(found, corpora, strict=True):
        if not corpus.tokens:
            part = f" in its {split} part (--split={config.split})" if config.split else ""
            raise UserError(f"{dataset.folder}: no tokens{part}; take it out of --datasets or fill it")


def _check_batch(
    config: TrainConfig, found: list[room.Dataset], corpora: list[Corpus], table: Table, tokens: int
) -> None:
    """tokens: of one global batch. A dataset must not repeat itself inside a batch."""
    for dataset, corpus, count in zip(found, corpora, table.counts, strict=True):
        share = count / PERIOD * tokens
        if corpus.tokens < int(share):
            raise UserError(
                f"{dataset.folder}: {corpus.tokens:,} tokens, too small for one batch, which takes {int(share):,} from "
                "it; lower --global_batch_size, --seq_length or its weight"
            )


def _extent(
    config: TrainConfig, corpora: list[Corpus], length: int, cut: Cut, split: str
) -> tuple[int | None, int | None]:
    """(sequences that can be read, those of them that count); None: endless, all.

    Training has num_epochs passes over all datasets together, validation and test have one.
    """
    exist = sum(corpus.tokens for corpus in corpora)
    if split == "train":
        return (None if config.num_epochs is None else config.num_epochs * exist // length), None
    exist //= length
    if not exist or (config.drop_last_val and exist < cut.step):
        raise UserError(
            f"the {split} data are {exist:,} sequences of {length:,} tokens, but a global batch takes {cut.step:,}; "
            "lower --global_batch_size or --seq_length, or give --drop_last_val=False"
        )
    rest = exist % cut.step
    return (exist - rest if config.drop_last_val else exist + -exist % cut.step), exist


def _facts(
    config: TrainConfig, found: list[room.Dataset], corpora: list[Corpus], table: Table, length: int
) -> dict[str, Any]:
    """length: tokens of a sequence of the training, 0 for another split. epochs: passes over the dataset in num_steps
    steps; None outside of training and while the global batch size is open."""
    planned = config.num_steps * config.global_batch_size * length if config.global_batch_size and length else None
    rows = []
    for dataset, corpus, count in zip(found, corpora, table.counts, strict=True):
        share = count / PERIOD
        rows.append(
            {
                "name": dataset.name,
                "folder": str(dataset.folder),
                "shards": len(dataset.indexes),
                "documents": dataset.span[1] - dataset.span[0],
                "empty_documents": sum(index.documents - index.filled for index in dataset.indexes),
                "tokens": corpus.tokens,
                "share": share,
                "epochs": None if planned is None else share * planned / corpus.tokens,
            }
        )
    return {"datasets": rows}
