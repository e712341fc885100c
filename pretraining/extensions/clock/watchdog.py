"""The end of a process whose step hangs."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time

from pretraining.config.script import TRY_AGAIN, write_exit_code
from pretraining.run.interrupt import Watchdog

FIRST_STEP = 10  # times step_timeout: it compiles
STDERR = 2  # not sys.stderr, which has no file where a notebook or a test captures it
BACKUP = 20.0  # s after which C code ends a process whose interpreter lock is held by what hangs


class StepWatchdog(Watchdog):
    """Ends a process whose step lasts too long: stacks of all threads to stderr, exit code 5."""

    def __init__(self, limit: int) -> None:
        """limit: seconds of a step."""
        self._limit, self._deadline, self._ended = limit, math.inf, threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def expect(self, first: bool = False) -> None:
        seconds = self._limit * FIRST_STEP if first else self._limit
        self._deadline = time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds + BACKUP, exit=True, file=STDERR)

    def rest(self) -> None:
        self._deadline = math.inf
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        self._ended.set()
        self.rest()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._limit / 4)):
            if time.monotonic() > self._deadline:
                message = f"stopped: a step has not ended in time (--step_timeout={self._limit}); the stacks:"
                print(message, file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=STDERR, all_threads=True)
                write_exit_code(TRY_AGAIN)
                os._exit(TRY_AGAIN)
