"""Run main_training.py, and have a process send itself a signal after a step: `-m tests.stopping SIGNAL STEP RANK ...`

A signal from outside comes after a step that depends on the speed of the machine, or after the run has ended.
"""

from __future__ import annotations

import os
import signal
import sys

from main_training import CONFIGURATION, EXTENSIONS, REPORT, START, train
from pretraining.config.extension import Extension, Watcher
from pretraining.config.flags import run
from pretraining.config.script import exit_with


class Stop(Watcher):
    """Sends the signal."""

    def __init__(self, number: int, step: int, rank: str) -> None:
        self._number, self._step = number, step
        self._is_meant = os.environ.get("RANK", "0") == rank

    def after_step(self, step: int) -> None:
        """See Watcher; `step` is not saved yet."""
        if self._is_meant and step == self._step:
            os.kill(os.getpid(), self._number)


def main(**flags: str) -> int:
    """Pretrain a Llama variant."""
    name, step, rank = sys.argv[1:4]
    stop = Extension(watch=lambda _: Stop(signal.Signals[name], int(step), rank))
    return train(flags, extensions=(*EXTENSIONS, stop)).code


if __name__ == "__main__":
    exit_with(lambda: run(main, sys.argv[4:], checks=START, configuration=CONFIGURATION, report=REPORT))
