"""What a run checks, opens and writes before the first step. Composes the rooms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pretraining.checkpoint.files import writing_to
from pretraining.checkpoint.manifest import Facts
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.datasets import Dataset
from pretraining.data.opening import check_data, open_stream
from pretraining.data.stream import Rows, Stream
from pretraining.models.init import VOCABULARIES, on_meta
from pretraining.monitor.account import Account
from pretraining.monitor.metrics import FILE_NAME as METRICS_FILE
from pretraining.monitor.metrics import Metrics, check_metrics, missing_history, open_metrics
from pretraining.parallel.engine import Engine

CONFIG_FILE = "config.json"


def check_inputs(config: TrainConfig, own: Mapping[str, Rows]) -> tuple[Facts | None, dict[str, list[Dataset]]]:
    """Return the facts of the checkpoint that the run continues from, and its datasets by split, before any device is
    opened.

    Raises UserError if a checkpoint or the data would stop the run.
    """
    facts = check_starting_point(config, config.run_folder, parameter_shapes(config))
    if facts and facts.step:
        check_metrics(config.run_folder / METRICS_FILE)
    return facts, check_data(config, own)


def parameter_shapes(config: TrainConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter as a checkpoint has it, without padded rows of the vocabulary."""
    rows = model_shape(config).vocab_size
    return {
        name: (rows, *weight.shape[1:]) if name.split(".")[-2] in VOCABULARIES else tuple(weight.shape)
        for name, weight in on_meta(config).named_parameters()
    }


def open_streams(
    engine: Engine, checkpoint: Facts | None, own: Mapping[str, Rows], datasets: Mapping[str, list[Dataset]]
) -> tuple[TrainConfig, dict[str, Stream]]:
    """Return the final configuration and a stream of every split; that of training follows `checkpoint`.

    The configuration is the engine's, with num_steps lowered to the steps that num_epochs allows. datasets: those of
    `check_inputs`, which are not opened again.
    """
    config = engine.config
    step, state = (checkpoint.step, checkpoint.data) if checkpoint else (0, None)

    def opened(split: str, state: dict[str, Any] | None = None) -> Stream:
        ranks = (engine.data_rank, engine.data_size)
        return open_stream(config, *ranks, split, state, own.get(split), datasets.get(split))

    train = opened("train", state)
    if train.steps is not None and step + train.steps < config.num_steps:
        config = replace(config, num_steps=step + train.steps)
        train = opened("train", state)
    return config, {"train": train, **{split: opened(split) for split in config.held_out_splits()}}


def stream_after(
    resumed: Facts | None,
    expected: Facts | None,
    config: TrainConfig,
    engine: Engine,
    stream: Stream,
    own: Mapping[str, Rows],
) -> Stream:
    """Return the training data that follow the checkpoint `resumed`: `stream`, which follows the `expected` one, or
    another one if the newest checkpoint is damaged or not on every host.

    Raises UserError if they end before num_steps, which was derived from the expected one.
    """
    step, state = (resumed.step, resumed.data) if resumed else (0, None)
    if step == (expected.step if expected else 0):
        return stream
    ranks, datasets = (engine.data_rank, engine.data_size), stream.facts.get("opened")
    stream = open_stream(config, *ranks, state=state, own=own.get("train"), datasets=datasets)
    if stream.steps is not None and step + stream.steps < config.num_steps:
        allowed = f"num_epochs={config.num_epochs} allows {stream.steps} steps instead of {config.num_steps - step}"
        remedy = "run the same command again"
        raise UserError(f"the newest checkpoint is damaged, and from step {step} on {allowed}; {remedy}")
    return stream


def open_run_folder(config: TrainConfig, resumed: Facts | None, account: Account) -> Metrics:
    """Write the effective configuration and open the metrics, cut back to the checkpoint. Raises UserError."""
    folder, start_step = config.run_folder, resumed.step if resumed else 0
    if start_step and (lost := missing_history(folder / METRICS_FILE, start_step, config.report_interval)):
        print(f"note: {lost}", flush=True)
    with writing_to("log_dir", folder):
        metrics = open_metrics(folder, start_step, account.began if start_step < config.num_steps else None)
        fresh = folder / f".{CONFIG_FILE}.new"  # readers and a kill find the file of the start before, or this one
        fresh.write_text(json.dumps(asdict(config), indent=2) + "\n")
        fresh.replace(folder / CONFIG_FILE)
    return metrics
