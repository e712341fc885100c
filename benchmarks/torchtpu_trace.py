"""Lower a step of the torch engine for TPUs with torch_tpu: process 0 of a slice where nothing runs.

    .venv-torchtpu/bin/python -m benchmarks.torchtpu_trace FOLDER '{"field": value}'

benchmarks/torchtpu_compiler.py runs it, in the environment of a launched process. The emulated TPU of the tests
(tests/parallel/torchtpu) takes programs and gives zeros, which need no memory before they are written. Writes
FOLDER/<program>.mlir, its compile options, and FOLDER/runs.json: in order, the programs that the third step runs with
the bytes that exist on the device then, and the bytes that exist before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from main_training import CONFIGURATION
from pretraining.tools.plan.devices import PLAN_KINDS
from tests.parallel.torchtpu import plugin, programs
from tests.parallel.torchtpu.programs import WORLD

CONFIG = CONFIGURATION(**json.loads(sys.argv[2]))
WIDTH = int(CONFIG.plan_topology.split("x")[0])  # chips of the slice's first axis
TITLE = PLAN_KINDS[CONFIG.plan_device_kind].device.title  # which is torch_tpu's name of it, too
KIND = TITLE.replace("e", " lite")  # PJRT's: "TPU v6 lite"


class Buffer(programs.Buffer):
    """A tensor that counts its bytes."""

    live = 0

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        Buffer.live += array.nbytes

    def __del__(self) -> None:
        Buffer.live -= self.array.nbytes


class Program(programs.Program):
    """A program that is written to a folder, and gives zeros."""

    folder: Path
    runs: ClassVar[list[tuple[str, int]]] = []

    def _compile(self) -> None:
        self.name = hashlib.sha256(self.code + self.options).hexdigest()[:16]
        (self.folder / f"{self.name}.mlir").write_text(self.text)
        (self.folder / f"{self.name}.options").write_bytes(self.options)

    def run(self, buffers: list[programs.Buffer]) -> list[programs.Buffer]:
        """Return zeros."""
        Program.runs.append((self.name, Buffer.live))
        return [Buffer(np.zeros(shape, dtype)) for dtype, shape in self.results]


def join() -> None:
    """Join a group of processes that do not exist. torch must not be imported before the plugin is there."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

    class Peers(Store):
        """A store in which the other processes have said where their chips are, as torch_tpu 0.2.0 does."""

        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self.values[key] = value
            if key.endswith(":node:0"):
                group = key.removesuffix("node:0")
                self.values |= {f"{group}node:{index}": _entry(index) for index in range(1, WORLD)}
                self.values[f"{group}count"] = str(WORLD).encode()

        def get(self, key: str) -> bytes:
            return self.values[key]

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.values[key] for key in keys]

        def add(self, key: str, amount: int) -> int:
            count = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(count).encode()
            return count

        def check(self, keys: list[str]) -> bool:
            return all(key in self.values for key in keys)

        def wait(self, *_: Any) -> None:
            """Everything is there."""

    dist.init_process_group("tpu:tpu_dist", store=Peers(), rank=0, world_size=WORLD)


def start(folder: Path) -> None:
    """Import torch with one chip of the slice as its device, and join a group of processes that do not exist."""
    Program.folder = folder
    plugin.Program, plugin.Buffer, plugin.connect = Program, Buffer, lambda: ([], None)  # type: ignore
    plugin.FUNCTIONS["DeviceDescription_Kind"] = plugin._text("device_kind", KIND)
    plugin.OF_DEVICE[:] = [
        plugin._attributes({"coords": [*_place(index), 0], "core_on_chip": 0, "slice_index": 0, "num_cores": 1})
        for index in range(WORLD)
    ]
    plugin.start(Path(tempfile.mkdtemp()))
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_name = lambda: TITLE
    join()


def _place(index: int) -> tuple[int, int]:
    return index % WIDTH, index // WIDTH


def _entry(index: int) -> bytes:
    """Return what process `index` says: length-prefixed, a name and its device, process, coordinates and kind."""
    name, (x, y) = f"world_topo:{index}", _place(index)
    entry = f"{len(name)}:{name}{index},{index},{x},{y},0,0,0,{KIND}"
    return f"{len(entry)}:{entry}".encode()


def main(folder: Path) -> None:
    """Run three steps; see the module's docstring."""
    start(folder)
    import torch

    from pretraining.data import open_stream
    from pretraining.models.init import build_model
    from pretraining.parallel.select import engine_class
    from pretraining.parallel.torch import engine as torch_engine

    torch_engine.initial_weight = lambda _, name, shape: torch.zeros(1).expand(shape)  # type: ignore
    engine = engine_class(CONFIG, "torch")(CONFIG)
    trainee = engine.place(build_model(CONFIG))
    stream = open_stream(CONFIG, engine.data_rank, engine.data_size)
    for step in range(3):  # the first compiles and makes the optimizer's state
        Program.runs.clear()
        trainee.train_step(stream.batch(step), 1e-3).read()
    # Not what exists now: the arguments that a program may overwrite are still there
    (folder / "runs.json").write_text(json.dumps({"runs": Program.runs, "state": Program.runs[0][1]}))
    sys.stdout.flush()
    os._exit(0)  # as tests/parallel/torchtpu/driver.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
