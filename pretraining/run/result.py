"""What `pretraining.train` returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from pretraining.config.training import TrainConfig


class TrainingResult(NamedTuple):
    """What a run did."""

    config: TrainConfig  # as it was resolved
    code: int  # exit code of the script: 0 if the run is complete
    records: list[dict[str, Any]]  # of metrics.jsonl, in order; empty except in process 0

    @property
    def losses(self) -> dict[int, float]:
        """The training loss of every reported step."""
        return {record["step"]: record["loss"] for record in self.records if "loss" in record}
