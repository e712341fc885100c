"""One line of starts.jsonl for each start of a run."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pretraining.config.extension import Watcher
from pretraining.config.variants import model_shape
from pretraining.data.stream import Stream
from pretraining.extensions.history import FILE_NAME
from pretraining.extensions.packages import installed_versions
from pretraining.run.training_run import TrainingRun

PACKAGES = ("torch", "torch_xla", "torch_tpu", "numpy")
SOURCE = Path(__file__).parents[3]


class History(Watcher):
    """Notes a start in process 0, before its first step."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def prepare(self) -> None:
        """Append a line, or begin a new file where the run starts at step 0; print which held-out data changed."""
        run = self._run
        if not run.metrics:
            return
        path, now = run.config.run_folder / FILE_NAME, start_of(run)
        with run.metrics.named():
            for note in held_out_changes(last_start(path), now) if run.start_step else ():
                run.print(note)
            end = "\n" if run.start_step and is_cut(path) else ""
            with path.open("a" if run.start_step else "w") as file:
                file.write(f"{end}{json.dumps(now)}\n")


def is_cut(path: Path) -> bool:
    """Return whether a kill or a full disk has cut the last line of a file."""
    return path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")


def start_of(run: TrainingRun) -> dict[str, Any]:
    """Return what is known of this start."""
    mesh = " x ".join(f"{axis} {count}" for axis, count in run.engine.mesh._asdict().items() if count > 1)
    return {
        "step": run.start_step,
        "time": time.time(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "commit": commit(),
        "versions": {"python": sys.version.split()[0], **installed_versions(PACKAGES)},
        "devices": f"{run.engine.mesh.size} x {run.engine.device_name}{mesh and ': '}{mesh}, {run.engine.name} engine",
        "parameters": model_shape(run.config).parameters,
        "held_out": {split: contents(stream) for split, stream in run.streams.items() if split != "train"},
    }


def contents(stream: Stream) -> list[str]:
    """Return a description of each dataset that is read from shards, which changes with its documents."""
    mixture = stream.state(0)["mixture"]
    return [
        f"{row['documents']:,} documents, {row['tokens']:,} tokens (content {mixture[row['name']]['fingerprint'][:8]})"
        for row in stream.facts["datasets"]
        if row["name"] in mixture
    ]


def last_start(path: Path) -> dict[str, Any]:
    """Return the newest start that the file holds; empty if there is none that can be read."""
    try:
        start = json.loads(path.read_text().splitlines()[-1])
    except (FileNotFoundError, IndexError, ValueError):
        return {}
    return start if isinstance(start, dict) else {}


def held_out_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each split that both starts evaluate, on other documents: its losses are not comparable."""
    for split in before.get("held_out", {}).keys() & now["held_out"].keys():
        old, new = before["held_out"][split], now["held_out"][split]
        if old != new:
            loss = "val_loss" if split == "valid" else "test_loss"
            changed = f"{' + '.join(old) or 'none'} at the last start, {' + '.join(new) or 'none'} now"
            yield f"note: the {split} data changed: {changed}; {loss} from here on does not continue the earlier one"


def commit() -> str:
    """Return the commit of this source, with "+" if files were changed; empty where it is not known."""
    command = ["git", "-C", str(SOURCE), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
