"""A bad link between two network interfaces: delays packets and loses some of them.

    ip netns exec NAMESPACE python bad_link.py INTERFACE INTERFACE

Forwards frames by raw sockets until it is killed, so that no kernel needs netem.
"""

from __future__ import annotations

import heapq
import itertools
import random
import select
import socket
import sys
import time

DELAY = (0.005, 0.01)  # s, of each packet; packets may overtake one another
LOSS = 0.02  # of the packets
ALL_PROTOCOLS = 0x0003  # ETH_P_ALL
PACKET_VNET_HDR = 15  # frames keep what is known of them: checksums to be filled in, segments to be cut


def opened(interface: str) -> socket.socket:
    """Return a raw socket that reads and writes the frames of an interface."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    raw.setsockopt(263, PACKET_VNET_HDR, 1)  # SOL_PACKET
    raw.bind((interface, ALL_PROTOCOLS))
    return raw


def forward(one: socket.socket, other: socket.socket) -> None:
    """Pass on what either of them receives, late or not at all."""
    waiting: list[tuple[float, int, socket.socket, bytes]] = []  # when to send, to which of them
    counter = itertools.count()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for readable in select.select([one, other], [], [], timeout)[0]:
            frame, address = readable.recvfrom(1 << 17)
            if address[2] != socket.PACKET_OUTGOING and random.random() >= LOSS:
                target = other if readable is one else one
                heapq.heappush(waiting, (time.monotonic() + random.uniform(*DELAY), next(counter), target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            target.send(frame)


if __name__ == "__main__":
    forward(*map(opened, sys.argv[1:]))
