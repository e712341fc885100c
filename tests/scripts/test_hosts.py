"""Hosts made of network namespaces, on a switch: each has its own address, and its link can be cut, slow or lossy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.checkout import copy_checkout
from tests.scripts.test_scripts import Attended
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
FLAGS = "--num_steps=24 --global_batch_size=16 --batch_size=2 --checkpoint_interval=8 --collective_timeout=30"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts(NamedTuple):
    """The namespaces of hosts, and of the switch that connects them: its port to host i is called port{i}."""

    names: list[str]
    switch: str

    def start(self, index: int, checkout: Path, flags: str = FLAGS) -> Attended:
        """Start the script on one of them, as a process of all."""
        prefix = ("ip", "netns", "exec", self.names[index])
        variables = {"NNODES": str(len(self.names)), "NODE_RANK": str(index), "NPROC": "1", "PJRT_DEVICE": ""}
        variables |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
        return Attended(checkout, flags, prefix, str(index), **variables)

    def set_link(self, index: int, state: str) -> None:
        """Cut the cable of a host ("down") or repair it ("up")."""
        ip("-n", self.switch, "link", "set", f"port{index}", state)

    @contextmanager
    def bad_link(self, index: int) -> Iterator[None]:
        """Delay packets from and to a host, and lose some of them. See bad_link.py."""
        ip("-n", self.switch, "link", "add", "inner", "type", "veth", "peer", "name", "outer")
        ip("-n", self.switch, "link", "set", f"port{index}", "nomaster")
        ip("-n", self.switch, "link", "set", "outer", "master", "bridge", "up")
        ip("-n", self.switch, "link", "set", "inner", "up")
        script = str(Path(__file__).with_name("bad_link.py"))
        command = ["ip", "netns", "exec", self.switch, sys.executable, script, f"port{index}", "inner"]
        with subprocess.Popen(command) as link:
            try:
                yield
                assert link.poll() is None, "the link ended"
            finally:
                link.kill()


@contextmanager
def connected(count: int) -> Iterator[Hosts]:
    """Make hosts and connect them. Skips where namespaces are not permitted."""
    switch = f"switch{os.getpid()}"
    try:
        ip("netns", "add", switch)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', '') or error}")
    hosts = Hosts([f"host{os.getpid()}-{index}" for index in range(count)], switch)
    try:
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(hosts.names):
            ip("netns", "add", name)
            port = f"port{index}"
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.77.0.{index + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in (*hosts.names, switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The reports of one host, by step."""
    with Attended(copy_checkout(tmp_path_factory.mktemp("alone") / "checkout"), FLAGS, PJRT_DEVICE="") as run:
        run.finish()
    return run.lines()


def assert_same(there: dict[int, dict[str, Any]], alone: dict[int, dict[str, Any]]) -> None:
    """Compare the reports of several hosts with those of one."""
    assert list(there) == list(alone) == list(range(1, 25))
    for step, line in alone.items():
        assert there[step]["data_hash"] == line["data_hash"]
        assert there[step]["loss"] == pytest.approx(line["loss"], abs=1e-5)


@pytest.mark.exhaustive
def test_two_hosts_continue_by_themselves_after_a_cut_link_and_a_lost_host_with_the_losses_of_one(
    alone: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    checkout = copy_checkout(tmp_path / "shared")
    flags = [f"{FLAGS} --ckpt_local_interval=2 --ckpt_local_path={tmp_path}/disk{index}" for index in range(2)]
    with connected(2) as hosts, hosts.start(0, checkout, flags[0]) as first:
        with hosts.start(1, checkout, flags[1]) as second:
            wait_until(partial(first.has_reached, 7), first.script)
            hosts.set_link(1, "down")
            for host in (first, second):
                wait_until(partial(host.has_ended, 5), host.script)
            hosts.set_link(1, "up")
            wait_until(partial(first.has_reached, 15), first.script)
            second.kill()
        wait_until(partial(first.has_ended, 5, times=2), first.script)
        shutil.rmtree(tmp_path / "disk1")  # another host comes in its place
        with hosts.start(1, checkout, flags[1]) as again:
            for host in (again, first):
                host.finish()
    assert_same(first.lines(), alone)
    output = (checkout / "output0").read_text()
    assert f"continuing from {tmp_path}/disk0/step_" in output
    assert "so it is not used" in output and "continuing from run/checkpoints/step_" in output


@pytest.mark.exhaustive
def test_four_hosts_on_a_bad_link_have_the_losses_of_one(alone: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    with connected(4) as hosts, hosts.bad_link(3), ExitStack() as stack:
        checkout = copy_checkout(tmp_path / "shared")
        started = [stack.enter_context(hosts.start(index, checkout)) for index in range(4)]
        for host in started:
            host.finish()
        assert_same(started[0].lines(), alone)
