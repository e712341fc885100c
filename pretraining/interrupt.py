"""SIGTERM and SIGINT: every process of a run learns of them at the same step, so that all of them save and leave.

Composes nothing but torch.distributed; the loop asks once a step.
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

# Seconds in which a repeated signal is the same wish: SLURM signals every process of a job step, and torchrun passes
# on what it receives, so one request arrives twice.
ECHO = 2.0
# Seconds that processes wait for one another after a signal. torchrun also signals the survivors of a dead peer, and
# kills them 30 s later.
RENDEZVOUS = 20.0


class NoRendezvousError(RuntimeError):
    """After a signal another process gave no answer; `code` is what this one leaves with, without saving."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: another process gave no answer in {RENDEZVOUS:.0f} s")
        self.code = 128 + number


class Interrupt:
    """Asks the loop to save and leave; a second signal leaves at once."""

    def __init__(self, processes: int) -> None:
        self._signal, self._received = 0, 0.0
        # gloo on every engine: an exchange of one number in the background, which no device waits for.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self._signal:
            self._signal, self._received = number, time.monotonic()
            told = f"{signal.Signals(number).name}: saving and leaving; again to leave at once"
            print(told, file=sys.stderr, flush=True)
        elif time.monotonic() - self._received > ECHO:
            os._exit(128 + number)

    def agreed(self) -> int:
        """The signal to leave for, 0 if there is none; the same answer in every process. Called once a step.

        With several processes it is what any of them had received at the call before, so that a step never waits for
        the exchange. Raises NoRendezvousError if the others do not answer after a signal.
        """
        if self._group is None:
            return self._signal
        earlier = self._asked
        received = torch.tensor(self._signal)
        work = dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._asked = received, work
        return self._answer(*earlier) if earlier else 0

    def _answer(self, received: torch.Tensor, work: dist.Work) -> int:
        if not self._signal:
            work.wait()
            return int(received)
        try:
            work.wait(timedelta(seconds=RENDEZVOUS))
        except RuntimeError as error:
            raise NoRendezvousError(self._signal) from error
        return int(received)
