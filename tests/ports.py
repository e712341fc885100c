"""Ports for the programs under test."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom


def free_port() -> int:
    """Return a port that nobody listens on and that Linux gives to no program that asks for any (32768 and above)."""
    while True:
        port = SystemRandom().randrange(20_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
