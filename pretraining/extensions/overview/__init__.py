"""What follows from the configuration, the devices and the data, printed before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig

if TYPE_CHECKING:
    from pretraining.data.stream import Stream
    from pretraining.parallel.engine import Engine, Trainee


def print_run(
    config: TrainConfig, engine: Engine, streams: Mapping[str, Stream], extensions: Sequence[Extension]
) -> None:
    """Print what follows from the configuration, the devices and the data, in process 0."""
    from pretraining.extensions.overview.data import data_lines
    from pretraining.extensions.overview.lines import describe_run  # imports torch

    if engine.process_index == 0:
        data = data_lines(streams["train"].facts)
        print(config.printed(f"{describe_run(config, engine, extensions)}\n{data}"), flush=True)


def print_placement(config: TrainConfig, engine: Engine, trainee: Trainee) -> None:
    """Print the bytes that were measured on one device, and their share of one copy, in process 0."""
    from pretraining.extensions.overview.lines import placed_line  # imports torch
    from pretraining.extensions.state_bytes import unsharded_state_bytes

    measured = trainee.bytes_per_device()
    if engine.process_index == 0:
        print(config.printed(placed_line(measured, unsharded_state_bytes(config))), flush=True)


EXTENSION = Extension(opened=print_run, placed=print_placement)
