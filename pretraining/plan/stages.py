"""One stage of a pipeline: which parameters it holds, and how many micro-batches are in flight in it.

No engine trains with stages yet; the plan shows what they would need, with the one-forward-one-backward schedule
(Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape


class Stage(NamedTuple):
    """A stage by its number from 0; without a pipeline the only stage is the whole model."""

    number: int = 0
    of: int = 1
    pieces: int = 1  # groups of consecutive layers that it holds (virtual_pipeline_size)

    @property
    def last(self) -> bool:
        """Whether head and loss are in this stage."""
        return self.number == self.of - 1

    def holds(self, name: str, tied: bool) -> bool:
        """Return whether a parameter is in this stage, whose configuration has its own layers alone."""
        if ".layers." in name:
            return True
        if ".embed_" in name:
            return self.number == 0 or (tied and self.last)
        return self.last

    def micro_batches_in_flight(self, micro_batches: int) -> float:
        """Return how many micro-batches' activations the stage keeps at once; interleaving keeps more."""
        more = (self.of - 1) / (self.of * self.pieces) if self.pieces > 1 else 0
        return min(self.of - self.number, micro_batches) * (1 + more)


WHOLE = Stage()


def stages(config: TrainConfig) -> Iterator[Stage]:
    """Yield the first and the last stage: no other holds more."""
    count, pieces = config.pipeline_parallel_size, config.virtual_pipeline_size
    yield from (Stage(number, count, pieces) for number in sorted({0, count - 1}))


def stage_config(config: TrainConfig) -> TrainConfig:
    """Return `config` with the layers of one stage."""
    if config.pipeline_parallel_size == 1:
        return config
    return replace(config, num_layers=model_shape(config).num_layers // config.pipeline_parallel_size)


def idle_share(config: TrainConfig) -> float:
    """Return a stage's idle time as a share of the time it works: (p - 1) / (pieces x micro-batches)."""
    micro_batches = config.gradient_accumulation_steps or 1
    return (config.pipeline_parallel_size - 1) / (config.virtual_pipeline_size * micro_batches)
