"""Starting scripts in one process or several."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALONE = 0  # without torchrun; 1 is a process group of one, which is how a single GPU trains


def launched(processes: int, *arguments: str) -> list[str]:
    """The command that runs a script with this many processes."""
    if processes == ALONE:
        return [sys.executable, *arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *torchrun, *arguments]


def environment(**more: str) -> dict[str, str]:
    """Of a process started here: one thread each, so that four of them do not fight for two cores."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
