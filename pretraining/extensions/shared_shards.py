"""Held-out data that are training data as well: their loss does not measure what the model has not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data.datasets import open_datasets, split_source
from pretraining.data.index import ShardIndex


def check_shared_shards(config: TrainConfig, fingerprints: Mapping[str, str]) -> None:
    """Raise UserError if a shard of held-out data has the content of one that is trained on: a copy, a link, itself.

    A folder that is given for both is intended, and --split divides its documents: there a shard may be itself.
    fingerprints: of the data that are read from shards, by "SPLIT data NAME".
    """
    read = {name.partition(" ")[0] for name in fingerprints}
    held_out = [split for split in config.held_out_splits() if split in read]
    if not held_out or "train" not in read:
        return
    folder, trained = split_source(config, "train").folder, defaultdict[str, dict[str, str]](dict)
    for name, shard in _shards(config, "train"):
        trained[shard.fingerprint][name] = shard.path
    for split in held_out:
        is_same = split_source(config, split).folder.resolve() == folder.resolve()
        for name, shard in _shards(config, split):
            if (paths := trained.get(shard.fingerprint)) and not (is_same and name in paths):
                remedy = "leave it out of one of them, or give one folder for both if this is intended"
                what = f"has the content of {next(iter(paths.values()))}, which is training data"
                raise UserError(f"{split} data {shard.path}: {what}; {remedy}")


def _shards(config: TrainConfig, split: str) -> Iterator[tuple[str, ShardIndex]]:
    """Yield the shards of which the split has tokens, and their names in the folder of the split.

    Empty ones, which Spark writes for empty partitions, all have the same content.
    """
    root = str(split_source(config, split).folder)
    for dataset in open_datasets(config, split):
        first = 0
        for shard in dataset.shards:
            is_read = first < dataset.documents.stop and first + shard.documents > dataset.documents.start
            if is_read and shard.token_count:
                yield str(PurePath(shard.path).relative_to(root)), shard
            first += shard.documents
