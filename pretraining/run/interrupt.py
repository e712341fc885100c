"""SIGTERM, SIGINT, notices and the clock: all processes agree on the step after which they save, or save and exit.

Depends on torch.distributed only; the loop calls it once per step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist

# Seconds in which a repeated signal counts as the same request: SLURM signals every process of a job step, and torchrun
# forwards the signals it receives, so one request arrives twice.
ECHO = 2.0
# Seconds that processes wait for each other after a signal. torchrun also signals the survivors of a dead process, and
# kills them 30 s later.
RENDEZVOUS = 20.0
COMPILING, TRAINING = "leaving after this compilation", "saving and leaving"  # what a first signal does, in words


class NoRendezvousError(RuntimeError):
    """After a signal another process did not answer; this one exits without saving."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: another process did not answer in {RENDEZVOUS:.0f} s")


class Agreement(NamedTuple):
    """What all processes do after the same step."""

    signal: int = 0  # save, and exit for this signal
    ends: bool = False  # save, and exit because the time is up
    saves: bool = False  # save because of the clock


class Clock:
    """What saves and ends a run by the time: this one never does. An extension sets another in process 0."""

    reason = ""  # why the run ends

    def saved(self, is_local: bool) -> None:
        """Take note of a save, which a thread may still write. is_local: it is not in ckpt_save_path."""

    def read(self) -> tuple[bool, bool]:
        """Return whether the run ends, and whether it saves. Called after each step."""
        return False, False


class Watchdog:
    """Ends a process whose step lasts too long: this one never does. An extension sets another."""

    def expect(self, first: bool = False) -> None:
        """Begin a step, or a batch of an evaluation. first: it compiles."""

    def rest(self) -> None:
        """Expect nothing until the next step: saves have limits of their own."""

    def close(self) -> None:
        """Stop watching."""


def _leave_the_next_to_python(number: int, _: object) -> None:
    """Let the next Ctrl-C raise KeyboardInterrupt where a person goes on in this process, as in a notebook's kernel."""
    if hasattr(sys, "ps1"):
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupt:
    """Tells the loop to save and exit after a signal or by the clock; a second signal exits at once.

    A second Ctrl-C in a notebook or at Python's prompt leaves the run with a KeyboardInterrupt: the process lives on.
    A thread reads signals from a pipe: Python runs the handler of a signal in the main thread, which may be inside a
    compiler for minutes.
    """

    def __init__(self, processes: int, timeout: int) -> None:
        """timeout: seconds that processes wait."""
        # A notice is kept as a signal of its own, so that the signal that follows it is a first one.
        self._signal, self._notice, self._received = 0, 0, -ECHO
        self.clock = Clock()
        # gloo on every engine: an asynchronous all-reduce of one number, for which no device waits.
        self._group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo") if processes > 1 else None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None  # the all-reduce of the last call
        # The loop says what a signal does now; a watcher, that it left its work for a signal: no step may follow.
        self.plan, self.is_leaving = TRAINING, False
        self._pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._earlier_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        handled = (signal.SIGTERM, signal.SIGINT)
        self._earlier_handlers = {number: signal.signal(number, _leave_the_next_to_python) for number in handled}
        Thread(target=self._listen, name="signals", daemon=True).start()

    def close(self) -> None:
        """Leave signals to the handlers from before: a program may go on after the run."""
        time.sleep(max(0.0, self._received + ECHO - time.monotonic()))  # the echo of a signal would end the process
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)
        os.close(signal.set_wakeup_fd(self._earlier_descriptor))  # ends the thread

    def _listen(self) -> None:
        while numbers := os.read(self._pipe, 1):
            if numbers[0] in self._earlier_handlers:
                self._receive(numbers[0])
        os.close(self._pipe)

    def _receive(self, number: int) -> None:
        if not self._signal:
            self._signal, self._received = number, time.monotonic()
            print(f"{signal.Signals(number).name}: {self.plan}; again to leave at once", file=sys.stderr, flush=True)
        elif time.monotonic() - self._received > ECHO and (number != signal.SIGINT or not hasattr(sys, "ps1")):
            os._exit(128 + number)

    def notice(self, reason: str) -> None:
        """Save and exit as after SIGTERM; from any thread."""
        self._notice = signal.SIGTERM
        print(f"{reason}: saving and leaving", file=sys.stderr, flush=True)

    def agreed_now(self) -> int:
        """Return the signal that any process has received, or 0; the same in every process, which wait for each other.

        Called before what may compile, which is not begun after a signal.
        """
        number = torch.tensor(self._signal or self._notice)
        if self._group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return int(number)

    def agreed(self) -> Agreement:
        """Return what to do after this step; the same in every process. Called once per step.

        With several processes it is what was known at the previous call, so that no step waits for the all-reduce.
        Raises NoRendezvousError if the others do not answer after a signal.
        """
        own = Agreement(self._signal or self._notice, *self.clock.read())
        if self._group is None:
            return own
        received = torch.tensor([int(value) for value in own])
        work = dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        previous, self._pending = self._pending, (received, work)
        return self._wait(*previous) if previous else Agreement()

    def _wait(self, received: torch.Tensor, work: dist.Work) -> Agreement:
        try:
            work.wait(timedelta(seconds=RENDEZVOUS if self._signal else 0))  # 0: that of the group
        except RuntimeError as error:
            if not self._signal:
                raise
            raise NoRendezvousError(self._signal) from error
        number, ends, saves = received.tolist()
        return Agreement(number, bool(ends), bool(saves))
