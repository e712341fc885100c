"""Runs that start from other weights, of another run or in Hugging Face's format; and the weights below adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class OtherWeightsConfig(TrainConfig):
    """A configuration whose run may start from ckpt_load_path."""

    def start(self, folder: Any) -> Any:
        """See TrainConfig."""
        if self.saves_frozen and not any(self.load_paths.values()):
            return None
        from pretraining.extensions.other_weights.start import OtherWeights  # imports torch

        return OtherWeights(self, folder)

    def check_trained(self, checkpoint: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless a checkpoint's weights are exactly those that this run trains, with their shapes."""

    def open_added(self) -> Any:
        """Return the checkpoint of weights that a new run loads after ckpt_load_path's; None: there is none."""
        return None


EXTENSION = Extension(configuration=OtherWeightsConfig)
