"""Processes of one program, with torchrun's variables and without torchrun, which hides exit codes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.waiting import PATIENCE
from tests.warm import python

ROOT = Path(__file__).parents[1]
Refusal = Callable[..., str]  # the fixture of this name in tests/conftest.py


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of these settings; one that is None has none."""
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def call(
    command: Sequence[str | Path],
    *,
    code: int | None = 0,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without input. It must end with this code; None: with any. A mistake, code 2, has no
    traceback."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    ended = f"ended with {done.returncode}, not {code}\n"  # negative: the signal; a program can die without a word
    assert code in (None, done.returncode), ended + done.stdout[-3000:] + done.stderr[-9000:]
    assert code != 2 or "Traceback" not in done.stderr, done.stderr[-9000:]
    return done


def start(
    command: Sequence[str | Path], *, folder: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command, and have what it prints to stdout and stderr as one text."""
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=env, **output)


def group(processes: int) -> list[dict[str, str]]:
    """Return torchrun's variables for each of these processes; none for one."""
    if processes == 1:
        return [{}]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    common["LOCAL_WORLD_SIZE"] = str(processes)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def run_together(
    *command: str | Path, processes: int = 2, cwd: Path | None = None, **environment: str
) -> list[tuple[int, list[str]]]:
    """Exit status and output lines of `python COMMAND` as each of the ranks."""
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    started = [
        subprocess.Popen(
            [*python(), *map(str, command)],
            cwd=cwd,
            env=inherited | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in group(processes)
    ]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in started]
    return [(process.returncode, text.splitlines()) for process, text in zip(started, outputs, strict=True)]
