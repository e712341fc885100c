"""Runs scripts in forks of a process that has imported what they need: a start takes a quarter of a second, not ten.

Reads a job per line of JSON from stdin and answers with the exit codes of its processes and the seconds. A fork becomes
the script: it runs it as __main__ and ends as an interpreter does. Started by harness.Programs with disk.c preloaded.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = ("prepare.prepare", "generate", "report", "inspect_data", "convert.convert")
ROOMS = ("run.start", "run.loop", "parallel.torch.engine", *(f"tools.{name}" for name in TOOLS))
PACKAGES = ("fire", "pyarrow.parquet", "sentencepiece", "tokenizers", "torch._refs")
WITHIN = 60.0  # seconds that any outcome may take


def import_everything(engine: str) -> None:
    """Import what the scripts import. No device is opened: the threads of its client would not be in a fork."""
    for name in (*PACKAGES, *(f"pretraining.{room}" for room in ROOMS)):
        importlib.import_module(name)
    if engine == "xla":
        importlib.import_module("pretraining.parallel.xla.engine")
    gc.freeze()  # a collection in a fork would copy every page


def serve() -> dict[str, Any] | None:
    """Answer the jobs on stdin; returns a job in its forks, one per process, and None where there are no more."""
    for line in sys.stdin:
        job, children = json.loads(line), []
        began = time.monotonic()
        for variables in job["processes"]:
            children.append(os.fork())
            if not children[-1]:
                return {**job, "variables": job["variables"] | variables}
        codes = [ended(child, began + job["within"]) for child in children]
        print(json.dumps([codes, time.monotonic() - began]), flush=True)
    return None


def ended(child: int, deadline: float) -> int | None:
    """Wait for a process and return its exit code; None if it had not ended in time."""
    has_ended = select.select([os.pidfd_open(child)], [], [], max(deadline - time.monotonic(), 0))[0]
    if not has_ended:
        os.killpg(child, signal.SIGABRT)  # faulthandler prints where it hangs
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if has_ended else None


def become(job: dict[str, Any]) -> None:
    """Run the script of a job."""
    os.setsid()
    for descriptor, path in ((0, os.devnull), (1, job["output"]), (2, job["errors"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.update(job["variables"])
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    name = os.path.realpath(job["words"][0]) if job["words"][0].endswith(".py") else job["words"][0]
    os.chdir(job["folder"])
    if job["removed"]:
        Path(job["folder"]).rmdir()
    sys.argv = [name, *job["words"][1:]]
    ctypes.CDLL(None).fault_arm()
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    import_everything(sys.argv[1])
    print("ready", flush=True)
    if (job := serve()) is not None:
        become(job)
