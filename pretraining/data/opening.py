"""How a stream is opened: the datasets of a split, their order and mixture, and what is wrong with them.

See stream.py for what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    dataset_weights,
    open_datasets,
    special_tokens,
    split_source,
)
from pretraining.data.files import OpenFiles
from pretraining.data.hashing import short_hash
from pretraining.data.lanes import PERIOD, MixtureSchedule, mixture_schedule
from pretraining.data.origin import check_tokenizer
from pretraining.data.state import TOKENIZER, open_state
from pretraining.data.stream import BatchFields, Counters, Mixture, OwnRows, RankSlice, Rows, Stream, payload
from pretraining.storage import ReadAhead, store_of


def open_stream(
    config: TrainConfig,
    rank: int = 0,
    world_size: int = 1,
    split: str = "train",
    state: dict[str, Any] | None = None,
    own: Rows | None = None,
    datasets: list[Dataset] | None = None,
) -> Stream:
    """Open the stream of one rank. split: "train", "valid" or "test". state: of an earlier stream, to continue it.

    own: data that are read instead of those that the configuration names; they never end. datasets: of the split, if
    they were opened before.
    global_batch_size None counts one device per rank: batch_size x world_size x gradient_accumulation_steps.
    UserError (a ValueError) names the flag or path that is wrong, or what changed since `state`.
    """
    rank_slice = _slice(config, rank, world_size)
    fields = BatchFields(config.reset_attention_mask, config.reset_position_ids, config.eod_mask_loss)
    if own or config.use_dummy_dataset:
        return _open_endless(config, split, rank_slice, fields, state, own)
    source = split_source(config, split)
    datasets = datasets or open_datasets(config, split)
    special = special_tokens(config, datasets)
    corpora, files, ahead = _corpora(config, source, datasets, special, any(fields))
    _check_not_empty(source, datasets, corpora, split)
    schedule = mixture_schedule(dataset_weights(source, datasets, [corpus.tokens for corpus in corpora]))
    length = payload(config, special)
    if split == "train":
        _check_batch(datasets, corpora, schedule, rank_slice.global_rows * length, config.max_samples)
    parts = {
        dataset.name: {"share": count, "fingerprint": dataset.fingerprint, TOKENIZER: dataset.tokenizer}
        for dataset, count in zip(datasets, schedule.counts, strict=True)
    }
    order = order_settings(config, special, source.shares)
    first_state = open_state(order, parts, previous=state, config=config)
    mixture = Mixture(corpora, schedule, special, config=config, state=first_state, files=files, ahead=ahead)
    total, counted = _extent(config, corpora, length, rank_slice, split)
    facts = {
        "datasets": _facts(config, datasets, corpora, schedule, length if split == "train" else 0),
        "source": source,
        "special": special,
        "opened": datasets,
        "vocabulary": model_shape(config).vocab_size,
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
        text_bytes=None if split == "train" else config.text_bytes([id for id in special if isinstance(id, int)]),
    )


def refuse_unread(config: TrainConfig, own: Mapping[str, Rows]) -> None:
    """Raise UserError for data of one's own of which the run reads nothing."""
    if unread := sorted(own.keys() - {"train", *config.held_out_splits()}):
        remedy = "name it train, valid (which needs val_interval) or test (which needs test_steps), or leave it out"
        raise UserError(f"data={', '.join(unread)}: the run reads no such split: {remedy}")


def check_data(config: TrainConfig, own: Mapping[str, Rows] | None = None) -> dict[str, list[Dataset]]:
    """Return the datasets of every split that is read from shards.

    Raises UserError for everything about the run's data that can be known without the number of devices.
    """
    own = own or {}
    refuse_unread(config, own)
    if config.tokenizer_path and not config.use_dummy_dataset:  # checkpoints record it, also where training reads none
        check_tokenizer(config.tokenizer_path)
    datasets: dict[str, list[Dataset]] = {}
    for split in ("train", *config.held_out_splits()):
        stream = open_stream(config, split=split, own=own.get(split))
        if "opened" in stream.facts:
            datasets[split] = stream.facts["opened"]
        stream.close()
    return datasets


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


def _corpora(
    config: TrainConfig, source: SplitSource, datasets: list[Dataset], special: SpecialTokens, boundaries: bool
) -> tuple[list[Corpus], OpenFiles, ReadAhead | None]:
    """Return the stream of each dataset, and what they read through.

    A dataset's name is part of its key: it keeps its order whatever it is mixed with.
    """
    corpora, files, cache, shuffled = list[Corpus](), OpenFiles(), BlockCache(), config.shuffle != "none"
    ahead = store_of(source.folder).read_ahead(config)
    for dataset in datasets:
        key = (config.seed, int(short_hash(dataset.name), 16))
        order = DocumentOrder(key, shuffled, special.eos, special.bos, boundaries)
        check = config.block_check(dataset.description)
        corpora.append(Corpus(dataset.shards, dataset.documents, order, files, cache, ahead, check))
    return corpora, files, ahead


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


def _check_batch(
    datasets: list[Dataset], corpora: list[Corpus], schedule: MixtureSchedule, tokens: int, most: int | None
) -> None:
    """Raise UserError if a dataset would repeat within a batch. tokens: of one global batch. most: max_samples."""
    for dataset, corpus, count in zip(datasets, corpora, schedule.counts, strict=True):
        if corpus.tokens < (share := int(count / PERIOD * tokens)):
            raised = f"raise --max_samples={most}, or " if len(dataset.documents) == most else ""
            few = f"{corpus.tokens:,} tokens, fewer than the {share:,} that one global batch takes from it"
            raise UserError(f"{dataset.folder}: {few}: {raised}lower --global_batch_size, --seq_length or its weight")


def _extent(
    config: TrainConfig, corpora: list[Corpus], length: int, rank_slice: RankSlice, split: str
) -> tuple[int | None, int | None]:
    """Return (sequences that can be read, those of them whose labels are trained); None: endless, all.

    Training has num_epochs passes over all datasets together, validation and test have one. length: tokens of the data
    in a sequence.
    """
    rows, tokens = rank_slice.global_rows, sum(corpus.tokens for corpus in corpora)
    if split == "train":
        total = None if config.num_epochs is None else config.num_epochs * tokens // length
        return total, None
    sequences = tokens // length
    if not sequences:
        have = f"the {split} data have {tokens:,} tokens, but a sequence has {length:,}"
        raise UserError(f"{have}: lower --seq_length, or hold out more data")
    if not config.drop_last_val:
        return sequences + -sequences % rows, sequences  # the last batch is filled up
    if sequences < rows:
        have = f"the {split} data are {sequences:,} sequences of {length:,} tokens, but a global batch takes {rows:,}"
        raise UserError(f"{have}: lower --global_batch_size or --seq_length, or give --drop_last_val=False")
    return sequences // rows * rows, sequences


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
