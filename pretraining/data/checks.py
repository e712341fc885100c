"""Rules across the settings of the data. No shard is opened here."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


def check_mixture(config: TrainConfig) -> Iterator[Problem]:
    """There is one share for each dataset."""
    for prefix in ("", "valid_"):
        names = getattr(config, f"{prefix}datasets")
        weights, datasets = len(comma_separated(getattr(config, f"{prefix}weights"))), len(comma_separated(names))
        if weights and weights != datasets:
            actual = f"={names} has {datasets}; use one share per dataset" if datasets else " is not set; set it too"
            yield problem(config, f"{prefix}weights", f"has {weights} shares but {prefix}datasets{actual}")


def check_special_tokens(config: TrainConfig) -> Iterator[Problem]:
    """The separator has one value, and a sequence has room for data."""
    if config.sep_token is not None and config.eos_token not in (None, config.sep_token):
        remedy = f"is another name of sep_token={config.sep_token}; set only one of the two"
        yield problem(config, "eos_token", remedy)
    if config.bol_token is not None and config.seq_length < 2:
        yield problem(config, "bol_token", f"leaves no room for data in seq_length={config.seq_length}")


def check_training_data(config: TrainConfig) -> Iterator[Problem]:
    """Training needs data."""
    if not config.use_dummy_dataset and not config.data_path:
        remedy = "is not set: give a folder of token shards, or --use_dummy_dataset=True for a speed test"
        yield Problem("--data_path", f"{remedy}; bash scripts/train.sh prepares a small corpus", is_missing=True)


CHECKS = (check_mixture, check_special_tokens)
STORED_DATA = (check_training_data,)  # which a caller may replace
