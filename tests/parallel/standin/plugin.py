"""A device "neuron" of torch's PrivateUse1 that stands in for TorchNeuron's: the host's memory and the CPU's kernels.

What device.cpp does not have is here: the module torch.neuron, the backends of torch.distributed and torch.compile, and
the package torch_neuronx, whose import registers all of this.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

NAME = "neuron"
DEVICES = 4  # COUNT of device.cpp
SOURCE = Path(__file__).with_name("device.cpp")


def build(folder: Path) -> Path:
    """Compile device.cpp to a module in `folder`; return it."""
    package, target = Path(torch.__file__).parent, folder / "standin.so"
    includes = [package / "include", package / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    options = ["-O0", "-std=c++17", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=standin"]
    options += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{path}" for path in includes)]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", f"-Wl,-rpath,{package / 'lib'}"]
    command = ["g++", *options, str(SOURCE), "-o", str(target), f"-L{package / 'lib'}", *libraries]
    subprocess.run(command, check=True)
    return target


class Event:
    """An event of the only stream, on which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    wait = synchronize = record


class Stream(Event):
    """The only stream."""

    wait_event = wait_stream = Event.record

    def record_event(self, event: Event | None = None) -> Event:
        """Return the event."""
        return event or Event()


def device_module() -> ModuleType:
    """Return torch.neuron."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = lambda: int(os.environ.get("LOCAL_RANK", "0"))
    module.set_device = module.synchronize = module.manual_seed_all = lambda *_: None
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.get_device_name = lambda *_: "stand-in"
    module.Stream, module.Event = Stream, Event
    module.current_stream = lambda *_: Stream()
    module.stream = lambda _: nullcontext()
    return module


def run_eagerly(graph: fx.GraphModule, _: list[Tensor]) -> Any:
    """Compile a graph of torch.compile: run it as it is."""
    return graph.forward


def start(library: Path) -> None:
    """Register the device of `library`, which `build` has made."""
    rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location("standin", library)
    assert spec and spec.loader
    standin: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)
    torch._register_device_module(NAME, device_module())
    generate_methods_for_privateuse1_backend(for_storage=True)

    def collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return standin.Collectives(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(NAME, collectives, devices=[NAME])
    from torch._dynamo import register_backend

    register_backend(run_eagerly, name=NAME)
    package = ModuleType("torch_neuronx")
    package.__spec__ = importlib.machinery.ModuleSpec(package.__name__, None)
    sys.modules[package.__name__] = package
