"""Which engine runs a configuration."""

from __future__ import annotations

from pretraining.config.training import TrainConfig
from pretraining.parallel.engine import Engine


def open_engine(config: TrainConfig) -> Engine:
    """The engine that `config` asks for, its mesh open and the batch fields of `config` resolved."""
    from pretraining.parallel.xla import XlaEngine  # torch-xla is imported by the engine that needs it, and only then

    return XlaEngine(config)
