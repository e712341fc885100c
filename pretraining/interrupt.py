"""SIGTERM and SIGINT: all processes of a run agree on the step after which they save and exit.

Depends on torch.distributed only; the loop calls it once per step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

# Seconds in which a repeated signal counts as the same request: SLURM signals every process of a job step, and torchrun
# forwards the signals it receives, so one request arrives twice.
ECHO = 2.0
# Seconds that processes wait for each other after a signal. torchrun also signals the survivors of a dead process, and
# kills them 30 s later.
RENDEZVOUS = 20.0


class NoRendezvousError(RuntimeError):
    """After a signal another process did not answer; this one exits with `code`, without saving."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: another process did not answer in {RENDEZVOUS:.0f} s")
        self.code = 128 + number


class Interrupt:
    """Tells the loop to save and exit after a signal; a second signal exits at once."""

    def __init__(self, processes: int) -> None:
        self._signal, self._received = 0, 0.0
        # gloo on every engine: an asynchronous all-reduce of one number, for which no device waits.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None  # the all-reduce of the last call
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self._signal:
            self._signal, self._received = number, time.monotonic()
            message = f"{signal.Signals(number).name}: saving and leaving; again to leave at once"
            print(message, file=sys.stderr, flush=True)
        elif time.monotonic() - self._received > ECHO:
            os._exit(128 + number)

    def agreed(self) -> int:
        """Return the signal to exit for, or 0; the same in every process. Called once per step.

        With several processes it is a signal that any of them had received at the previous call, so that no step waits
        for the all-reduce. Raises NoRendezvousError if the others do not answer after a signal.
        """
        if self._group is None:
            return self._signal
        previous = self._pending
        received = torch.tensor(self._signal)
        work = dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = received, work
        return self._wait(*previous) if previous else 0

    def _wait(self, received: torch.Tensor, work: dist.Work) -> int:
        if not self._signal:
            work.wait()
            return int(received)
        try:
            work.wait(timedelta(seconds=RENDEZVOUS))
        except RuntimeError as error:
            raise NoRendezvousError(self._signal) from error
        return int(received)
