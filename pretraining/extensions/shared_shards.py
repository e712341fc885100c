"""Held-out data that are training data as well: their loss does not measure what the model has not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data.datasets import Dataset, split_source
from pretraining.data.index import ShardIndex
from pretraining.storage import Location


def check_shared_shards(config: TrainConfig, datasets: Mapping[str, Sequence[Dataset]]) -> None:
    """Raise UserError if a shard of held-out data has the content of one that is trained on: a copy, a link, itself.

    A folder that is given for both is intended, and --split divides its documents: there a shard may be itself.
    datasets: of the splits that are read from shards.
    """
    if "train" not in datasets:
        return
    root, trained = split_source(config, "train").folder, defaultdict[str, dict[str, str]](dict)
    for name, shard in _shards(root, datasets["train"]):
        trained[shard.fingerprint][name] = shard.path
    for split in [split for split in datasets if split != "train"]:
        folder = split_source(config, split).folder
        is_same = folder.resolve() == root.resolve()
        for name, shard in _shards(folder, datasets[split]):
            if (paths := trained.get(shard.fingerprint)) and not (is_same and name in paths):
                remedy = "leave it out of one of them, or give one folder for both if this is intended"
                what = f"has the content of {next(iter(paths.values()))}, which is training data"
                raise UserError(f"{split} data {shard.path}: {what}; {remedy}")


def _shards(folder: Location, datasets: Sequence[Dataset]) -> Iterator[tuple[str, ShardIndex]]:
    """Yield the shards of which a split has tokens, and their names in its folder.

    Empty ones, which Spark writes for empty partitions, all have the same content.
    """
    for dataset in datasets:
        first = 0
        for shard in dataset.shards:
            is_read = first < dataset.documents.stop and first + shard.documents > dataset.documents.start
            if is_read and shard.token_count:
                yield str(PurePath(shard.path).relative_to(str(folder))), shard
            first += shard.documents
