"""A program in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Sequence

from tests.parallel.launch import ROOT
from tests.waiting import PATIENCE


class Terminal:
    """A terminal of 80 columns, and the program in it."""

    def __init__(self, command: Sequence[str], variables: dict[str, str]) -> None:
        self._written = b""
        self.process, self._terminal = pty.fork()
        if not self.process:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            os.chdir(ROOT)
            os.execvpe(command[0], list(command), variables)

    @property
    def output(self) -> str:
        """What the program has printed."""
        return self._written.decode(errors="replace")

    def type_in(self, text: str, expected: str) -> None:
        """Type `text`, and wait until the terminal shows what is expected."""
        begin = len(self.output)
        os.write(self._terminal, text.encode())
        self.wait_for(expected, begin)

    def wait_for(self, text: str, begin: int = 0) -> None:
        """Read until `text` is printed, behind so many characters."""
        began = time.monotonic()
        while text not in self.output[begin:]:
            assert self._read() and time.monotonic() < began + PATIENCE, f"{text!r} is not in {self.output[begin:]!r}"

    def end(self) -> int:
        """Wait until the program ends; return its exit code."""
        began = time.monotonic()
        while not (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            assert time.monotonic() < began + PATIENCE, self.output
            self._read()
        while self._read():  # what it printed last
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(ended[1])

    def _read(self) -> bool:
        """Read what is printed within a moment; return whether the program may print more."""
        if select.select([self._terminal], [], [], 0.02)[0]:
            try:
                self._written += os.read(self._terminal, 65536)
            except OSError:  # EIO: the last process has closed it
                time.sleep(0.02)
                return False
        return True
