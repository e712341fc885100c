"""Two processes of one program, with torchrun's variables and without torchrun, which hides exit codes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.ports import free_port
from tests.waiting import PATIENCE
from tests.warm import python

HERE = Path(__file__).parent


def processes(*command: str | Path, **environment: str) -> list[tuple[int, list[str]]]:
    """Exit status and output lines of `python COMMAND` as rank 0 and as rank 1."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common["PYTHONPATH"] = str(HERE.parents[1])
    started = [
        subprocess.Popen(
            [*python(), *map(str, command)],
            env={**os.environ, **common, **environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in started]
    return [(process.returncode, text.splitlines()) for process, text in zip(started, outputs, strict=True)]
