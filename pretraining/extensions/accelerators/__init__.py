"""Devices that a package of their own registers with torch: TPUs (TorchTPU) and NeuronCores (TorchNeuron)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class AcceleratorsConfig(TrainConfig):
    """A configuration whose device may be one of table.py."""

    def accelerator(self, kind: str) -> Any:
        """See TrainConfig."""
        from pretraining.extensions.accelerators.table import ACCELERATORS

        return ACCELERATORS[kind] if kind in ACCELERATORS else super().accelerator(kind)


EXTENSION = Extension(configuration=AcceleratorsConfig)
