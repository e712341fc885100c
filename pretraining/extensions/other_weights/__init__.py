"""Runs that start from other weights, of another run or in Hugging Face's format; and the weights below adapters."""

from __future__ import annotations

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


EXTENSION = Extension(configuration=OtherWeightsConfig)
