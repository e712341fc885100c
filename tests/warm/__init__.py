"""Python programs that begin with torch imported: an import takes 2 to 6 seconds of CPU time, a fork 20 milliseconds.

    subprocess.Popen([*python(), "main_training.py", "--flag=value"], ...)  # instead of sys.executable

`client.py` is started in place of the interpreter. It hands its arguments, environment, folder and standard streams to
a server process, which forks the program, and ends with the program's exit code, or by the signal that ended it.
Signals to the client go on to the program; a client that is killed takes its program along. Each process that starts
programs, a worker of pytest, has a server of its own. Programs whose start is what is tested use sys.executable.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
HIDDEN = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "OMP_NUM_THREADS")  # of a program, not of the server


@functools.cache
def python() -> tuple[str, ...]:
    """Return the beginning of a command, in place of the interpreter. Starts the server."""
    address = f"{tempfile.mkdtemp()}/server"
    variables = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    command = [sys.executable, str(HERE / "server.py"), address]
    server = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.kill)
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    return sys.executable, "-I", "-S", str(HERE / "client.py"), address
