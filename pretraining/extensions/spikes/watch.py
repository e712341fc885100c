"""loss_spike of a report. After a restart the earlier losses are read from metrics.jsonl."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pretraining.config.extension import Watcher
from pretraining.extensions.spikes.detection import WINDOW, is_spike
from pretraining.monitor.metrics import FILE_NAME, latest_records
from pretraining.run.training_run import TrainingRun


class Spikes(Watcher):
    """Compares the loss of a report with those of the last reports."""

    def __init__(self, run: TrainingRun) -> None:
        earlier = recent_losses(run.config.run_folder / FILE_NAME, WINDOW) if run.metrics else []
        self._losses = deque(earlier, maxlen=WINDOW)

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """See Watcher."""
        spike = is_spike(record["loss"], self._losses)
        if math.isfinite(record["loss"]):  # of an update that was skipped it may not be
            self._losses.append(record["loss"])
        return {"loss_spike": spike}


def recent_losses(path: Path, count: int) -> list[float]:
    """Return the last `count` finite training losses in metrics.jsonl, oldest first."""
    losses = (record["loss"] for record in latest_records(path) if record.get("loss") is not None)
    return [*islice(losses, count)][::-1]
