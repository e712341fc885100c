"""The global batch of step k, as a pure function of the data and the configuration.

Sequence g of the run -> dataset and its m-th sequence (mixture schedule) -> position in that dataset's endless
shuffled stream (lanes.py) -> tokens (corpus.py). Ranks, steps and reader threads only choose which sequences are
asked for; the state is the number of sequences consumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pretraining.config.batches import GlobalBatches
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.corpus import Corpus
from pretraining.data.datasets import SpecialTokens
from pretraining.data.files import OpenFiles
from pretraining.data.hashing import key_of
from pretraining.data.lanes import PERIOD, LaneOrder, MixtureSchedule
from pretraining.data.state import consumed_at
from pretraining.data.stores.labels import IGNORED, unmark
from pretraining.storage import OpenFile, ReadAhead

Batch = dict[str, np.ndarray]


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
        marks where examples begin or tokens are not trained; None: there are none.
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
        """state: of step 0. facts: for what is printed before training: the datasets with their tokens, shares and
        epochs, and what was opened.
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
