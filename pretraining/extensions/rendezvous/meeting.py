"""The processes of a run meet before one of them opens a device, and compare what must not differ.

Each writes its settings, its code, its data and, if it has found one, its mistake to a TCP store. Process 0 reads them
and writes to each process whether it may train. No process group is needed: with other settings the groups would
differ, and creating them would hang. Imports torch only if there are several processes.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from pretraining.config.declaration import PER_HOST, settings_of
from pretraining.config.errors import UserError
from pretraining.config.flags import print_mistake
from pretraining.config.grammar import without_credentials
from pretraining.config.script import TRY_AGAIN, USER_MISTAKE
from pretraining.config.training import TrainConfig
from pretraining.extensions.packages import installed_versions
from pretraining.extensions.schedulers import describe_job
from pretraining.parallel.processes import (
    START,
    NoPeersError,
    ProcessError,
    Processes,
    no_peers,
    raise_process_error,
    read_processes,
)

if TYPE_CHECKING:
    from pretraining.data.datasets import Dataset

GRACE = 5.0  # s after which a process prints its mistake, although not all processes have come
STAY = 60.0  # s for which it stays, so that those that come later hear of it
SIGN_OF_LIFE = 4.0  # s between lines about what is waited for
LISTED = 8  # processes of one message
XLA_PORT = 12354  # torch-xla opens a store of its own at MASTER_PORT, or 12355
PACKAGES = ("torch", "torch_xla", "numpy")
APART = (
    "Start scripts/train.sh once on each host, with NNODES, NODE_RANK and MASTER_ADDR (docs/clusters.md), or torchrun. "
    "NNODES=1: each is meant to be a run of its own"
)
REMEDY = "Start all processes with the same command, code and data."

_STORES: dict[tuple[str, int], Any] = {}  # process 0 has its store open until it ends: the process group uses it, too
_MEETINGS: list[str] = []  # the prefixes of those that ended well; every process counts alike


class PeersError(UserError):
    """What this process prints after the processes have met."""

    def __init__(self, text: str, code: int, is_printed: bool) -> None:
        super().__init__(text)
        self.code, self.is_printed_by_all = code, is_printed


class Member(NamedTuple):
    """What a process writes for the others."""

    host: str
    facts: dict[str, str]  # by the name under which a difference is printed
    mistake: str = ""
    has_printed: bool = False  # the mistake, because others took long to come


class Verdict(NamedTuple):
    """What process 0 writes to a process."""

    text: str = ""
    code: int = 0  # with which it ends; 0: it may train
    is_printed: bool = False


def compare(config: TrainConfig, datasets: Mapping[str, Sequence[Dataset]]) -> None:
    """Raise PeersError or NoPeersError unless all processes have the same settings, code and data and no mistake.

    datasets: by split. Waits for the others for collective_timeout seconds. Raises ProcessError where a
    scheduler has started several processes, each of which would be a run of its own.
    """
    from pretraining.parallel.select import choose_engine

    processes = find_processes(is_xla=choose_engine(config)[0] == "xla")
    if processes.world_size > 1:
        _check_own_name(processes)
        data = {f"{split} data {each.name}": each.fingerprint for split in datasets for each in datasets[split]}
        member = Member(socket.gethostname(), compared_settings(config) | code_facts() | data)
        _Meeting(processes, config.collective_timeout).hold(member)
    elif not read_processes().is_launched and (job := describe_job()):
        raise ProcessError(f"{job}, and each would train alone, because RANK is not set. {APART}")


def report_mistake(error: UserError) -> None:
    """Print a mistake: one that all processes have once, any other with the rank and host of the process.

    The others hear of it if they come within a minute.
    """
    processes = Processes()
    if not isinstance(error, ProcessError):
        with suppress(ProcessError):
            processes = find_processes(is_xla=os.environ.get("PJRT_DEVICE") == "TPU")
    if processes.world_size == 1:
        print_mistake(error)
        return
    if shared := error if isinstance(error, PeersError) else _share(processes, error):
        print_mistake(shared)
    _leave_together(processes)


def find_processes(is_xla: bool) -> Processes:
    """Return the processes that the launcher or, of the xla engine, the TPU's metadata describe."""
    processes = read_processes()
    if processes.is_launched or not is_xla:
        return processes
    from pretraining.extensions.rendezvous.hosts import read_hosts

    rank, addresses = read_hosts()
    return Processes(rank, len(addresses), is_launched=True, address=addresses[0], port=XLA_PORT)


