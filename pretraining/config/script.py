"""The end of a script's process."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with its code; with 141 and no traceback if the reader of the output has gone (`| head`)."""
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its exit
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def _output_is_closed() -> bool:
    """Return whether nobody reads stdout; the error may also come from a socket."""
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
