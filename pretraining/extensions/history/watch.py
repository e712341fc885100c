"""One line of starts.jsonl for each start of a run."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretraining.config.extension import Watcher
from pretraining.config.variants import model_shape
from pretraining.extensions.history import FILE_NAME
from pretraining.run.training_run import TrainingRun

PACKAGES = ("torch", "torch_xla", "torch_tpu", "numpy")
SOURCE = Path(__file__).parents[3]


class History(Watcher):
    """Notes a start in process 0, before its first step."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def prepare(self) -> None:
        """Append a line, or begin a new file where the run starts at step 0."""
        run = self._run
        if not run.metrics:
            return
        with run.metrics.named(), (run.config.run_folder / FILE_NAME).open("a" if run.start_step else "w") as file:
            file.write(json.dumps(start_of(run)) + "\n")


def start_of(run: TrainingRun) -> dict[str, Any]:
    """Return what is known of this start."""
    mesh = " x ".join(f"{axis} {count}" for axis, count in run.engine.mesh._asdict().items() if count > 1)
    return {
        "step": run.start_step,
        "time": time.time(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "commit": commit(),
        "versions": {"python": sys.version.split()[0], **versions()},
        "devices": f"{run.engine.mesh.size} x {run.engine.device_name}{mesh and ': '}{mesh}, {run.engine.name} engine",
        "parameters": model_shape(run.config).parameters,
    }


def versions() -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of this source, with "+" if files were changed; empty where it is not known."""
    command = ["git", "-C", str(SOURCE), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
