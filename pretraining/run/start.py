"""What a run checks, prints and writes before the first step. Composes the rooms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from pretraining.checkpoint.files import writing_to
from pretraining.checkpoint.manifest import Facts
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.config.declaration import settings_of
from pretraining.config.errors import UserError
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.stream import NO_ROWS, Rows, Stream, check_data, open_stream
from pretraining.models.init import VOCABULARIES, on_meta
from pretraining.monitor.account import Account
from pretraining.monitor.facts import data_lines, describe, placed_line
from pretraining.monitor.metrics import FILE_NAME as METRICS_FILE
from pretraining.monitor.metrics import Metrics, missing_history, open_metrics, read_metrics
from pretraining.optim.precision import describe_dtypes
from pretraining.optim.schedule import learning_rate, milestone_steps
from pretraining.parallel.engine import Engine, Trainee
from pretraining.parallel.mesh import notes
from pretraining.parallel.recompute import model_mask
from pretraining.parallel.state_bytes import state_bytes, unsharded_state_bytes

CONFIG_FILE = "config.json"
# Settings that do nothing while the first is 0, False or empty
SWITCHES = {
    "val_interval": ("valid_data_path", "valid_datasets", "valid_weights", "val_steps"),
    "test_steps": ("test_data_path",),
}


def check_inputs(config: TrainConfig, own: Mapping[str, Rows] = NO_ROWS) -> tuple[Facts | None, dict[str, str]]:
    """Return the facts of the checkpoint that the run continues from, and the fingerprints of its data, before any
    device is opened.

    Raises UserError if a checkpoint or the data would stop the run.
    """
    facts = check_starting_point(config, config.run_folder, parameter_shapes(config))
    if facts and facts.step:
        read_metrics(config.run_folder / METRICS_FILE)
    return facts, check_data(config, own)


def parameter_shapes(config: TrainConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter as a checkpoint has it, without padded rows of the vocabulary."""
    rows = model_shape(config).vocab_size
    return {
        name: (rows, *weight.shape[1:]) if name.split(".")[-2] in VOCABULARIES else tuple(weight.shape)
        for name, weight in on_meta(config).named_parameters()
    }


def open_streams(
    engine: Engine, checkpoint: Facts | None, own: Mapping[str, Rows] = NO_ROWS
) -> tuple[TrainConfig, dict[str, Stream]]:
    """Return the final configuration and a stream of every split; that of training follows `checkpoint`.

    The configuration is the engine's, with num_steps lowered to the steps that num_epochs allows.
    """
    config, state = engine.config, checkpoint.data if checkpoint else None
    ranks = (engine.data_rank, engine.data_size)
    train = open_stream(config, *ranks, state=state, own=own.get("train"))
    last_step = None if train.steps is None else (checkpoint.step if checkpoint else 0) + train.steps
    if last_step is not None and last_step < config.num_steps:
        config = replace(config, num_steps=last_step)
        train = open_stream(config, *ranks, state=state)
    splits = config.held_out_splits()
    held_out = {split: open_stream(config, *ranks, split, own=own.get(split)) for split in splits}
    return config, {"train": train, **held_out}


def stream_after(
    resumed: Facts | None,
    expected: Facts | None,
    config: TrainConfig,
    engine: Engine,
    stream: Stream,
    own: Mapping[str, Rows] = NO_ROWS,
) -> Stream:
    """Return the training data that follow the checkpoint `resumed`: `stream`, which follows the `expected` one, or
    another one if the newest checkpoint is damaged or not on every host.

    Raises UserError if they end before num_steps, which was derived from the expected one.
    """
    step, state = (resumed.step, resumed.data) if resumed else (0, None)
    if step == (expected.step if expected else 0):
        return stream
    stream = open_stream(config, engine.data_rank, engine.data_size, state=state, own=own.get("train"))
    if stream.steps is not None and step + stream.steps < config.num_steps:
        raise UserError(
            f"the newest checkpoint is damaged, and from step {step} on num_epochs={config.num_epochs} allows "
            f"{stream.steps} steps instead of {config.num_steps - step}; run the same command again"
        )
    return stream


def check_engine(config: TrainConfig, engine: Engine, extensions: Sequence[Extension]) -> None:
    """Raise UserError if this host or the others cannot run the model, where an extension finds that out."""
    for extension in extensions:
        if extension.check_engine:
            extension.check_engine(config, engine)


def describe_run(config: TrainConfig, engine: Engine, extensions: Sequence[Extension] = ()) -> str:
    """Return the facts that follow from the configuration and the engine's devices, as lines of text."""
    facts = describe(
        config,
        mesh=engine.mesh._asdict(),
        per_device=state_bytes(config, engine.layout),
        device_name=engine.device_name,
        recompute=model_mask(config),
        dtypes=describe_dtypes(config),
        attention=engine.attention,
        rates={step: learning_rate(config, step) for step in milestone_steps(config)},
    )
    lines = notes(config, model_shape(config), engine.mesh, engine.name, engine.linked)
    return "\n".join([facts, *lines, *settings_without_effect(config, extensions)])


def settings_without_effect(config: TrainConfig, extensions: Sequence[Extension] = ()) -> list[str]:
    """Return a line for each setting that has a value of its own and does nothing."""
    switches = [item for table in (SWITCHES, *(each.switches for each in extensions)) for item in table.items()]
    reasons = {name: f"without {switch}" for switch, names in switches if not getattr(config, switch) for name in names}
    if config.use_dummy_dataset:
        reasons |= dict.fromkeys(("data_path", "num_epochs"), "with use_dummy_dataset")
    changed = (name for name in reasons if getattr(config, name) != settings_of(type(config))[name].default)
    return [f"{name}: no effect {reasons[name]}" for name in changed]


def print_run(
    config: TrainConfig, engine: Engine, streams: Mapping[str, Stream], extensions: Sequence[Extension] = ()
) -> None:
    """Print what follows from the configuration, the devices and the data, in process 0."""
    if engine.process_index == 0:
        data = data_lines(streams["train"].facts())
        print(config.printed(f"{describe_run(config, engine, extensions)}\n{data}"), flush=True)


def print_placement(config: TrainConfig, engine: Engine, trainee: Trainee) -> None:
    """Print the bytes that were measured on one device, and their share of one copy, in process 0."""
    measured = trainee.bytes_per_device()
    if engine.process_index == 0:
        print(config.printed(placed_line(measured, unsharded_state_bytes(config))), flush=True)


def open_run_folder(config: TrainConfig, resumed: Facts | None, account: Account) -> Metrics:
    """Write the effective configuration and open the metrics, cut back to the checkpoint. Raises UserError."""
    folder, start_step = config.run_folder, resumed.step if resumed else 0
    if start_step and (lost := missing_history(folder / METRICS_FILE, start_step, config.report_interval)):
        print(f"note: {lost}", flush=True)
    with writing_to("log_dir", folder):
        metrics = open_metrics(folder, start_step, account.began if start_step < config.num_steps else None)
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(config), indent=2) + "\n")
    return metrics