def compared_settings(config: TrainConfig) -> dict[str, str]:
    """Return the settings that must not differ, by flag."""
    names = (name for name, setting in settings_of(type(config)).items() if PER_HOST not in setting.traits)
    return {f"--{name}": without_credentials(str(getattr(config, name))) for name in names}


def code_facts() -> dict[str, str]:
    """Return a digest of the source, and the versions of the packages that compute."""
    root = Path(__file__).parents[3]
    paths = [*root.glob("main_training.py"), *root.glob("pretraining/**/*.py")]
    files = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    digest = sha256(b"".join(f"{name}\n".encode() + path.read_bytes() for name, path in files)).hexdigest()
    versions = {f"version of {name}": found for name, found in installed_versions(PACKAGES).items()}
    return {"digest of the source": digest[:12], **versions}


def _check_own_name(processes: Processes) -> None:
    """Raise UserError if gloo would give the others a loopback address: it gives them that of the host's own name.

    Debian's /etc/hosts has 127.0.1.1 for it. All processes may as well be on one machine, with MASTER_ADDR on loopback.
    """
    if processes.world_size == processes.local_world_size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    if (own := _loopback_address(name)) and not _loopback_address(processes.address):
        remedy = "set GLOO_SOCKET_IFNAME on every host to the interface of their network, such as eth0"
        raise UserError(f"{name}, the name of this host, is {own} here, where other hosts do not find it: {remedy}")


def _loopback_address(name: str) -> str:
    """Return the address of a name if it is a loopback address, otherwise ""."""
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        return ""
    return address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else ""


# ---- What process 0 decides


def judge(members: Mapping[int, Member], size: int) -> dict[int, Verdict]:
    """Return the verdict on each of the processes that came, by rank. size: of the run."""
    if any(member.mistake for member in members.values()):
        return _judge_mistakes(members, size)
    first = members[0]
    differing = {rank: _differences(first, member) for rank, member in members.items()}
    differing = {rank: lines for rank, lines in differing.items() if lines}
    return _judge_differences(members, differing, size) if differing else dict.fromkeys(members, Verdict())


def _judge_mistakes(members: Mapping[int, Member], size: int) -> dict[int, Verdict]:
    """Return verdicts with which the first process of a host prints a mistake that several of them have."""
    first = members[0].mistake
    if all(member.mistake == first for member in members.values()):
        is_known = any(member.has_printed for member in members.values())
        return {rank: Verdict(first, USER_MISTAKE, is_printed=not rank and not is_known) for rank in members}
    wrong = [rank for rank, member in members.items() if member.mistake]
    elsewhere = f"this run ends, because of the mistake that {describe_processes(wrong, size)} printed"
    verdicts: dict[int, Verdict] = {}
    for rank, member in members.items():
        alike = [other for other, each in members.items() if (each.host, each.mistake) == (member.host, member.mistake)]
        text = f"{describe_processes(alike, size)} on {member.host}: {member.mistake}" if member.mistake else elsewhere
        is_known = any(members[other].has_printed for other in alike)
        verdicts[rank] = Verdict(text, USER_MISTAKE, is_printed=rank == alike[0] and not is_known)
    return verdicts


def _differences(first: Member, member: Member) -> list[tuple[str, str, str]]:
    """Return (name, value in process 0, value here)."""
    names = dict.fromkeys([*first.facts, *member.facts])
    values = ((name, first.facts.get(name, "none"), member.facts.get(name, "none")) for name in names)
    return [(name, before, here) for name, before, here in values if before != here]


def _judge_differences(
    members: Mapping[int, Member], differing: Mapping[int, list[tuple[str, str, str]]], size: int
) -> dict[int, Verdict]:
    """Return verdicts with which each process that differs prints how, and process 0 how all of them do."""

    def lines(rank: int) -> Iterator[str]:
        for name, before, here in differing[rank]:
            places = f"in process {rank} on {members[rank].host}", f"in process 0 on {members[0].host}"
            yield f"  {name}: {here!r} {places[0]}, {before!r} {places[1]}"

    verdicts: dict[int, Verdict] = {}
    for rank in members:
        listed = [rank] if rank in differing else [] if rank else list(differing)[:LISTED]
        body = [line for each in listed for line in lines(each)]
        if not rank and len(differing) > LISTED:
            body.append(f"  and in {len(differing) - LISTED:,} others")
        text = "\n".join(["the processes of this run do not agree:", *body, REMEDY])
        elsewhere = f"this run ends, because {describe_processes(list(differing), size)} differ from process 0"
        verdicts[rank] = Verdict(text if listed else elsewhere, USER_MISTAKE, is_printed=True)
    return verdicts


