"""The settings of the best checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from pretraining.config.declaration import AtLeast, Grammar, Needs, Resume
from pretraining.config.errors import Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.extensions.best_checkpoints.ranking import best_steps, validation_values
from pretraining.extensions.checks import without_effect
from pretraining.extensions.milestones import validates_at

FIGURES = ("val_loss", "val_bits_per_byte")
EXPECTED = "val_loss or val_bits_per_byte, or one of them for a dataset, such as val_loss/NAME"
SEARCHED = 100_000  # validations that are compared with the steps of saves


def parse_metric(text: str) -> tuple[str, str]:
    """Return the figure and the dataset of a metric; "" for all datasets. Raises ValueError."""
    figure, slash, dataset = text.partition("/")
    if figure not in FIGURES or bool(slash) != bool(dataset):
        raise ValueError(text)
    return figure, dataset


METRIC = Grammar(parse_metric, EXPECTED)


@dataclass(frozen=True)
class BestCheckpointsConfig(TrainConfig):
    """A configuration that keeps the best checkpoints besides the newest."""

    # ---- Checkpoints
    keep_best: Annotated[int, AtLeast(0), Resume.FREE] = 0
    """Committed checkpoints with the lowest keep_best_metric to keep, besides the keep_last_n_checkpoints newest. Only
    checkpoints of steps that are validated count; metrics.jsonl has the value of each, and one whose value is missing
    there is not removed. Of equal values, the newer is better; a value that is not finite is the worst. 0: none.
    Elsewhere: save_top_k with a monitor, save_total_limit with load_best_model_at_end."""
    keep_best_metric: Annotated[str, METRIC, Needs("keep_best"), Resume.FREE] = "val_loss"
    """Figure of metrics.jsonl that keep_best compares: val_loss or val_bits_per_byte, or that of one dataset, such as
    val_loss/NAME. Lower is better. Elsewhere: monitor, metric_for_best_model."""

    def kept_steps(self, steps: Sequence[int]) -> Collection[int]:
        """See TrainConfig: those, the best, and those whose validation is not in metrics.jsonl."""
        kept = super().kept_steps(steps)
        if not self.keep_best:
            return kept
        values = self.validation_values()
        unknown = [step for step in steps if step not in values and validates_at(self, step)]
        return {*kept, *best_steps(steps, values)[: self.keep_best], *unknown}

    def validation_values(self) -> dict[int, float]:
        """Return keep_best_metric by step. Raises OSError if metrics.jsonl cannot be read."""
        values = validation_values(self.run_folder, self.keep_best_metric)
        return {step: value for step, value in values.items() if step}  # before the first step it may be shorter


def check_best(config: BestCheckpointsConfig) -> Iterator[Problem]:
    """Checkpoints are saved and removed, and validations say which are good."""
    if not config.keep_best:
        return
    yield from without_effect(config, "keep_best")
    if not config.keep_last_n_checkpoints:
        remedy = "has no effect with --keep_last_n_checkpoints=0, which keeps all; give --keep_last_n_checkpoints=1"
        yield problem(config, "keep_best", remedy)
    if not config.val_interval:
        yield problem(config, "keep_best", "needs validations: give --val_interval=N, in steps", is_missing=True)


def check_common_steps(config: BestCheckpointsConfig) -> Iterator[Problem]:
    """Some checkpoint before the last is validated, if there are both checkpoints and validations before the last."""
    interval, ends = config.val_interval, config.num_steps
    if not config.keep_best or not 0 < max(interval, config.checkpoint_interval) < ends:
        return
    validations = range(interval, ends, interval)[:SEARCHED] if interval else range(0)
    if config.checkpoint_interval and validations and not any(map(config.saves_at, validations)):
        remedy = (
            f"no step before the last is saved (checkpoint_interval={config.checkpoint_interval}) and validated "
            f"(val_interval={interval}) too; make one a multiple of the other"
        )
        yield problem(config, "keep_best", remedy)


def check_metric(config: BestCheckpointsConfig) -> Iterator[Problem]:
    """Validations have the metric, as far as settings tell."""
    if not config.keep_best:
        return
    figure, dataset = parse_metric(config.keep_best_metric)
    if figure == "val_bits_per_byte" and not config.tokenizer_path:
        yield problem(config, "keep_best_metric", "needs --tokenizer_path, which counts the bytes; or use val_loss")
    if dataset and config.use_dummy_dataset:
        yield problem(config, "keep_best_metric", f"the dummy dataset has no parts; use {figure}")


def check_dataset(config: BestCheckpointsConfig) -> None:
    """Raise UserError if keep_best_metric is of a dataset that validations do not report."""
    figure, dataset = parse_metric(config.keep_best_metric)
    if not (config.keep_best and dataset and config.val_interval) or config.use_dummy_dataset:
        return
    names = dataset_names(config)
    if names and (dataset not in names or len(names) == 1):
        parts = ", ".join(names) if len(names) > 1 else "one dataset"
        raise UserError(f"--keep_best_metric={config.keep_best_metric}: the validation data are {parts}; use {figure}")


def dataset_names(config: TrainConfig) -> list[str]:
    """Return the datasets of the validation data; none if they cannot be opened, which is reported when they are."""
    from pretraining.data.datasets import split_source  # NumPy takes 0.1 s
    from pretraining.data.stores.find import find_datasets

    with suppress(UserError):
        source = split_source(config, "valid")
        return find_datasets(source.folder, source.datasets)
    return []


CHECKS = (check_best, check_common_steps, check_metric)
