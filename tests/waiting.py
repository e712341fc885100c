"""Waiting for other processes: for what they do, not for a time within which they should have done it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 900.0  # s; no wait takes more than 30 s on two quiet cores, so what has not come by then never comes


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait until `condition` returns True. Fails if `process`, which is to make it true, ends before, or with PATIENCE.

    What the process printed is then shown, if it prints to a pipe.
    """
    began = time.monotonic()
    while not condition():
        if process is not None and process.poll() is not None:
            assert condition(), f"ended with code {process.returncode}: {process.communicate()}"
            return
        assert time.monotonic() < began + PATIENCE, "it has not happened"
        time.sleep(0.01)