def describe_processes(ranks: Sequence[int], size: int) -> str:
    """Return "process 1 of 4" or "processes 1, 2, 3 of 4"."""
    names = [str(rank) for rank in ranks[:LISTED]] + ["..."] * (len(ranks) > LISTED)
    return f"process{'es' * (len(ranks) > 1)} {', '.join(names)} of {size}"


# ---- Meeting


class _Meeting:
    """An exchange through the store, whose server is in process 0 or in torchrun's agent."""

    def __init__(self, processes: Processes, timeout: float, mistake: str = "") -> None:
        """timeout: seconds for which others are waited for. mistake: printed if they take long to come."""
        self._processes, self._mistake, self._timeout = processes, mistake, timeout
        self._member: Member | None = None  # as the others can read it
        self.has_printed = False
        # torchrun's agent keeps its store when it starts the processes again, perhaps in another order of hosts
        self._prefix = f"meeting{len(_MEETINGS)} {START}/"
        self._begin_waiting()

    def hold(self, member: Member) -> None:
        """Write `member`, and wait for the verdict. Raises PeersError or NoPeersError."""
        rank = self._processes.rank
        with raise_process_error(self._processes, self._timeout):
            import torch.distributed  # noqa: F401 - may take longer than GRACE on a busy machine, in each process

            self._begin_waiting()
            self._store = open_store(self._processes, self._wait)
            self._claim_rank(member.host)
            self._write(member._replace(has_printed=self.has_printed))
            if self._store.add(self._key("came", rank), 1) == 1:  # a start before this one may have come and gone
                self._store.add(self._key("came"), 1)
            self._store.add(self._key("mistakes"), int(bool(member.mistake)))
            if rank == 0:
                self._judge()
            while not self._store.check([self._key("verdict", rank)]):
                self._wait(self._missing)
            verdict = Verdict(*json.loads(self._store.get(self._key("verdict", rank))))
        if verdict.code == TRY_AGAIN:
            raise NoPeersError(verdict.text)
        if verdict.code:
            raise PeersError(*verdict)
        _MEETINGS.append(self._prefix)

    def _begin_waiting(self) -> None:
        self._began = self._printed = time.monotonic()
        self._deadline = self._began + self._timeout

    def _claim_rank(self, host: str) -> None:
        """Wait while another host has this rank: one that this host replaces and whose run ends soon, or a mistake."""
        rank, size = self._processes.rank, self._processes.world_size
        while (other := self._store.compare_set(self._key("host", rank), "", host).decode()) != host:
            who = f"{describe_processes([rank], size)} on {other}, whose rank (NODE_RANK) {host} has as well,"
            self._wait(lambda who=who: f"the end of {who}")  # type: ignore[misc]

    def _write(self, member: Member) -> None:
        self._member = member
        self._store.set(self._key("member", self._processes.rank), json.dumps(member))

    def _judge(self) -> None:
        """Wait for all members, after a mistake for a minute, and write a verdict to each."""
        size = self._processes.world_size
        verdicts: dict[int, Verdict] | None = None
        try:
            while self._store.add(self._key("came"), 0) < size:
                if self._store.add(self._key("mistakes"), 0):
                    self._deadline = min(self._deadline, time.monotonic() + STAY)
                self._wait(self._missing)
        except NoPeersError as error:
            if not self._store.add(self._key("mistakes"), 0):
                verdicts = dict.fromkeys(range(size), Verdict(str(error), TRY_AGAIN))
        members = {rank: Member(*json.loads(self._store.get(self._key("member", rank)))) for rank in self._came()}
        for rank, verdict in (verdicts or judge(members, size)).items():
            self._store.set(self._key("verdict", rank), json.dumps(verdict))

    def _came(self) -> list[int]:
        ranks = range(self._processes.world_size)
        return [rank for rank in ranks if self._store.check([self._key("member", rank)])]

    def _missing(self) -> str:
        """Return who has not come; process 0 finds that out."""
        if self._processes.rank:
            known = self._store.check([self._key("missing")])
            return self._store.get(self._key("missing")).decode() if known else "the other processes"
        missing = [rank for rank in range(self._processes.world_size) if rank not in self._came()]
        text = describe_processes(missing, self._processes.world_size)
        self._store.set(self._key("missing"), text)
        return text

    def _wait(self, missing: Callable[[], str]) -> None:
        """Wait a moment; print a line every few seconds. Raises NoPeersError when the time is up."""
        now, processes = time.monotonic(), self._processes
        if self._mistake and not self.has_printed and now > self._began + GRACE:
            self._print_mistake()
        if now > self._deadline:
            raise no_peers(processes, self._timeout, f"{missing()} did not come", "no answer")
        if now > self._printed + SIGN_OF_LIFE:
            self._printed = now
            if processes.local_rank == 0:
                until = time.strftime("%X", time.localtime(time.time() + self._deadline - now))
                where = f"{processes.address}:{processes.port}"
                print(f"waiting for {missing()} at {where} ... {now - self._began:.0f}s, until {until}", flush=True)
        time.sleep(0.05)

    def _print_mistake(self) -> None:
        self.has_printed = True
        print(self._mistake, file=sys.stderr, flush=True)
        if self._member:
            self._write(self._member._replace(has_printed=True))

    def _key(self, name: str, rank: int | str = "") -> str:
        return f"{self._prefix}{name}{rank}"


