"""Validations of metrics.jsonl by step, and the order of their steps. Pure, except for the read of the file.

The file is the only record of a value: a resumed run cuts it back to the step that it continues from, so a step has the
value of the weights that its checkpoint holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from pretraining.monitor.metrics import FILE_NAME

_MARK = b'"val_loss"'  # of the lines of validations; the others, which are many more, are not parsed


def validation_values(run_folder: Path, metric: str) -> dict[int, float]:
    """Return `metric` by the step of each validation in metrics.jsonl; infinity where it is not finite or not there.

    Raises OSError if the file cannot be read; there are no values if there is none.
    """
    path = run_folder / FILE_NAME
    if not path.exists():
        return {}
    with path.open("rb") as lines:  # an incomplete last line is still being written
        try:
            records = [json.loads(line) for line in lines if _MARK in line and line.endswith(b"\n")]
        except ValueError as error:
            raise OSError(f"{path}: a line is not a record") from error
    return {record["step"]: math.inf if (value := record.get(metric)) is None else value for record in records}


def best_steps(steps: Iterable[int], values: Mapping[int, float]) -> list[int]:
    """Return the steps that have a value, the best first: the lowest value, and of equal ones the newest step."""
    return sorted((step for step in steps if step in values), key=lambda step: (values[step], -step))
