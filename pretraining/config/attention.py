"""What TrainConfig answers where the xla engine asks for its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class AttentionChoice(NamedTuple):
    """How the xla engine computes attention, and why."""

    reason: str
    name: str = "chunked"
    kernel: Callable[[Any, Any], Any] | None = None
    """Returns the ops.AttentionKernel of a mesh.Mesh, which torch-xla has as an xs.Mesh; None: models/chunked.py."""

    def __str__(self) -> str:
        return f"{self.name}, {self.reason}"
