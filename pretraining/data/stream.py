"""The global batch of step k, as a pure function of the data and the configuration.

Sequence g of the run -> dataset and its m-th sequence (mixture schedule) -> position in that dataset's endless
shuffled stream (lanes.py) -> tokens (corpus.py). Ranks, steps and reader threads only choose which sequences are
asked for; the state is the number of sequences consumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from pretraining.config.batches import GlobalBatches
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.corpus import BlockCache, Corpus, DocumentOrder
from pretraining.data.datasets import (
    SPLITS,
    Dataset,
    SpecialTokens,
    SplitSource,
    data_notes,
    dataset_weights,
    open_datasets,
    special_tokens,
    split_source,
)
from pretraining.data.files import OpenFiles
from pretraining.data.hashing import key_of, short_hash
from pretraining.data.lanes import PERIOD, LaneOrder, MixtureSchedule, mixture_schedule
from pretraining.data.origin import check_tokenizer
from pretraining.data.state import TOKENIZER, consumed_at, open_state
from pretraining.data.stores.labels import IGNORED, unmark
from pretraining.storage import OpenFile, ReadAhead, store_of

Batch = dict[str, np.ndarray]
NO_ROWS: Mapping[str, Rows] = MappingProxyType({})  # split -> data of one's own


class RankSlice(NamedTuple):
    """The rows of every global batch that one rank reads."""

    rank: int
    world_size: int
    global_rows: int  # sequences of a global batch, of the largest where they grow
    length: int  # tokens of a sequence

    def of(self, sequences: range) -> range:
        """Return this rank's sequences of a global batch."""
        rows = len(sequences) // self.world_size
        first = sequences.start + self.rank * rows
        return range(first, first + rows)


class BatchFields(NamedTuple):
    """What a batch holds besides tokens and labels."""

    segments: bool
    positions: bool
    mask_separators: bool


class RowMarks(NamedTuple):
    """Places in a row of one token more than a sequence."""

    beginnings: list[int]  # where documents and examples begin
    untrained: np.ndarray | None = None  # tokens that are no labels


class Rows(Protocol):
    """Data of one's own: an object with this method, which threads may share."""

    def row(self, sequence: int, out: np.ndarray) -> RowMarks | None:
        """Fill `out` (int32 [seq_length + 1]) with sequence number `sequence` of the run, and the token after it.

        A function of `sequence` alone, so that every mesh reads the same data and a resumed run continues them. Return
        marks where examples begin or tokens are not trained.
        """


class TextBytes(Protocol):
    """See TrainConfig.text_bytes."""

    def count(self, tokens: np.ndarray, labels: np.ndarray) -> int:
        """Return the bytes of the trained labels; both are int32 [rows, T]. Raises UserError for an unknown id."""


