"""The processes of a run, as torchrun's environment variables describe them. Imports no torch.

A run without any of these variables is a single process. A launcher sets all of them, so every mistake is reported at
once, in every process that sees it: rank 0 may be the one that is missing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from pretraining.config.errors import Problem, UserError, listing
from pretraining.config.script import TRY_AGAIN

COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
VARIABLES = (*COUNTS, "MASTER_ADDR", "MASTER_PORT")
# The number of this start, where torchrun's agent keeps the store of the starts before it. Otherwise each start has a
# store of its own, and the agents of several hosts, some of which came later, may count differently.
START = os.environ["TORCHELASTIC_RESTART_COUNT"] if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "0"
HOW_TO_START = (
    "A launcher sets all of these variables. Start several processes with `bash scripts/train.sh` or `torchrun "
    f"--nproc-per-node=N main_training.py`, and a single one without them: env -u {' -u '.join(COUNTS)}"
)


class Processes(NamedTuple):
    """This process among those of the run; the default is a single process without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of this host
    local_world_size: int = 1  # processes of this host
    is_launched: bool = False
    address: str = ""  # of process 0, through which the processes meet
    port: int = 0


class ProcessError(UserError):
    """The processes of a run cannot start together. Printed by every process that raises it."""

    is_printed_by_all = True


class NoPeersError(ProcessError):
    """The other processes are not there. scripts/train.sh tries again: a host, and its name, may come later."""

    code = TRY_AGAIN


def read_processes(environment: Mapping[str, str] = os.environ) -> Processes:
    """Return what the environment says. Raises ProcessError with every mistake and how to start a run."""
    if not any(name in environment for name in COUNTS):
        return Processes()
    if problems := list(_problems(environment)):
        raise ProcessError(f"{listing(problems, 'environment')}\n{HOW_TO_START}")
    rank, world_size, local_rank, local_world_size = (int(environment[name]) for name in COUNTS)
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return Processes(rank, world_size, local_rank, local_world_size, True, address, port)


@contextmanager
def raise_process_error(processes: Processes, timeout: float) -> Iterator[None]:
    """Raise NoPeersError where the processes do not find each other: torch.distributed describes a socket."""
    try:
        if processes.is_launched:
            socket.getaddrinfo(processes.address, processes.port)
        yield
    except socket.gaierror as error:
        raise NoPeersError(f"MASTER_ADDR={processes.address} is not the name of a host: {error.strerror}") from error
    except RuntimeError as error:  # DistNetworkError, DistStoreError and gloo's errors
        if not processes.is_launched:
            raise
        who = f"process {processes.rank} of {processes.world_size} did not reach the others"
        raise no_peers(processes, timeout, who, str(error).splitlines()[0]) from error


def no_peers(processes: Processes, timeout: float, who: str, reason: str) -> NoPeersError:
    """Return the error that `who` has not come in time."""
    where = f"{processes.address}:{processes.port} within {timeout:g} s (collective_timeout; gloo: five times as long)"
    remedy = "start all with one MASTER_ADDR and MASTER_PORT, open all ports, name the network in GLOO_SOCKET_IFNAME"
    return NoPeersError(f"{who} through {where}: {remedy}, or raise --collective_timeout ({reason})")


def _problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with the variables."""
    numbers: dict[str, int] = {}
    for name in VARIABLES:
        text = environment.get(name)
        if text is None:
            yield Problem(name, "is not set")
        elif not text:
            yield Problem(f"{name}=", "is empty")
        elif name == "MASTER_ADDR":
            if not _may_be_host(text):
                yield Problem(f"{name}={text}", "is not the name or the address of a host")
        elif text.isascii() and text.isdigit() and len(text) < 10:
            numbers[name] = int(text)
        else:
            yield Problem(f"{name}={text}", "is not a whole number")
    for name, number in numbers.items():
        if contradiction := _contradiction(name, number, numbers):
            yield Problem(f"{name}={environment[name]}", contradiction)


def _may_be_host(text: str) -> bool:
    """Return whether the name can be looked up: its labels have 1 to 63 characters."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def _contradiction(name: str, number: int, numbers: Mapping[str, int]) -> str | None:
    if name.endswith("WORLD_SIZE") and number < 1:
        return "is not at least 1"
    if name == "MASTER_PORT" and not 1 <= number <= 65535:
        return "is not a port from 1 to 65535"
    if name == "LOCAL_WORLD_SIZE" and number > numbers.get("WORLD_SIZE", number):
        return f"is above WORLD_SIZE={numbers['WORLD_SIZE']}"
    if name == "LOCAL_RANK" and number > numbers.get("RANK", number):
        return f"is above RANK={numbers['RANK']}"
    bound = name.replace("RANK", "WORLD_SIZE")
    if name.endswith("RANK") and number >= numbers.get(bound, number + 1):
        return f"is not below {bound}={numbers[bound]}"
    return None
