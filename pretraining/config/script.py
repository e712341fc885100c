"""The end of a script's process: whatever the system refuses is one sentence, and a traceback is our own mistake."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

# Exit codes; a signal's is 128 + its number. configs.md explains them.
FINISHED, USER_MISTAKE, STOPPED_ITSELF, TIME_IS_UP, TRY_AGAIN = 0, 2, 3, 4, 5
# What libraries say where malloc, mmap and clone fail.
_NO_MEMORY = ("allocate memory", "map segment", "start new thread", "bad_alloc", "error return without exception set")


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with its code; without a traceback after Ctrl-C (130), and if the reader of the output has
    gone (`| head`; 141)."""
    while os.open(os.devnull, os.O_RDWR) < 2:  # a service may have closed streams: no other file gets their numbers
        pass
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    os.environ.setdefault("USER", str(os.getuid()))  # torch asks for a name, and a container may have none for the user
    for stream in (sys.stdout, sys.stderr):  # a terminal may lack the letters of a path; a notebook's stream has all
        getattr(stream, "reconfigure", lambda errors: None)(errors="backslashreplace")
    threading.excepthook = _report_in_thread
    try:
        try:
            code = exit_code(main)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except OSError as error:
        if (isinstance(error, BrokenPipeError) or sys.flags.dev_mode) and not _output_is_closed():
            raise
        code = 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else USER_MISTAKE
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # the interpreter flushes once more at its exit
        try:
            if code == USER_MISTAKE:
                print(f"the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        except OSError:  # stderr may be the same file
            os.dup2(nowhere, sys.stderr.fileno())
    sys.exit(code)


def exit_code(main: Callable[[], int | None]) -> int:
    """Call `main` and return its code; 2 with a sentence on stderr where the system refuses something, 5 where another
    process of the run is lost.

    Raises OSError if that is the output.
    """
    try:
        Path.cwd()
        return main() or 0
    except (BrokenPipeError, ValueError):  # a UserError, whose text may have any word
        raise
    except Exception as error:
        if sys.flags.dev_mode or not (reason := lost_peer(error) or refusal(error)):
            raise
        sys.stdout.flush()
        print(f"{reason} (python -X dev prints where)", file=sys.stderr, flush=True)
        return TRY_AGAIN if lost_peer(error) else USER_MISTAKE


def write_exit_code(code: int) -> None:
    """torchrun turns every exit code into 1; whoever starts it finds each process's own in the folder EXIT_CODES."""
    if folder := os.environ.get("EXIT_CODES"):
        rank = os.environ.get("RANK", "0")
        try:
            Path(folder, rank if rank.isdigit() else "0").write_text(str(code))
        except OSError as error:
            print(f"EXIT_CODES={folder}: cannot write the exit code ({error.strerror})", file=sys.stderr)


def is_restarted() -> bool:
    """Return whether scripts/train.sh has started this run again, so that the same command worked before."""
    return os.environ.get("RESTARTS", "0") != "0"


def lost_peer(error: BaseException) -> str | None:
    """Return that another process of the run is lost, in words; None if the error is not about that."""
    text = next(iter(str(error).splitlines()), "")
    if "gloo" in text.lower() or type(error).__name__ in ("DistNetworkError", "DistStoreError"):
        return f"another process of the run has ended or does not answer; start all of them again: {text}"
    return None


def refusal(error: BaseException) -> str | None:
    """Return what the system has refused to the program, or which folder it lacks, in words; None: neither."""
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith(f"{__name__.partition('.')[0]}."):
        return f"this needs the folder {str(error.name).replace('.', '/')}, which is not there"
    if isinstance(error, OSError):
        try:
            Path.cwd()
        except OSError:
            return "the working directory does not exist any more: start in another one"
        if error.errno is None:  # the program's own words
            return text
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "a file or the output"
        return f"{name}: {error.strerror}"
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return f"this process may not have more memory or threads (ulimit -a): {text or 'an allocation failed'}"
    if isinstance(error, RuntimeError) and "home directory" in text:  # of Path.home()
        return "this user has no home folder: set HOME to one, or XDG_CACHE_HOME to a folder for indexes and caches"
    return None


def _report_in_thread(failure: threading.ExceptHookArgs) -> None:
    """Leave an error of the system to the thread that waits for the result: TensorBoard's writer raises it there."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def _output_is_closed() -> bool:
    """Return whether nobody reads stdout; the error may also come from a socket."""
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
