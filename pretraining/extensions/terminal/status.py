"""A line below everything else that says where the run is between two reports."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO, cast

from pretraining.config.extension import Watcher
from pretraining.extensions.terminal.lines import DIM, coloured, terminal_width
from pretraining.monitor.figures import duration, format_number
from pretraining.monitor.progress import position
from pretraining.run.reports import begins_rows
from pretraining.run.training_run import TrainingRun

PAUSE = 0.2  # s between two states of the line


def can_erase() -> bool:
    """Return whether the output is a terminal that can erase a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Status(Watcher):
    """Shows the step, the last loss and the remaining time. Whatever is printed erases it first."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._shown_at = run, 0.0
        self._last: Mapping[str, Any] = {}  # report of a step
        self._line = LastLine() if run.leads and can_erase() else None

    def record(self, record: Mapping[str, Any]) -> None:
        """Keep the report of a step."""
        self._last = record if "step_time" in record else self._last

    def after_step(self, step: int) -> None:
        """Show the state after a step that has no report."""
        is_due = time.monotonic() - self._shown_at >= PAUSE
        if self._line and is_due and not self._run.config.reports_at(step):
            self._shown_at = time.monotonic()
            self._line.show(self._state(step))

    def _state(self, step: int) -> str:
        run, last = self._run, self._last
        parts = [position(step, run.config.num_steps)]
        if last:
            parts.append(f"loss {format_number(last['loss'], 6, 4)} at step {last['step']}")
        if last and not begins_rows(run, last["step"]):
            left = run.tokens_seen(run.config.num_steps) - run.tokens_seen(step)
            parts.append(f"{last['step_time']:.3g} s/step  ETA {duration(left / last['tokens_per_second'])}")
        return "  ".join(parts)

    def close(self) -> None:
        """Erase the line, for ever."""
        if self._line:
            self._line.close()


class LastLine:
    """The last line of the terminal, which can be written again. Until `close`, it stands in for sys.stdout and, where
    that is a terminal too, sys.stderr."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler prints, perhaps while this thread does
        self._terminal, self._streams = sys.stdout, (sys.stdout, sys.stderr)
        self._is_shown, self._at_start = False, True  # of a line
        sys.stdout = self._above(sys.stdout)
        if sys.stderr.isatty():
            sys.stderr = self._above(sys.stderr)

    def _above(self, stream: TextIO) -> TextIO:
        return cast(TextIO, StreamAbove(self, stream))

    def show(self, text: str) -> None:
        """Replace the line, unless a line that something else prints is not complete."""
        with self._lock:
            if self._at_start:
                self._write(f"\r\x1b[K{coloured(text[: terminal_width() - 1], DIM)}")
                self._is_shown = True

    def write_above(self, stream: TextIO, text: str) -> int:
        """Erase the line, and write to one of the streams in its place."""
        with self._lock:
            if self._is_shown:
                self._write("\r\x1b[K")
                self._is_shown = False
            self._at_start = text.endswith("\n") if text else self._at_start
            return stream.write(text)

    def close(self) -> None:
        """Erase the line, and give the streams back."""
        self.write_above(self._terminal, "")
        sys.stdout, sys.stderr = self._streams

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


class StreamAbove:
    """A stream whose text goes above the last line."""

    def __init__(self, last_line: LastLine, stream: TextIO) -> None:
        self._last_line, self._stream = last_line, stream

    def write(self, text: str) -> int:
        """Write a part of the text."""
        return self._last_line.write_above(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        """Return everything else of the stream."""
        return getattr(self._stream, name)
