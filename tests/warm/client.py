"""Have the server run a program; see tests/warm/__init__.py. Imports nothing that takes time."""

import array
import json
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main(address: str, words: list[str]) -> None:
    """Hand over `words`, and end as the program ends."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    folder = os.getcwd()  # noqa: PTH109
    request = json.dumps([words, dict(os.environ), folder, ignored]).encode("utf-8", "surrogateescape")
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(request)
    program = int.from_bytes(server.recv(8), "little")
    for number in SIGNALS:
        if number not in ignored:
            signal.signal(number, lambda number, frame: os.kill(program, number))
    status = int.from_bytes(server.recv(8), "little", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


main(sys.argv[1], sys.argv[2:])