class Stream:
    """Batches by step. Threads may share it."""

    def __init__(
        self,
        source: Mixture | OwnRows,
        rank_slice: RankSlice,
        fields: BatchFields,
        *,
        state: dict[str, Any],
        facts: dict[str, Any],
        batches: GlobalBatches,
        total: int | None = None,
        counted: int | None = None,
        text_bytes: TextBytes | None = None,
    ) -> None:
        """state: of step 0. facts: printed before training, the datasets with their tokens, shares and epochs.
        batches: which sequences each of the steps has.
        total: sequences that exist, counted from the beginning of the run; None: endless.
        counted: those of them whose labels are trained, None: all; the others fill up the last batch.
        text_bytes: counts the bytes of a batch; None: they are not known.
        """
        self._source, self._slice, self._fields, self._batches = source, rank_slice, fields, batches
        self._state, self.facts, self._total, self._counted = state, facts, total, counted
        self._bytes = text_bytes

    @property
    def batch_bytes(self) -> int:
        """Approximate memory of one batch."""
        rows = self._slice.global_rows // self._slice.world_size
        return rows * (self._slice.length + 1) * 4 * (1 + sum(self._fields))

    @property
    def steps(self) -> int | None:
        """Whole batches from step 0 on; None: endless."""
        return None if self._total is None else self._batches.steps_before(self._total)

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of global batch `step`, counted from 0 at the state the stream was opened with.

        "tokens" and "labels", int32 [rows, seq_length], and on request "segments" and "positions" of that shape.
        UserError names a shard that changed, vanished or holds an id outside the vocabulary; IndexError after the
        last batch of num_epochs, or of the one pass over validation and test data.
        """
        if step < 0 or (self._total is not None and step >= (self.steps or 0)):
            raise IndexError(f"step {step} of a stream with {self.steps} steps")
        sequences = self._batches.sequences(step)
        counted = sequences if self._counted is None else sequences[: max(0, self._counted - sequences.start)]
        return self.batch_of(counted, len(sequences))

    def batch_of(self, sequences: Sequence[int], global_rows: int | None = None) -> Batch:
        """Return this rank's rows of a global batch of these sequences of the run, as `batch` does.

        Where they are fewer than the batch has rows (None: as many as the largest), the last one fills it up, and its
        labels do not count.
        """
        places = self._slice.of(range(global_rows or self._slice.global_rows))
        own = [sequences[min(place, len(sequences) - 1)] for place in places]
        rows = np.empty((len(own), self._slice.length + 1), np.int32)
        checked: set[OpenFile] = set()
        marks = [self._source.row(number, row, checked) for number, row in zip(own, rows, strict=True)]
        self._source.check(own, rows)
        batch = assemble(rows, marks, self._fields)
        if places.stop > len(sequences):
            batch["labels"] = batch["labels"].copy()
            batch["labels"][max(0, len(sequences) - places.start) :] = IGNORED
        return batch

    def by_dataset(self, steps: int) -> dict[str, np.ndarray]:
        """Return the sequences of the first `steps` batches whose labels are trained, by dataset."""
        first = int(self._state["sequences"])
        last = first + steps * self._slice.global_rows
        return self._source.by_dataset(np.arange(first, last if self._counted is None else min(last, self._counted)))

    def text_bytes(self, batch: Batch) -> int | None:
        """Return the bytes of text that the trained labels of a batch stand for; None without a tokenizer."""
        return self._bytes.count(batch["tokens"], batch["labels"]) if self._bytes else None

    def read_ahead(self, first: int, length: int) -> None:
        """Begin to read what steps from `first` on, in groups of `length`, need that is not local."""
        if self._source.ahead:
            self._source.ahead.follow(self.fetch, first, length)

    def fetch(self, step: int) -> int:
        """Begin to read what batch `step` needs that is not local; return the bytes that are not yet on their way."""
        if isinstance(self._source, OwnRows) or (self.steps is not None and step >= self.steps):
            return 0
        sequences = self._slice.of(self._batches.sequences(step))
        return self._source.fetch(sequences.start, len(sequences), self._slice.length + 1)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state after `step` steps, which `open_stream` continues from. JSON, the same on every rank."""
        return {**self._state, "sequences": self._batches.sequences(step).start}

    def trained(self, step: int) -> int:
        """Return the sequences of the steps before `step`."""
        return self._batches.trained(step)

    def consumed(self, step: int) -> dict[str, int]:
        """Return the sequences of each dataset before step `step`, those passed over included; {} for the dummy."""
        return consumed_at(self._state, int(self.state(step)["sequences"]))

    def close(self) -> None:
        """Close the open files. The stream can still be read: they are opened again."""
        self._source.close()