def open_store(processes: Processes, wait: Callable[[Callable[[], str]], None]) -> Any:
    """Return the store of this run; process 0 opens it, unless torchrun's agent has. wait: called until it is there.

    Process 0 is a client as well: where MASTER_ADDR does not lead to it, torch would print stacks for a minute.
    """
    place = processes.address, processes.port
    if place in _STORES:
        return _STORES[place]
    import torch.distributed as dist

    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True, "timeout": timedelta(seconds=STAY)}
    leads = processes.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    missing, listener = describe_processes([0], processes.world_size), None
    if leads:
        listener = _listen(processes)
        missing += f" (this one: is MASTER_ADDR an address of {socket.gethostname()}?)"
    while not _answers(processes):
        wait(lambda: missing)
    if listener:
        options["master_listen_fd"] = listener.detach()

    def open_it() -> None:
        try:
            opened.append(dist.TCPStore(*place, processes.world_size, leads, **options))  # type: ignore[attr-defined]
        except RuntimeError as error:
            opened.append(error)

    # A thread, because torch waits for ever where another program listens and says nothing
    opened: list[Any] = []
    Thread(target=open_it, name="store", daemon=True).start()
    while not opened:
        wait(lambda: missing)
    if isinstance(opened[0], RuntimeError):
        raise opened[0]
    _STORES[place] = opened[0]
    return _STORES[place]


def _listen(processes: Processes) -> socket.socket:
    """Return the socket of the store; on a loopback address if that is process 0's, otherwise on all addresses.

    Several hosts need all of them: on Debian a host's own name is 127.0.1.1 to the host itself.
    """
    address, port = processes.address, processes.port
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    host = str(place[0])
    try:
        is_one_host = processes.local_world_size == processes.world_size
        if is_one_host and _loopback_address(host):
            return socket.create_server((host, port), family=family, backlog=4096)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        return socket.create_server(("", port), backlog=4096)
    except OSError as error:
        reason = f"{error.strerror}: another program has it, or an earlier run has not ended yet"
        raise NoPeersError(f"MASTER_PORT={port} cannot be opened in process 0 ({reason})") from error


def _answers(processes: Processes) -> bool:
    """Return whether something listens where the store is expected."""
    try:
        with socket.create_connection((processes.address, processes.port), timeout=2):
            return True
    except socket.gaierror:
        raise
    except OSError:
        return False


def _share(processes: Processes, error: UserError) -> PeersError | None:
    """Write the mistake for the others, and return what this process prints; None if it or another has."""
    host = socket.gethostname()
    own = f"{describe_processes([processes.rank], processes.world_size)} on {host}: {error}"
    stay = GRACE if _MEETINGS else STAY  # once they have met, the others are in their first steps
    meeting, text, is_printed = _Meeting(processes, stay, own), own, True
    try:
        meeting.hold(Member(host, {}, str(error)))
    except PeersError as shared:
        text, is_printed = str(shared), shared.is_printed_by_all
    except NoPeersError:
        pass
    return PeersError(text, error.code, True) if is_printed and not meeting.has_printed else None


def _leave_together(processes: Processes) -> None:
    """Wait until all have printed: a launcher ends the others when the first one ends."""
    store, deadline = _STORES.get((processes.address, processes.port)), time.monotonic() + GRACE
    with suppress(RuntimeError):  # process 0 has left
        left = store.add("left", 1) if store else processes.world_size
        while store and left < processes.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            left = store.add("left", 0)
