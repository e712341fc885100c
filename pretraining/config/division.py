"""Which layers of the model a device has: all of them, unless an extension divides them into stages.

Layouts, meshes and engines ask `TrainConfig.division`; an extension overrides that property, and gives a subclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.variants import model_shape

if TYPE_CHECKING:
    from collections.abc import Collection

    from pretraining.config.training import TrainConfig


class Division:
    """The undivided layers of a model."""

    setting = ""  # that says how many stages there are
    stages = 1  # groups of devices that have different layers

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def pieces(self) -> list[range]:
        """Return the consecutive layers that run together. Activation checkpointing chooses alike in each of them."""
        return [range(model_shape(self.config).num_layers)]

    @property
    def longest(self) -> int:
        """Layers of the longest piece; 0 where there are more pieces than layers."""
        return max(map(len, self.pieces()))

    @property
    def longest_text(self) -> str:
        """`longest`, as messages name it."""
        return f"num_layers={self.longest}"

    def stack(self) -> list[int | None]:
        """Return the layer at each position of a stack of all layers; None: padding."""
        return [layer for piece in self.pieces() for layer in piece]

    def shares(self, stages: int, *, is_stacked: bool) -> list[tuple[int, Collection[str] | None]]:
        """Return by stage the number of its layers, and its modules outside the blocks. None: all modules.

        stages: of the mesh. is_stacked: whether the layers are stacked, which makes all stages alike.
        """
        return [(model_shape(self.config).num_layers, None)]

    def notes(self, engine: str) -> list[str]:
        """Return lines for the start of a run."""
        return []
