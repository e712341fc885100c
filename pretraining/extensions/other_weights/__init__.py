"""Runs that start from other weights, of another run or in Hugging Face's format; and the weights below adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import Needs, Resume
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class OtherWeightsConfig(TrainConfig):
    """A configuration whose run may start from ckpt_load_path."""

    # ---- Checkpoints
    load_weights_only: Annotated[bool, Needs("ckpt_load_path"), Resume.FREE] = False
    """Load only the weights from ckpt_load_path and start with a new optimizer state."""
    load_step: Annotated[bool, Needs("ckpt_load_path"), Resume.FREE] = False
    """Continue from the checkpoint in ckpt_load_path as if it were this run's own: at its step, with its optimizer
    state, and with the data that follow it. Settings that a run cannot change are then refused. One at step 0, such as
    converted or Hugging Face's weights, is loaded as without this; so is any with load_weights_only. False: start at
    step 0. Elsewhere: resuming_dataset."""
    strict_load: Annotated[bool, Resume.FREE] = True
    """True: the tensors in ckpt_load_path must be exactly those of the model, and its norm_eps and rotary settings
    those of this run; adapters continue only on the weights that they were trained on. False: load the tensors that
    both have, and print the differences; dimensions, such as num_layers and vocab_size, must be the same even then."""

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
