"""Save, load and stall of a step on two gloo processes, next to what people would use instead.

    python -m benchmarks.peers.checkpoint --folder=DIR [--turns=5] [--parameters=5e7]

The same tensors (parameters and two moments in fp32, 12 bytes per parameter), sharded over both processes as FSDP2
does it. Every save ends with its files on the disk: where a library does not call fsync, the benchmark does, and counts
it. Loads are cold, and their tensors are compared. The stall is what a step waits for an asynchronous save, without the
first one, which allocates host memory. "plain": each process writes its bytes to one file with fsync, and reads it.
CPU seconds are of both processes, the clock that of the slower one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.checkpoint import BLOCK, FACTS, evict, plain_read, plain_write, shapes
from benchmarks.peers.turns import Figures, options_of, print_facts, print_table, take_turns, versions
from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import load
from pretraining.extensions.async_checkpointing import AsyncCheckpointingConfig

PROCESSES = 2
State = dict[str, Any]  # name -> DTensor
PEERS = ("torch.distributed.checkpoint", "safetensors.save_file")
NOT_DONE = {
    "ours": "hashes every chunk and compares on load; removes the earlier checkpoint in a thread, after the save",
    PEERS[0]: "fsync of files, none of the folder; no hashes; overwrites the earlier checkpoint",
    PEERS[1]: "a file per process for the same mesh only; no fsync, hashes or asynchronous save; overwrites",
}


class Contender:
    """What is measured. Methods are collective."""

    def __init__(self, folder: Path) -> None:
        """folder: of its own, the same on both processes."""
        self.folder = folder

    def save(self, state: State) -> None:
        """Save until the files are on the disk."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the save has left the disk alone."""

    def load(self, state: State) -> None:
        """Fill the tensors."""
        raise NotImplementedError

    def start(self, state: State) -> Callable[[], object] | None:
        """Start an asynchronous save; return what waits for its end. None: there is none."""
        return None

    def close(self) -> None:
        """Release the folder."""


class Ours(Contender):
    """This repository's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._runs = {way: self._open(way) for way in (False, True)}
        self._step = 0

    def _open(self, is_async: bool) -> Checkpoints:
        config = AsyncCheckpointingConfig(async_checkpointing=is_async, keep_last_n_checkpoints=1, resume="never")
        return Checkpoints(config, self.folder / str(is_async))

    def _save(self, state: State, is_async: bool) -> Checkpoints:
        self._step += 1
        self._runs[is_async].save(state, replace(FACTS, step=self._step))
        return self._runs[is_async]

    def save(self, state: State) -> None:
        self._save(state, False)

    def settle(self) -> None:
        self._runs[False].wait()  # a thread removes the checkpoint before, which shares the disk with a load

    def start(self, state: State) -> Callable[[], object]:
        return self._save(state, True).wait

    def load(self, state: State) -> None:
        load(open_checkpoint(self._runs[False].folder / f"step_{self._runs[False].newest}"), state, Peers())

    def close(self) -> None:
        for run in self._runs.values():
            run.close()


class Dcp(Contender):
    """torch.distributed.checkpoint, with fsync, which is its default, one file per process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._group = dist.new_group(backend="gloo")  # of saves in the background, as its documentation wants

    def _writer(self) -> FileSystemWriter:
        return FileSystemWriter(self.folder / "step", sync_files=True, overwrite=True)

    def save(self, state: State) -> None:
        save(state, storage_writer=self._writer())

    def start(self, state: State) -> Callable[[], object]:
        future = async_save(state, storage_writer=self._writer(), process_group=self._group)
        return future.result  # type: ignore[union-attr]

    def load(self, state: State) -> None:
        dcp_load(state, storage_reader=FileSystemReader(self.folder / "step"))


class SafeTensors(Contender):
    """A file of each process's shards."""

    @property
    def _file(self) -> Path:
        return self.folder / f"{dist.get_rank()}.safetensors"

    def save(self, state: State) -> None:
        self.folder.mkdir(exist_ok=True)
        save_file({name: tensor.to_local() for name, tensor in state.items()}, self._file)
        with self._file.open("rb") as file:
            os.fsync(file.fileno())

    def load(self, state: State) -> None:
        for name, tensor in load_file(self._file).items():
            state[name].to_local().copy_(tensor)


class Plain(Contender):
    """The limit: one sequential write and read of the same bytes by each process."""

    @property
    def _own(self) -> Path:
        return self.folder / str(dist.get_rank())

    def save(self, state: State) -> None:
        self.folder.mkdir(exist_ok=True)
        shutil.rmtree(self._own, ignore_errors=True)
        plain_write(self._own, {name: tensor.to_local() for name, tensor in state.items()})

    def load(self, state: State) -> None:
        plain_read(self._own, bytearray(BLOCK))


CONTENDERS: dict[str, type[Contender]] = {"ours": Ours, PEERS[0]: Dcp, PEERS[1]: SafeTensors, "plain": Plain}


def timed(name: str, act: Callable[[], object]) -> Figures:
    """Return the clock of the slower process, and the CPU seconds of both."""
    dist.barrier()
    began_cpu, began = time.process_time(), time.perf_counter()
    act()
    clock, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    spent: list[Any] = [None] * PROCESSES
    dist.all_gather_object(spent, (clock, cpu))
    return {f"{name}, s": max(each[0] for each in spent), f"{name}, CPU s": sum(each[1] for each in spent)}


def drop_caches(folder: Path) -> None:
    """Have the next reads go to the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        evict(folder)
    dist.barrier()


def measure(name: str, contender: Contender, state: State) -> Figures:
    """Save, load, and save asynchronously."""
    figures = timed("save", lambda: contender.save(state))
    contender.settle()
    drop_caches(contender.folder)
    other: State = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    figures |= timed("load", lambda: contender.load(other))
    if name != "plain":
        assert all(torch.equal(other[key].to_local(), tensor.to_local()) for key, tensor in state.items()), name
    waits: list[Callable[[], object] | None] = []
    stall = timed("stall of a step", lambda: waits.append(contender.start(state)))
    for wait in waits:
        if wait:
            figures |= stall | timed("rest of the asynchronous save", wait)
    return figures


def work(rank: int, folder: Path, parameters: int, turns: int) -> None:
    """Run one of the two processes; the first one prints."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    torch.set_num_threads(1)
    if rank:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    mesh = init_device_mesh("cpu", (PROCESSES,))
    torch.manual_seed(0)
    state: State = {
        name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for name, shape in shapes(parameters).items()
    }
    local = sum(tensor.to_local().nbytes for tensor in state.values() if isinstance(tensor, DTensor))
    print(f"{local * PROCESSES / 1e9:.2f} GB on {PROCESSES} processes")
    contenders = {name: kind(folder / name.replace(".", "_")) for name, kind in CONTENDERS.items()}
    for name, contender in contenders.items():
        measure(name, contender, state)  # the first asynchronous save allocates
    samples = take_turns(list(contenders), turns, lambda name: measure(name, contenders[name], state))
    print_table(samples, PEERS)
    for name, text in NOT_DONE.items():
        print(f"{name}: {text}")
    for contender in contenders.values():
        contender.close()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = options_of(__doc__, python=False)
    parser.add_argument("--folder", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--parameters", type=float, default=5e7)
    options = parser.parse_args()
    print_facts(versions(["torch", "safetensors"]))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        spawn(work, (Path(folder), int(options.parameters), options.turns), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
