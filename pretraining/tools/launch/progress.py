"""The newest step of the processes of a host, which they write for the launcher. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pretraining.config.extension import Watcher

DIGITS = 20  # of the step at the beginning of PROGRESS_FILE


class Progress(Watcher):
    """Writes the newest step: the launcher starts no run again that makes no steps."""

    def __init__(self, run_folder: Path) -> None:
        path = os.environ.get("PROGRESS_FILE")
        writes = path and os.environ.get("LOCAL_RANK", "0") == "0"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT) if path and writes else None
        if self._file is not None:
            os.pwrite(self._file, os.fsencode(str(run_folder)), DIGITS)

    def after_step(self, step: int) -> None:
        """Write the step; a few microseconds."""
        if self._file is not None:
            os.pwrite(self._file, b"%0*d" % (DIGITS, step), 0)


class LastProgress(NamedTuple):
    """What the processes of a run have written."""

    step: int  # the newest; 0: none
    run_folder: str  # empty: they have not come so far


def read_progress(file: Path) -> LastProgress:
    """Return what Progress has written."""
    content = file.read_bytes()
    return LastProgress(int(content[:DIGITS].strip(b"\0") or 0), os.fsdecode(content[DIGITS:]))
