"""Start the processes of a run on this host: NPROC=2 python -m pretraining.run.launch PROGRAM [ARGUMENT ...]

Sets torchrun's environment variables, from NPROC and, of several hosts, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
torchrun itself listens on all interfaces, also for a single host, and hides the exit codes of its processes; here
process 0 opens the port, of a single host on the loopback address. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from pretraining.config.script import exit_with

PATIENCE = 30.0  # s after which the processes that are left are killed; see interrupt.RENDEZVOUS


def main() -> int:
    """Start the processes and wait for them. Return 0, or the exit code of the first that failed, as a shell counts."""
    processes: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def forward(number: int, _: object) -> None:
        signals.append(number)
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    for variables in variables_of_processes():
        processes.append(subprocess.Popen([sys.executable, *sys.argv[1:]], env=os.environ | variables))
    return wait_for(processes, signals)


def variables_of_processes() -> list[dict[str, str]]:
    """Return torchrun's variables for each process of this host."""
    names = {"NPROC": 1, "NNODES": 1, "NODE_RANK": 0, "MASTER_PORT": 29500}
    count, hosts, host, port = (int(os.environ.get(name) or default) for name, default in names.items())
    address = os.environ.get("MASTER_ADDR", "")
    common = {"WORLD_SIZE": str(count * hosts), "LOCAL_WORLD_SIZE": str(count)}
    if count > 1:
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # as torchrun does
    if hosts == 1:
        address = "127.0.0.1"
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        if "lo" in (name for _, name in socket.if_nameindex()):
            common["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    common |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(host * count + rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def wait_for(processes: list[subprocess.Popen[bytes]], signals: list[int]) -> int:
    """Wait until all have ended; when one fails, end the others, which cannot continue without it.

    signals: that the processes have been sent. They are not sent another one, which would end them without saving.
    """
    failed, deadline = 0, 0.0
    while running := [process for process in processes if process.poll() is None]:
        codes = [process.returncode for process in processes if process.returncode]
        if codes and not failed:
            failed, deadline = codes[0], time.monotonic() + PATIENCE
            for process in running if not signals else []:
                process.terminate()
        if failed and time.monotonic() > deadline:
            for process in running:
                process.kill()
        time.sleep(0.1)
    failed = failed or next((process.returncode for process in processes if process.returncode), 0)
    if failed < 0:
        print(f"a process of this host was ended by {signal.Signals(-failed).name}", file=sys.stderr, flush=True)
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    exit_with(main)
