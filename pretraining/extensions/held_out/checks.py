"""Rules across the settings of held-out data. No shard is opened here."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.grammar import parse_split
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.data.layouts import split_folders
from pretraining.storage import location


def check_validation_data(config: TrainConfig) -> Iterator[Problem]:
    """Validation needs its length and held-out data: a folder, a share, or a split that data_path holds."""
    if not config.val_interval:
        return
    if not config.val_steps:
        remedy = "needs --val_steps=N, the number of global batches per validation"
        yield problem(config, "val_interval", remedy, is_missing=True)
    if not (config.use_dummy_dataset or config.valid_data_path or config.split or _holds(config, "valid")):
        remedy = "needs held-out data: set --valid_data_path, or --split=949,50,1 to hold back part of data_path"
        yield problem(config, "val_interval", remedy, is_missing=True)


def check_test_data(config: TrainConfig) -> Iterator[Problem]:
    """A test needs data of its own: a folder, a share, or a split that data_path holds."""
    if not config.test_steps or config.use_dummy_dataset or config.test_data_path:
        return
    shares = parse_split(config.split)
    if not (shares[2] if shares else _holds(config, "test")):
        remedy = "needs test data: set --test_data_path, or a third share as in --split=949,50,1"
        yield problem(config, "test_steps", remedy, is_missing=True)


def check_shares(config: TrainConfig) -> Iterator[Problem]:
    """What split holds back of data_path is read: no folder of the same split takes its place."""
    for share, name in zip(parse_split(config.split)[1:], ("valid_data_path", "test_data_path"), strict=False):
        if share and (folder := getattr(config, name)) and not config.use_dummy_dataset:
            remedy = f"holds documents back which nothing reads, because {name}={folder}; make that share 0"
            yield problem(config, "split", f"{remedy}, or remove {name}")


def _holds(config: TrainConfig, split: str) -> bool:
    """Whether data_path is a folder of several splits, this one among them."""
    layout = split_folders(location(config.data_path)) if config.data_path and not config.datasets else None
    return layout is not None and split in layout.folders
