"""Losses on held-out data: validations between steps, and a test after the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import AtLeast, Needs
from pretraining.config.extension import Extension, Watcher
from pretraining.config.training import TrainConfig
from pretraining.extensions.held_out.checks import check_shares, check_test_data, check_validation_data


@dataclass(frozen=True)
class HeldOutConfig(TrainConfig):
    """A configuration whose run may evaluate held-out data."""

    # ---- Validation
    val_sanity_steps: Annotated[int, AtLeast(0, special=-1), Needs("val_interval")] = 0
    """Global batches of a validation before the first step, reported as step 0. 0: none; -1: as many as val_steps.
    Elsewhere: num_sanity_val_steps."""

    def held_out_splits(self) -> list[str]:
        """See TrainConfig."""
        return ["valid"] * bool(self.val_interval) + ["test"] * bool(self.test_steps)


def compare_splits(config: TrainConfig, datasets: Mapping[str, Any]) -> None:
    """Raise UserError if held-out data are trained on; see check_shared_shards."""
    if config.held_out_splits():
        from pretraining.extensions.shared_shards import check_shared_shards  # imports numpy

        check_shared_shards(config, datasets)


def watch(run: Any) -> Watcher | None:
    """Return what evaluates the splits of a TrainingRun besides "train"; None if there are none."""
    from pretraining.extensions.held_out.watch import Validation  # imports torch

    return Validation(run) if run.config.held_out_splits() else None


EXTENSION = Extension(
    configuration=HeldOutConfig,
    stored_data_checks=(check_validation_data, check_test_data, check_shares),
    switches={
        "val_interval": ("valid_data_path", "valid_datasets", "valid_weights", "val_steps"),
        "test_steps": ("test_data_path",),
    },
    agree=compare_splits,
    watch=watch,
)
