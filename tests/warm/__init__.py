"""Python programs that begin with torch imported: an import takes 2 to 6 seconds of CPU time, a fork 20 milliseconds.

    subprocess.Popen([*python(), "main_training.py", "--flag=value"], ...)  # instead of sys.executable

`client.py` is started in place of the interpreter. It hands its arguments, environment, folder and standard streams to
a server process, which forks the program, and ends with the program's exit code, or by the signal that ended it.
Signals to the client go on to the program; a client that is killed takes its program along. The workers of pytest share
a server, which their parent process starts; it imports torch when the first program is asked for. Programs whose start
is what is tested use sys.executable.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ADDRESS = "WARM_PYTHON"  # the variable with the address of the server
HIDDEN = (ADDRESS, "PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "OMP_NUM_THREADS")  # of a program, not of the server


def python() -> tuple[str, ...]:
    """Return the beginning of a command, in place of the interpreter. Starts the server, unless a parent has."""
    return sys.executable, "-I", "-S", str(HERE / "client.py"), os.environ.get(ADDRESS) or start_server()


def start_server() -> str:
    """Start a server for this process and those that it starts; return its address."""
    address = os.environ[ADDRESS] = f"{tempfile.mkdtemp()}/server"
    variables = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    command = [sys.executable, str(HERE / "server.py"), address]
    server = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.kill)
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    return address