def assemble(rows: np.ndarray, marks: list[RowMarks], fields: BatchFields) -> Batch:
    """Return a batch from rows of one token more than a sequence, int32 [rows, seq_length + 1].

    Tokens and labels share the memory of `rows` where every label is trained.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:]
    if fields.mask_separators or any(mark.untrained is not None for mark in marks):
        labels = labels.copy()
        for row, mark in enumerate(marks):
            places = mark.beginnings if fields.mask_separators else []
            labels[row, [place - 1 for place in places if place > 0]] = IGNORED
            if mark.untrained is not None:
                labels[row, mark.untrained[mark.untrained > 0] - 1] = IGNORED
    batch = {"tokens": tokens, "labels": labels}
    if fields.segments or fields.positions:
        starts = np.zeros(tokens.shape, bool)
        for row, mark in enumerate(marks):
            starts[row, [place for place in mark.beginnings if 0 < place < tokens.shape[1]]] = True
        if fields.segments:
            batch["segments"] = np.cumsum(starts, axis=1, dtype=np.int32) + np.int32(1)
        if fields.positions:
            index = np.arange(tokens.shape[1], dtype=np.int32)
            batch["positions"] = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1).astype(np.int32)
    return batch


def cut_rows(batch: Batch, length: int) -> Batch:
    """Return a batch whose rows are cut into rows of `length` tokens, whose positions begin at 0."""
    rows = {name: array.reshape(-1, length) for name, array in batch.items()}
    if "positions" in rows:
        rows["positions"] = np.minimum(rows["positions"], np.arange(length, dtype=np.int32))
    return rows


class Counters:
    """The dummy dataset, for performance runs: every sequence counts up from a random start, so it can be learned."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._seed, self._vocabulary = seed, vocabulary

    def row(self, sequence: int, out: np.ndarray) -> None:
        """Fill `out`; a sequence is one document. See Rows.row."""
        start = key_of(self._seed, sequence) % self._vocabulary
        out[:] = (np.arange(len(out), dtype=np.int64) + start) % self._vocabulary


class OwnRows:
    """The user's data, or counters, checked. See Mixture for the methods."""

    ahead = None  # no file is read

    def __init__(self, own: Rows, name: str, vocabulary: int) -> None:
        self._own, self._name, self._vocabulary = own, name, vocabulary

    def row(self, sequence: int, out: np.ndarray, checked: set[OpenFile]) -> RowMarks:
        return self._own.row(sequence, out) or RowMarks([])

    def by_dataset(self, sequences: np.ndarray) -> dict[str, np.ndarray]:
        return {self._name: sequences}

    def check(self, sequences: Sequence[int], rows: np.ndarray) -> None:
        """Raise UserError with an id outside the vocabulary."""
        wrong = rows[(rows < 0) | (rows >= self._vocabulary)]
        if len(wrong):
            raise UserError(f"{self._name}: token id {wrong[0]}, but the model's vocabulary is {self._vocabulary:,}")

    def close(self) -> None:
        """Do nothing: no file is open."""


class Mixture:
    """Several datasets in fixed proportions."""

    def __init__(
        self,
        corpora: list[Corpus],
        schedule: MixtureSchedule,
        special: SpecialTokens,
        *,
        config: TrainConfig,
        state: dict[str, Any],
        files: OpenFiles,
        ahead: ReadAhead | None,
    ) -> None:
        """state: of step 0; its mixture is in the order of `corpora`."""
        self._files, self.ahead, self._corpora, self._special = files, ahead, corpora, special
        self._names = list(state["mixture"])
        self._start, self._consumed = state["start"], [state["consumed"][name] for name in self._names]
        lanes = config.logical_shards if config.shuffle == "shards" else 1
        if ahead:  # a block is read once per lane that is in it
            ahead.expect(sum(size * min(lanes, count) for size, count in (corpus.remote_blocks for corpus in corpora)))
        self._lanes = [LaneOrder(corpus.tokens, payload(config, special), lanes) for corpus in corpora]
        self._dataset, self._earlier, self._counts = schedule.dataset.data, schedule.earlier.data, schedule.counts
        self._vocabulary = model_shape(config).vocab_size

    def row(self, sequence: int, out: np.ndarray, checked: set[OpenFile]) -> RowMarks:
        """Fill `out` (int32 [seq_length + 1]) with [bol,] tokens of one dataset, and one more as the last label.

        checked: files that were checked for change during this batch.
        """
        corpus, start = self._locate(sequence)
        lead = 0 if self._special.bol is None else 1
        beginnings, untrained = corpus.fill(start, out[lead:] if lead else out, checked), None
        if corpus.has_labels:
            untrained, examples = unmark(out[lead:])
            if self._special.bos is not None:  # nothing predicts the first token of an example
                untrained = np.append(untrained, np.array(beginnings, np.int64))
            untrained += lead
            beginnings += examples
        if lead:
            out[0] = self._special.bol
            beginnings = [place + 1 for place in beginnings if place > 0]
        if self._special.eol is not None:
            out[-1] = self._special.eol
        return RowMarks(beginnings, untrained)

    def fetch(self, sequence: int, rows: int, length: int) -> int:
        """Begin to read what `rows` sequences need of files that are not local; return the bytes that are requested."""
        places = map(self._locate, range(sequence, sequence + rows))
        return sum(corpus.fetch(start, length) for corpus, start in places)

    def by_dataset(self, sequences: np.ndarray) -> dict[str, np.ndarray]:
        """Return the sequences of each dataset, in their order."""
        dataset = np.asarray(self._dataset)[(sequences - self._start) % PERIOD]
        return {name: sequences[dataset == number] for number, name in enumerate(self._names)}

    def check(self, sequences: Sequence[int], rows: np.ndarray) -> None:
        """Raise UserError that names the shard of an id outside the model's vocabulary."""
        unsigned = rows.view(np.uint32)  # a negative id becomes a large one
        if int(unsigned.max()) < self._vocabulary:
            return
        row = int(unsigned.max(axis=1).argmax())
        wrong = int(rows[row, unsigned[row].argmax()])
        corpus, start = self._locate(sequences[row])
        where = "a special token" if wrong in self._special else " or ".join(corpus.paths(start, rows.shape[1]))
        remedy = f"--vocab_size must be at least {wrong + 1}" if wrong >= 0 else "has padding, which is no token"
        text = f"token id {wrong}, but the model's vocabulary is {self._vocabulary:,}: the data was made with another"
        raise UserError(f"{where}: {text} tokenizer, or {remedy}")

    def close(self) -> None:
        self._files.close()
        if self.ahead:
            self.ahead.close()

    def _locate(self, sequence: int) -> tuple[Corpus, int]:
        """Return the dataset of a sequence of the run, and the position in its stream at which it begins."""
        period, place = divmod(sequence - self._start, PERIOD)
        number = self._dataset[place]
        before = self._consumed[number] + period * self._counts[number] + self._earlier[place]
        return self._corpora[number], self._lanes[number].position(before)


