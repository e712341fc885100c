"""metrics.jsonl, and the sinks that get its records.

One JSON object per line and report, flushed at once, so a kill loses at most the line being written. The file is the
source of truth: TensorBoard and Weights & Biases get what was written here first. Does not depend on torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.monitor.sinks import Record, Sink, open_sinks

FILE_NAME = "metrics.jsonl"


class Metrics:
    """The open metrics.jsonl of process 0, and the sinks that get the same records."""

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._sinks = sinks

    def write(self, record: Record) -> None:
        """Append one line. A number that is not finite becomes null: JSON has no NaN."""
        clean = {name: None if _infinite(value) else value for name, value in record.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(clean)

    def losses(self) -> list[float]:
        """Return the finite training losses in the file, oldest first."""
        return [line["loss"] for line in read_metrics(self._path) if line.get("loss") is not None]

    def close(self) -> None:
        """Close the file, and the sinks after they have sent their records."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


def open_metrics(config: TrainConfig, log_dir: Path, step: int) -> Metrics:
    """Open the metrics of a run that continues after `step` updates; 0 starts a new file."""
    log_dir.mkdir(parents=True, exist_ok=True)
    cut_back(log_dir / FILE_NAME, step)
    return Metrics(log_dir / FILE_NAME, open_sinks(config, log_dir, step))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a metrics file; an incomplete last line is left out.

    Raises UserError on any other line that is not a record: the file was changed by something else.
    """
    text = path.read_bytes() if path.exists() else b""
    return [_parse(path, number, line) for number, line in enumerate(text.split(b"\n")[:-1], 1)]


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after `step`, and an incomplete last one, so that a resumed run writes each step once.

    Atomic: after a kill at any instant the file is the old one or the new one. Step 0 drops every line.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is incomplete
    kept = [line for number, line in enumerate(lines, 1) if step and _parse(path, number, line)["step"] <= step]
    fresh = path.with_name(f".{path.name}.cut")
    with fresh.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(_damaged(path, number)) from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise UserError(_damaged(path, number))
    return record


def _damaged(path: Path, number: int) -> str:
    return f"{path}: line {number} is not a record of this trainer; move the file away to start a new one"


def _infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
