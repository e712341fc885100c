"""One group of a pipeline's devices: what it holds of the model, and how much waits in it. No engine trains with one
yet; the plan knows what it would come to, with the one-forward-one-backward schedule (Narayanan et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape


class Stage(NamedTuple):
    """By its number from 0; the only one is the whole model."""

    number: int = 0
    of: int = 1
    pieces: int = 1  # of layers that it holds (virtual_pipeline_size)

    @property
    def last(self) -> bool:
        """Whether head and loss are here."""
        return self.number == self.of - 1

    def holds(self, name: str, tied: bool) -> bool:
        """Whether a parameter is here; blocks are, for a stage's configuration has its own alone."""
        if ".layers." in name:
            return True
        if ".embed_" in name:
            return self.number == 0 or (tied and self.last)
        return self.last

    def waiting(self, passes: int) -> float:
        """Micro-batches whose activations a stage keeps at once; interleaved pieces keep some more."""
        more = (self.of - 1) / (self.of * self.pieces) if self.pieces > 1 else 0
        return min(self.of - self.number, passes) * (1 + more)


WHOLE = Stage()


def stages(config: TrainConfig) -> Iterator[Stage]:
    """The first and the last stage: no other holds more."""
    count, pieces = config.pipeline_parallel_size, config.virtual_pipeline_size
    yield from (Stage(number, count, pieces) for number in sorted({0, count - 1}))


def staged(config: TrainConfig) -> TrainConfig:
    """`config` with the layers of one stage alone."""
    if config.pipeline_parallel_size == 1:
        return config
    return replace(config, num_layers=model_shape(config).num_layers // config.pipeline_parallel_size)


def idle(config: TrainConfig) -> float:
    """Time that a stage waits for others, as a share of the time it works: (p - 1) / (pieces x passes)."""
    passes = config.gradient_accumulation_steps or 1
    return (config.pipeline_parallel_size - 1) / (config.virtual_pipeline_size * passes)