def payload(config: TrainConfig, special: SpecialTokens) -> int:
    """Return the tokens of the data in one sequence: the first place is bol_token's if there is one."""
    return config.seq_length - (special.bol is not None)


def open_stream(
    config: TrainConfig,
    rank: int = 0,
    world_size: int = 1,
    split: str = "train",
    state: dict[str, Any] | None = None,
    own: Rows | None = None,
) -> Stream:
    """Open the stream of one rank. split: "train", "valid" or "test". state: of an earlier stream, to continue it.

    own: data that are read instead of those that the configuration names; they never end.
    global_batch_size None counts one device per rank: batch_size x world_size x gradient_accumulation_steps.
    UserError (a ValueError) names the flag or path that is wrong, or what changed since `state`.
    """
    rank_slice = _slice(config, rank, world_size)
    fields = BatchFields(config.reset_attention_mask, config.reset_position_ids, config.eod_mask_loss)
    if own or config.use_dummy_dataset:
        return _open_endless(config, split, rank_slice, fields, state, own)
    source = split_source(config, split)
    datasets = open_datasets(config, split)
    special = special_tokens(config, datasets)
    files, cache = OpenFiles(), BlockCache()
    ahead = store_of(source.folder).read_ahead(config)
    orders = [_order(config, special, dataset.name, any(fields)) for dataset in datasets]
    corpora = [
        Corpus(dataset.shards, dataset.documents, order, files, cache, ahead, config.block_check(dataset.description))
        for dataset, order in zip(datasets, orders, strict=True)
    ]
    _check_not_empty(source, datasets, corpora, split)
    schedule = mixture_schedule(dataset_weights(source, datasets, [corpus.tokens for corpus in corpora]))
    tokens = payload(config, special)
    if split == "train":
        _check_batch(datasets, corpora, schedule, rank_slice.global_rows * tokens)
    first_state = open_state(
        order_settings(config, special, source.shares),
        {
            dataset.name: {"share": count, "fingerprint": dataset.fingerprint, TOKENIZER: dataset.tokenizer}
            for dataset, count in zip(datasets, schedule.counts, strict=True)
        },
        previous=state,
        config=config,
    )
    mixture = Mixture(corpora, schedule, special, config=config, state=first_state, files=files, ahead=ahead)
    total, counted = _extent(config, corpora, tokens, rank_slice, split)
    facts = {
        "datasets": _facts(config, datasets, corpora, schedule, tokens if split == "train" else 0),
        "notes": data_notes(source, special, datasets, model_shape(config).vocab_size),
    }
    return Stream(
        mixture,
        rank_slice,
        fields,
        state=first_state,
        facts=facts,
        batches=_batches(config, split, rank_slice, first_state),
        total=total,
        counted=counted,
        text_bytes=None if split == "train" else config.text_bytes([id for id in special[:-1] if isinstance(id, int)]),
    )


