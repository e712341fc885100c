"""Fork a program for each client; see tests/warm/__init__.py."""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# What programs import of other packages: nothing of the checkout, because copies of it run as well.
IMPORTED = (
    "numpy",
    "pyarrow",
    "fire",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch_xla",
    "torch_xla.core.xla_model",
    "torch_xla.runtime",
    "torch_xla.distributed.spmd",
)


def receive(connection: socket.socket) -> tuple[list[str], dict[str, str], str, list[int], list[int]]:
    """Return a program's words, environment and folder, the signals that it ignores, and its standard streams."""
    streams = array.array("i")
    length, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * streams.itemsize))
    streams.frombytes(ancillary[0][2])
    size, request = int.from_bytes(length, "little"), b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    return *json.loads(request.decode("utf-8", "surrogateescape")), streams.tolist()


def become(words: list[str], environment: dict[str, str], folder: str, ignored: list[int], streams: list[int]) -> None:
    """Run the program in this process, which was forked for it, as the interpreter would."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(SET_BY_IMPORTS | environment)
    sys.path[0:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv = words[1:] if words[0] == "-m" else ["-c", *words[2:]] if words[0] == "-c" else words
    sys.path.insert(0, folder if words[0] in ("-m", "-c") else str(Path(words[0]).resolve().parent))
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(words[1], sys.modules["__main__"].__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")


def import_packages() -> dict[str, str]:
    """Import what programs import; return the variables that this sets."""
    before = dict(os.environ)
    for name in IMPORTED:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.freeze()  # forks share what is imported
    variables = {name: value for name, value in os.environ.items() if before.get(name) != value}
    variables.pop("XLA_FLAGS", None)  # one flag, which has its default; a program looks whether flags are given
    return variables


def fork(connection: socket.socket, listener: socket.socket) -> int:
    """Start a program; return its process id."""
    request = receive(connection)
    program = os.fork()
    if program:
        for stream in request[-1]:
            os.close(stream)
        connection.sendall(program.to_bytes(8, "little"))
        return program
    listener.close()
    connection.close()
    code = 1
    try:
        become(*request)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # freeing what torch_xla holds takes a second


def serve(listener: socket.socket) -> None:
    """Fork what is asked for; report how each program ended, and end those whose client is gone."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return  # whoever started the server has ended
            if key.fileobj is listener:
                connection, _ = listener.accept()
                program = fork(connection, listener)
                ending = os.pidfd_open(program)
                selector.register(ending, selectors.EVENT_READ, (program, connection))
                selector.register(connection, selectors.EVENT_READ, (program, ending))
            elif isinstance(key.fileobj, socket.socket):  # the client ended
                selector.unregister(key.fileobj)
                os.kill(key.data[0], signal.SIGKILL)
            else:
                finish(selector, key)


def finish(selector: selectors.BaseSelector, key: Any) -> None:
    """Tell the client of a program how it ended."""
    program, connection = key.data
    _, status = os.waitpid(program, 0)
    selector.unregister(key.fileobj)
    os.close(key.fileobj)
    if connection in selector.get_map():
        selector.unregister(connection)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
    connection.close()


if __name__ == "__main__":
    sys.stdin = open(0, "rb")  # noqa: SIM115
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        print("ready", flush=True)
        readable: list[Any] = [listener, sys.stdin]
        if listener in select.select(readable, [], [])[0]:
            SET_BY_IMPORTS = import_packages()
            serve(listener)
