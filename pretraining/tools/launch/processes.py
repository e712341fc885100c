"""The processes of a run on this host: how many, with which of torchrun's variables, and how they end.

torchrun itself listens on all interfaces, also for a single host, and hides the exit codes of its processes; here
process 0 opens the port, of a single host on the loopback address. Imports no torch.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from pretraining.config.errors import UserError
from pretraining.extensions.schedulers import COUNTS, describe_job

PATIENCE = 30.0  # s after which the processes that are left are killed; see interrupt.RENDEZVOUS
NUMBERS = ("NPROC", "NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_PORT", "MAX_RESTARTS")
# NCCL's flight recorder: after collective_timeout, each process writes its last collectives to /tmp/nccl_trace_rank_N
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
# Prints what all processes of TorchTPU must agree on before one of them starts, and the chips of this host as NPROC.
TPU_VARIABLES = """import os, torch
known = set(os.environ)
torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=int(os.environ.get("NPROC") or 0) or None)
print(*(f"{name}={os.environ[name]}" for name in os.environ if name not in known), sep="\\n")
devices = len(os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(","))
print("NPROC", devices // int(os.environ.get("NNODES", 1)), sep="=")"""


# ---- How many processes


def check_variables(words: Sequence[str], uses_torch_tpu: bool) -> None:
    """Raise UserError for a variable that a launch could not use, and for one that several hosts lack.

    words: the flags of the run.
    """
    for name in NUMBERS:
        text = os.environ.get(name, "")
        if text and not re.fullmatch("0|[1-9][0-9]{0,5}", text):
            raise UserError(f"{name}={text} is not a whole number")
    if os.environ.get("NNODES") == "0":
        raise UserError("NNODES=0: a run has one host or more; one host needs no NNODES")
    counts = {name: number(name, 0) for name in ("NPROC", "NPROC_PER_NODE") if number(name, 0)}
    if len(set(counts.values())) > 1:
        listed = " and ".join(f"{name}={count}" for name, count in counts.items())
        raise UserError(f"{listed}: two numbers of processes per host; set one of them")
    if uses_torch_tpu or uses_one_process(words):
        return
    schedulers = {**COUNTS, "WORLD_SIZE": "a scheduler"}  # PyTorchJob's is that of its pods
    if job := describe_job(counts=schedulers):
        raise UserError(
            f"{job}, and each would train alone, because NNODES is not set: each host needs NNODES, NODE_RANK and "
            "MASTER_ADDR, the name or address of host 0; NNODES=1 means that each is a run of its own"
        )
    if (hosts := number("NNODES", 1)) <= 1:
        return
    for name in ("NODE_RANK", "MASTER_ADDR"):
        if not os.environ.get(name):
            raise UserError(
                f"NNODES={hosts}, but {name} is not set: each host needs NODE_RANK, its number from 0 to {hosts - 1}, "
                "and MASTER_ADDR, the name or address of host 0"
            )
    if number("NODE_RANK", 0) >= hosts:
        raise UserError(f"NODE_RANK={number('NODE_RANK', 0)} is not below NNODES={hosts}: hosts are counted from 0")


def number(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return a variable that check_variables has accepted; an empty one counts as not set."""
    return int(environment.get(name) or default)


def uses_one_process(words: Sequence[str]) -> bool:
    """Return whether each host has one process, which finds the others itself: the xla engine, unless on CPUs."""
    engine, device = value_of("--engine", words), value_of("--device", words)
    is_torch = engine == "torch" or (not engine and device not in ("", "auto"))
    if number("NNODES", 1) > 1 and (is_torch or os.environ.get("PJRT_DEVICE") == "CPU"):
        return False
    return engine == "xla" or (bool(os.environ.get("PJRT_DEVICE")) and process_count(default=1) == 1)


def value_of(flag: str, words: Sequence[str]) -> str:
    """Return the last value of a flag, as `flag=value` or as `flag value`; empty if it is not there."""
    values = [""]
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == flag or word.startswith(f"{flag}="):
            values.append(following if word == flag else word.removeprefix(f"{flag}="))
    return values[-1]


def process_count(default: int) -> int:
    """Return NPROC or NPROC_PER_NODE."""
    return number("NPROC", 0) or number("NPROC_PER_NODE", 0) or default


def environments(words: Sequence[str], gpus: int, uses_torch_tpu: bool) -> list[dict[str, str]]:
    """Return the environment of each process of this host.

    gpus: CUDA GPUs of this host. Raises CalledProcessError if TorchTPU does not find its devices.
    """
    environment = dict(os.environ)
    environment["NPROC"] = str(process_count(default=0 if uses_torch_tpu else max(gpus, 1)) or "")
    if uses_torch_tpu:
        environment |= tpu_variables(environment)
    elif int(environment["NPROC"]) * number("NNODES", 1) <= 1 or uses_one_process(words):
        return [dict(os.environ)]
    environment = FLIGHT_RECORDER | environment
    return [environment | variables for variables in torchrun_variables(environment)]


def tpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what TorchTPU sets for all processes of this host."""
    done = subprocess.run([sys.executable, "-c", TPU_VARIABLES], env=environment, stdout=subprocess.PIPE, check=True)
    return dict(re.findall("^([A-Z_]+)=(.*)$", done.stdout.decode(), re.MULTILINE))


def torchrun_variables(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return torchrun's variables for each process of this host, from NPROC, NNODES, NODE_RANK and MASTER_*."""
    names = {"NPROC": 1, "NNODES": 1, "NODE_RANK": 0, "MASTER_PORT": 29500}
    count, hosts, host, port = (number(name, default, environment) for name, default in names.items())
    address = environment.get("MASTER_ADDR", "")
    common = {"WORLD_SIZE": str(count * hosts), "LOCAL_WORLD_SIZE": str(count)}
    if count > 1:
        common["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", "1")  # as torchrun does
    if hosts == 1:
        address = "127.0.0.1"
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        if "lo" in (name for _, name in socket.if_nameindex()):
            common["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
    common |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(host * count + rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


# ---- Their life


class Launcher:
    """Starts processes and waits for them.

    Passes SIGTERM on. The terminal sends SIGINT to all processes by itself, and a second one would end them at once.
    """

    def __init__(self) -> None:
        self.signal = 0  # the last that this process was sent
        self._processes: list[subprocess.Popen[bytes]] = []
        for number_ in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number_, self._receive)

    def _receive(self, number_: int, _: object) -> None:
        self.signal = number_
        if number_ == signal.SIGTERM:
            self._terminate()

    def _terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Run a process in each environment. Return 0, or the exit code of the first that failed, as a shell counts."""
        self._processes.clear()
        for environment in environments:
            self._processes.append(subprocess.Popen(command, env=environment))
        if self.signal == signal.SIGTERM:  # while they were started
            self._terminate()
        return self._wait()

    def pause(self, seconds: float) -> bool:
        """Wait. Return whether a signal has come."""
        deadline = time.monotonic() + seconds
        while not self.signal and time.monotonic() < deadline:
            time.sleep(0.05)
        return bool(self.signal)

    def _wait(self) -> int:
        """Wait until all have ended; when one fails, end the others, which cannot continue without it.

        After a signal they are not sent another one, which would end them without saving.
        """
        processes, failed, deadline = self._processes, 0, 0.0
        while running := [process for process in processes if process.poll() is None]:
            codes = [process.returncode for process in processes if process.returncode]
            if codes and not failed:
                failed, deadline = codes[0], time.monotonic() + PATIENCE
                for process in running if not self.signal else []:
                    process.terminate()
            if failed and time.monotonic() > deadline:
                for process in running:
                    process.kill()
            time.sleep(0.1)
        failed = failed or next((process.returncode for process in processes if process.returncode), 0)
        if failed < 0:
            cause = "; the kernel sends it where memory runs out" if -failed == signal.SIGKILL else ""
            name = signal.Signals(-failed).name
            print(f"a process of this host was ended by {name}{cause}", file=sys.stderr, flush=True)
        return failed if failed >= 0 else 128 - failed