def refuse_unread(config: TrainConfig, own: Mapping[str, Rows]) -> None:
    """Raise UserError for data of one's own of which the run reads nothing."""
    if unread := sorted(own.keys() - {"train", *config.held_out_splits()}):
        remedy = "name it train, valid (which needs val_interval) or test (which needs test_steps), or leave it out"
        raise UserError(f"data={', '.join(unread)}: the run reads no such split: {remedy}")


def check_data(config: TrainConfig, own: Mapping[str, Rows] = NO_ROWS) -> dict[str, str]:
    """Return the fingerprint of every dataset by "SPLIT data NAME".

    Raises UserError for everything about the run's data that can be known without the number of devices.
    """
    refuse_unread(config, own)
    if config.tokenizer_path and not config.use_dummy_dataset:  # checkpoints record it, also where training reads none
        check_tokenizer(config.tokenizer_path)
    fingerprints: dict[str, str] = {}
    for split in ("train", *config.held_out_splits()):
        stream = open_stream(config, split=split, own=own.get(split))
        mixture = stream.state(0)["mixture"]
        fingerprints |= {f"{split} data {name}": entry["fingerprint"] for name, entry in mixture.items()}
        stream.close()
    return fingerprints


def _slice(config: TrainConfig, rank: int, world_size: int) -> RankSlice:
    micro_batches = config.gradient_accumulation_steps or 1
    global_rows = config.global_batch_size or config.batch_size * world_size * micro_batches
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} of a world of {world_size}: give a rank from 0 to {world_size - 1}")
    if global_rows % world_size:
        raise UserError(f"--global_batch_size={global_rows} is not a multiple of the {world_size} ranks that read data")
    if problems := list(config.batch_problems(global_rows, world_size)):
        raise ConfigError(problems)
    return RankSlice(rank, world_size, global_rows, config.seq_length)


def _batches(config: TrainConfig, split: str, rank_slice: RankSlice, state: dict[str, Any]) -> GlobalBatches:
    """Return the global batches from a state on; those of validation and test neither grow nor pass anything over."""
    batches = config.global_batches if split == "train" else GlobalBatches
    return batches(rank_slice.global_rows, int(state["sequences"]))


def _open_endless(
    config: TrainConfig,
    split: str,
    rank_slice: RankSlice,
    fields: BatchFields,
    state: dict[str, Any] | None,
    own: Rows | None,
) -> Stream:
    """Open data that are a function of the sequence alone: the user's own, or counters."""
    rows = model_shape(config).vocab_size
    if own and config.num_epochs:
        raise UserError(f"--num_epochs={config.num_epochs}: data of your own have no end: give num_steps instead")
    order: dict[str, Any] = {"seed": config.seed, "vocab_size": rows, "seq_length": config.seq_length}
    order |= {"data": type(own).__qualname__} if own else {}
    first_state = open_state(order, {}, previous=state, config=config)
    name = order.get("data", "dummy")
    facts = {"datasets": [{"name": name, "tokens": None, "share": 1.0, "epochs": None}]}
    seed = config.seed if split == "train" else config.seed + 1 + SPLITS.index(split)
    source = OwnRows(own or Counters(seed, rows), name, rows)
    batches = _batches(config, split, rank_slice, first_state)
    return Stream(source, rank_slice, fields, state=first_state, facts=facts, batches=batches)


