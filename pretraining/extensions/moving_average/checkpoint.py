"""The moving averages in a checkpoint, for the tools."""

from __future__ import annotations

from dataclasses import replace

from pretraining.checkpoint.manifest import Checkpoint
from pretraining.config.errors import UserError
from pretraining.extensions.moving_average.settings import MOMENT
from pretraining.parallel.engine import OPTIMIZER


def with_moving_averages(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with the moving averages of ema_decay in place of the trained weights.

    Raises UserError if it has none.
    """
    tensors = checkpoint.manifest.tensors
    averages = {name: tensors[moment] for name in tensors if (moment := f"{OPTIMIZER}{MOMENT}.{name}") in tensors}
    if not averages:
        raise UserError(f"{checkpoint.path}: has no moving averages of weights; the run needs --ema_decay")
    return replace(checkpoint, manifest=replace(checkpoint.manifest, tensors={**tensors, **averages}))
