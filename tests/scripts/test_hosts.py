"""Two hosts, made of network namespaces: each has its own address, and the link between them can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.checkout import copy_checkout
from tests.scripts.test_scripts import Attended

pytestmark = pytest.mark.slow
FLAGS = "--num_steps=24 --checkpoint_interval=4 --collective_timeout=15"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts(NamedTuple):
    """The names of two namespaces that one cable connects."""

    names: tuple[str, str]

    def start(self, index: int, checkout: Path) -> Attended:
        """Start the script on one of them, as a process of both."""
        prefix = ("ip", "netns", "exec", self.names[index])
        variables = {"NNODES": "2", "NODE_RANK": str(index), "NPROC": "1", "PJRT_DEVICE": ""}
        variables |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
        return Attended(checkout, FLAGS, prefix, str(index), **variables)

    def set_link(self, state: str) -> None:
        """Cut the cable ("down") or mend it ("up")."""
        ip("-n", self.names[1], "link", "set", "eth0", state)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = (f"host{os.getpid()}a", f"host{os.getpid()}b")
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', '') or error}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_two_hosts_continue_by_themselves_after_a_cut_link_and_a_lost_host_with_the_losses_of_one(
    hosts: Hosts, tmp_path: Path
) -> None:
    checkout = copy_checkout(tmp_path / "shared")
    with hosts.start(0, checkout) as first, hosts.start(1, checkout) as second:
        first.wait_until(partial(first.has_reached, 6))
        hosts.set_link("down")
        for host in (first, second):
            host.wait_until(partial(host.has_ended, 5))
        hosts.set_link("up")
        first.wait_until(partial(first.has_reached, 13))
        second.kill()
        with hosts.start(1, checkout) as again:
            for host in (first, again):
                assert host.script.wait(180) == 0, host.errors()
        assert first.has_ended(5, times=2)
    both = first.lines()
    with Attended(copy_checkout(tmp_path / "alone"), FLAGS, PJRT_DEVICE="") as alone:
        assert alone.script.wait(120) == 0, alone.errors()
    assert list(both) == list(alone.lines()) == list(range(1, 25))
    for step, line in alone.lines().items():
        assert both[step]["data_hash"] == line["data_hash"]
        assert both[step]["loss"] == pytest.approx(line["loss"], abs=1e-5)
