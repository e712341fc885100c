"""Ports for the programs under test."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

_RESERVED: list[socket.socket] = []  # names of this machine that hold a port for as long as this process lives


def free_port() -> int:
    """Return a port that nobody listens on, and that no other call returns while this process lives.

    Linux gives it to no program that asks for any (those are 32768 and above).
    """
    while True:
        port, reservation = SystemRandom().randrange(20_000, 32_768), socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            reservation.bind(f"\0port of a test {port}")
            _RESERVED.append(reservation)
            return port
        reservation.close()
