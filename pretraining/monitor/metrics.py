"""metrics.jsonl: one JSON object per line and report, flushed at once.

A kill loses at most the line being written. Does not depend on torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.config.script import is_restarted
from pretraining.monitor.account import carried, is_account

Record = Mapping[str, Any]  # "step" (1-based, after the update) and what is reported of it
FILE_NAME = "metrics.jsonl"
BEAT = 1.0  # s between signs of life
# Most records: numbers far below every limit, and an account. To match one takes 1.4 us, to parse it 7.
_FRACTION = r"(?:\.\d{1,20}+)?+(?:e-\d\d)?+"
_FIGURE = rf'"(?!step"|account|consumed|data_hash)[\w/.-]++": (?:null|true|false|-?(?:0|[1-9]\d{{0,17}}+){_FRACTION})'
_SECONDS = rf'"[a-z_]++": (?:0|[1-9]\d{{0,9}}+){_FRACTION}'
_ACCOUNT = rf'"account": {{(?:{_SECONDS}, )*+(?="time"){_SECONDS}}}'
PLAIN = re.compile(rf'{{"step": [1-9]\d{{0,8}}+(?:, (?:{_FIGURE}|{_ACCOUNT}))*+}}'.encode())


class Metrics:
    """The open metrics.jsonl of process 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._beat_at = 0.0

    def beat(self) -> None:
        """Set the file's time to now, at most once a second: after a kill it tells how long the process ran."""
        now = time.time()
        if abs(now - self._beat_at) >= BEAT:
            self._beat_at = now
            with suppress(OSError):  # some file systems set no times; the time since the last record is idle then
                os.utime(self._file.fileno(), (now, now))

    def write(self, record: Record) -> dict[str, Any]:
        """Append one line and return it; a number that is not finite becomes null. Raises UserError."""
        clean = {name: None if _infinite(value) else value for name, value in record.items()}
        with self.named():
            self._file.write(json.dumps(clean, allow_nan=False) + "\n")
            self._file.flush()
        return clean

    def records(self) -> list[dict[str, Any]]:
        """Return all records of the file, oldest first."""
        return read_metrics(self._path)

    def close(self) -> None:
        """Close the file. Raises UserError."""
        with self.named():
            self._file.close()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Raise UserError with the name of the file where an error of the system has none."""
        try:
            yield
        except OSError as error:
            name = os.fsdecode(error.filename or self._path)
            remedy = "make room or change its permissions, and run the same command again"
            raise UserError(f"{name}: cannot be written ({error.strerror}); {remedy}") from error


def open_metrics(log_dir: Path, step: int, began: float | None = None) -> Metrics:
    """Open the metrics of a run that continues after `step` updates; 0 starts a new file.

    began: second of the epoch from which this start has an account of time; None: it has none.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    cut_back(log_dir / FILE_NAME, step, began)
    return Metrics(log_dir / FILE_NAME)


def refuse_unusable(path: Path) -> None:
    """Raise UserError if `path` exists and is not a file that this process can read and write."""
    if not os.path.lexists(path):
        return
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise UserError(f"{path}: is {kind}, where this run writes a file; move it away")
    if not os.access(path, os.R_OK | os.W_OK):
        remedy = "change its permissions (chattr -i if it is immutable), or move it away"
        raise UserError(f"{path}: cannot be read and written; {remedy}")


def missing_history(path: Path, step: int, interval: int) -> str | None:
    """Return what is missing of the reports before `step`, which come every `interval` steps; None: nothing."""
    last = next((record["step"] for record in latest_records(path) if record["step"] <= step), 0)
    if last >= max(1, step // interval * interval):
        return None
    defect = f"ends at step {last}" if last else "has no reports" if path.exists() else "is missing"
    remaining = f"the lines up to step {last} are kept" if last else "nothing of it is kept"
    return f"{path} {defect}, but the run continues from step {step}: the reports in between are lost; {remaining}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a metrics file; an incomplete last line is left out.

    Raises UserError on any other line that is not a record: the file was changed by something else.
    """
    return [_parse(path, number, line) for number, line in enumerate(_lines(path), 1)]


def latest_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records that `read_metrics` returns, from the last one; each is read when it is asked for."""
    lines = _lines(path)
    return (_parse(path, number, lines[number - 1]) for number in range(len(lines), 0, -1))


def check_metrics(path: Path) -> None:
    """Raise UserError as `read_metrics` does, but keep no record: a quarter of the time for a million lines."""
    for number, line in enumerate(_lines(path), 1):
        if not PLAIN.fullmatch(line):
            _parse(path, number, line)


def _lines(path: Path) -> list[bytes]:
    refuse_unusable(path)
    text = path.read_bytes() if path.exists() else b""
    return text.split(b"\n")[:-1]  # what follows the last newline is incomplete


def cut_back(path: Path, step: int, began: float | None = None) -> None:
    """Drop the lines after `step`, and an incomplete last one, so that a resumed run writes each step once.

    The account of the dropped lines, and of the time until `began`, becomes a line of its own. Atomic: after a kill at
    any instant the file is the old one or the new one. Step 0 drops every line; only where scripts/train.sh has started
    the run again is there an account of them. Reads no further back than `step`; `check_metrics` has read every line.
    """
    if not path.exists():
        return
    remaining_lines: list[bytes] = []
    if step:
        later = sum(1 for _ in takewhile(lambda record: record["step"] > step, latest_records(path)))
        remaining_lines = (lines := _lines(path))[: len(lines) - later]
    records = latest_records(path) if step or is_restarted() else ()
    if began is not None and (account := carried(records, step, path.stat().st_mtime, began)):
        remaining_lines.append(json.dumps({"step": step, "account": account}).encode())
    fresh = path.with_name(f".{path.name}.cut")
    with fresh.open("wb") as file:
        file.writelines(line + b"\n" for line in remaining_lines)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not all(map(_fits, record.items())):
        remedy = "nothing was changed; move the file away to start a new one"
        raise UserError(f"{path}: line {number} is not a record of this trainer; {remedy}")
    return record


def _fits(field: tuple[str, Any]) -> bool:
    """Return whether a value of a record has the type that is written under its name."""
    name, value = field
    if name == "account":
        return is_account(value)
    if name == "consumed":
        return isinstance(value, dict) and all(map(_is_number, value.values()))
    return isinstance(value, str) if name == "data_hash" else value is None or _is_number(value)


def _is_number(value: object) -> bool:
    """Return whether a value is a number that is no larger than a float can be."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
