"""Kills a small training run at chosen instants, lets the same command continue, and says as JSON what it found.

    python crash_driver.py FOLDER calls|instants [--field=value ...]

calls: before chosen calls that change the disk, in the last quarter of a run (two saves, two removals).
instants: after random delays. A process of its own because it forks: torch is imported once, and never runs threads.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.folder import find_checkpoints
from pretraining.checkpoint.store import read_tensors
from tests.checkpoint.small_run import small_config, train

DISK_CALLS = ("pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir")
INSTANTS = 20
WRITES_BETWEEN = 12  # writes of tensors are much alike: every twelfth of them, and every call that is no write


def count_disk_calls(before: Callable[[int, str], None]) -> None:
    """Call `before`(number, name) ahead of every call that changes the disk, in any thread."""
    number, lock = 0, threading.Lock()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            with lock:
                number += 1
                before(number, name)
            return call(*args, **kwargs)

        return wrapped

    for name in DISK_CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def forked(act: Callable[[], None]) -> int:
    """The process id of a child that runs `act` and exits 0, or 1 where it fails."""
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        act()
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def train_to_end(folder: Path, fields: dict[str, Any], log: Path) -> None:
    """Train, and append "step loss" to `log` in the float's exact form."""
    with log.open("a") as lines:
        train(small_config(folder, **fields), lambda step, loss: print(step, loss.hex(), file=lines, flush=True))


def read_log(log: Path) -> dict[int, str]:
    """The last loss of each step."""
    return {int(step): loss for step, loss in (line.split() for line in log.read_text().splitlines())}


def damaged(folder: Path) -> list[str]:
    """Committed checkpoints that cannot be read."""
    found = []
    for path in find_checkpoints(folder / "checkpoints").committed:
        try:
            read_tensors(path)
        except ValueError as error:
            found.append(str(error))
    return found


def killed_and_continued(
    folder: Path, fields: dict[str, Any], kill: Callable[[Callable[[], None]], int]
) -> dict[str, Any]:
    """Kill one run, inspect what it left, continue it to the end; what was seen."""
    log = folder.with_suffix(".log")
    status = kill(lambda: train_to_end(folder, fields, log))
    visible = [int(path.name.removeprefix("step_")) for path in find_checkpoints(folder / "checkpoints").committed]
    wrong = damaged(folder)
    done = len(log.read_text().splitlines()) if log.exists() else 0
    code = os.waitpid(forked(lambda: train_to_end(folder, fields, log)), 0)[1]
    again = len(log.read_text().splitlines()) - done
    seen = {
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "visible": visible,
        "damaged": wrong,
        "continued": code == 0,
        "steps_again": again,
        "losses": read_log(log),
        "left": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }
    shutil.rmtree(folder)
    return seen


def chosen_calls(folder: Path, fields: dict[str, Any]) -> list[tuple[int, str]]:
    """(number, name) of the calls to die before: those of a whole run's last quarter, writes thinned out."""
    trace = folder.with_suffix(".calls")

    def traced() -> None:
        with trace.open("w") as lines:
            count_disk_calls(lambda number, name: print(number, name, file=lines, flush=True))
            train(small_config(folder, **fields), lambda step, loss: None)

    os.waitpid(forked(traced), 0)
    calls = [(int(number), name) for number, name in (line.split() for line in trace.read_text().splitlines())]
    late = calls[3 * len(calls) // 4 :]
    return [call for i, call in enumerate(late) if call[1] != "pwrite" or i % WRITES_BETWEEN == 0]


def killed_at_calls(root: Path, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """One case per chosen call."""
    cases = []
    for number, name in chosen_calls(root / "trace", fields):

        def kill(run: Callable[[], None], number: int = number) -> int:
            def dying() -> None:
                count_disk_calls(lambda n, _: os.kill(os.getpid(), signal.SIGKILL) if n == number else None)
                run()

            return os.waitpid(forked(dying), 0)[1]

        cases.append({"point": [number, name], **killed_and_continued(root / f"call_{number}", fields, kill)})
    return cases


def killed_at_instants(root: Path, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """One case per random delay, within the time that a whole run takes."""
    began = time.monotonic()
    os.waitpid(forked(lambda: train_to_end(root / "timing", fields, root / "timing.log")), 0)
    whole, chance, cases = time.monotonic() - began, random.Random(0), []
    for number in range(INSTANTS):

        def kill(run: Callable[[], None]) -> int:
            child = forked(run)
            time.sleep(chance.uniform(0.05, 0.95) * whole)
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]

        cases.append({"point": [number, "instant"], **killed_and_continued(root / f"instant_{number}", fields, kill)})
    return cases


def main() -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    root, kind = Path(sys.argv[1]), sys.argv[2]
    fields = {name.removeprefix("--"): json.loads(value) for name, value in (a.split("=") for a in sys.argv[3:])}
    train_to_end(root / "reference", fields, root / "reference.log")
    cases = (killed_at_calls if kind == "calls" else killed_at_instants)(root, fields)
    print(json.dumps({"reference": read_log(root / "reference.log"), "cases": cases}), flush=True)


if __name__ == "__main__":
    main()