def _order(config: TrainConfig, special: SpecialTokens, name: str, boundaries: bool) -> DocumentOrder:
    """Return the order of a dataset. Its name is part of the key: it keeps its order whatever it is mixed with."""
    key = (config.seed, int(short_hash(name), 16))
    shuffled = config.shuffle != "none"
    return DocumentOrder(key, shuffled, special.eos, special.bos, boundaries)


def order_settings(config: TrainConfig, special: SpecialTokens, shares: str) -> dict[str, Any]:
    """Return every setting that the order of all datasets depends on, by the name of its flag."""
    names = ("seed", "seq_length", "logical_shards", "shuffle", "max_samples", "strip_tokens")
    return {
        **{name: getattr(config, name) for name in names},
        "split": shares,
        "eos_token": special.eos,
        "bos_token": special.bos,
        "bol_token": special.bol,
        "eol_token": special.eol,
    }


def _check_not_empty(source: SplitSource, datasets: list[Dataset], corpora: list[Corpus], split: str) -> None:
    flag = source.weights_flag.replace("weights", "datasets")
    folder = "data_path" if split == "train" else f"{split}_data_path"
    other = f"leave it out of --{flag}" if len(datasets) > 1 and flag else f"set another --{folder}"
    for dataset, corpus in zip(datasets, corpora, strict=True):
        if not corpus.tokens and source.shares:
            count = sum(shard.documents for shard in dataset.shards)
            has = f"--split={source.shares} gives {split} no tokens of its {count:,} documents"
            raise UserError(f"{dataset.folder}: {has}: raise that share, or {other}")
        if not corpus.tokens:
            raise UserError(f"{dataset.folder}: no tokens: fill it, or {other}")


def _check_batch(datasets: list[Dataset], corpora: list[Corpus], schedule: MixtureSchedule, tokens: int) -> None:
    """Raise UserError if a dataset would repeat within a batch. tokens: of one global batch."""
    for dataset, corpus, count in zip(datasets, corpora, schedule.counts, strict=True):
        share = int(count / PERIOD * tokens)
        if corpus.tokens < share:
            raise UserError(
                f"{dataset.folder}: {corpus.tokens:,} tokens, fewer than the {share:,} that one global batch takes "
                "from it: lower --global_batch_size, --seq_length or its weight"
            )


def _extent(
    config: TrainConfig, corpora: list[Corpus], length: int, rank_slice: RankSlice, split: str
) -> tuple[int | None, int | None]:
    """Return (sequences that can be read, those of them whose labels are trained); None: endless, all.

    Training has num_epochs passes over all datasets together, validation and test have one.
    """
    rows, tokens = rank_slice.global_rows, sum(corpus.tokens for corpus in corpora)
    if split == "train":
        return (None if config.num_epochs is None else config.num_epochs * tokens // length), None
    sequences = tokens // length
    if not sequences:
        have = f"the {split} data have {tokens:,} tokens, but a sequence has {length:,}"
        raise UserError(f"{have}: lower --seq_length, or hold out more data")
    if config.drop_last_val and sequences < rows:
        raise UserError(
            f"the {split} data are {sequences:,} sequences of {length:,} tokens, but a global batch takes {rows:,}: "
            "lower --global_batch_size or --seq_length, or give --drop_last_val=False"
        )
    return (sequences - sequences % rows if config.drop_last_val else sequences + -sequences % rows), sequences


def _facts(
    config: TrainConfig, datasets: list[Dataset], corpora: list[Corpus], schedule: MixtureSchedule, length: int
) -> list[dict[str, Any]]:
    """Return a row for each dataset. length: tokens of a training sequence, 0 for another split.

    "epochs": passes over the dataset in num_steps steps; None outside of training and without a global batch size.
    """
    planned = config.sequences_of_run * length if config.global_batch_size and length else None
    return [
        {
            "name": dataset.name,
            "shards": len(dataset.shards),
            "documents": len(dataset.documents),
            "empty_documents": sum(shard.documents - shard.nonempty for shard in dataset.shards),
            "tokens": corpus.tokens,
            "share": count / PERIOD,
            "epochs": None if planned is None else count / PERIOD * planned / corpus.tokens,
        }
        for dataset, corpus, count in zip(datasets, corpora, schedule.counts, strict=True)
    ]
