"""The torch engine's devices, by name: one table of what differs between them. The core names devices here alone.

The table has what torch.accelerator cannot answer. A new kind of device is a row, here or in extensions/accelerators,
and a choice of --device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from pretraining.config.errors import UserError
from pretraining.config.training import SETTINGS, TrainConfig
from pretraining.models.ops import Kernel
from pretraining.parallel.processes import Processes, read_processes


def linked_processes(processes: Processes) -> tuple[int, str]:
    """Return how many processes have devices with fast links between all of them, and why: those of a host."""
    return (count := processes.local_world_size), f"a host has {count} process{'es' if count > 1 else ''}"


class Accelerator(NamedTuple):
    """What the torch engine must know about a type of device. The defaults are for one that nobody has tried."""

    title: str  # in messages; torch's name of a device (device_name) selects its peak figures
    backend: str  # of torch.distributed for its tensors
    compile: Mapping[str, Any] | None = None  # arguments of torch.compile; None: nobody has tried
    kernel: Kernel = "chunked"  # of causal attention
    has_kernel: Callable[[torch.dtype, int], bool] = lambda dtype, width: True  # for q of this dtype and head width
    other_kernel: Kernel = "chunked"  # where it has none
    skips_masked_blocks: bool = False  # whether flex_attention computes no empty block of a mask
    widens_lookups: bool = True  # whether it sums the gradients of a lookup in no wider dtype: see llama.Embedding
    divides_gradients: bool = False  # whether its fused AdamW divides gradients in place, at no cost in memory traffic
    pins_memory: bool = False  # whether a copy from pinned memory does not wait for the device
    after_sharding: Callable[[nn.Module], None] = lambda module: None  # called with a module that FSDP2 has sharded
    fuse: Callable[[], AbstractContextManager[None]] = nullcontext  # around a step: fuses what is not compiled
    mixed_matmul_precision: str = "highest"  # of fp32 products in a run whose other products are 16 bits wide
    package: str = ""  # that registers the device with torch, and is imported for it alone
    install: str = ""  # how to get the package
    launch_variables: tuple[str, ...] = ()  # the same in all processes; set before they start, each with one device
    linked: Callable[[Processes], tuple[int, str]] = linked_processes  # how many have fast links between all, and why
    caveat: str = ""  # printed with the choice of the device

    def kernel_of(self, dtype: torch.dtype, head_width: int) -> Kernel:
        """Return how causal attention is computed for q of this dtype and head width."""
        return self.kernel if self.has_kernel(dtype, head_width) else self.other_kernel


ACCELERATORS = {
    "cpu": Accelerator("CPU", "gloo", {"dynamic": False}, kernel="repeated", divides_gradients=True),
    "cuda": Accelerator(
        "CUDA GPU",
        "nccl",
        compile={},
        kernel="grouped",
        has_kernel=lambda dtype, width: dtype.itemsize == 2 and width <= 256,
        other_kernel="repeated",  # that of other dtypes and widths takes no shared keys: all scores would exist
        skips_masked_blocks=True,
        # Its kernel, and inductor's, sum in fp32 (ATen's Embedding.cu: up to 3,072 tokens, 32 of them at a time)
        widens_lookups=False,
        divides_gradients=True,
        pins_memory=True,
    ),
}
HOST = torch.device("cpu")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt, from malloc.h; a threshold of -1 is none


def accelerator_of(config: TrainConfig, kind: str) -> Accelerator:
    """Return the row of a type of device: the core's, or an extension's. Raises UserError if there is none."""
    return ACCELERATORS[kind] if kind in ACCELERATORS else config.accelerator(kind)


def chooses_compile(row: Accelerator, device: torch.device, choice: bool | None) -> bool:
    """Return whether blocks are compiled; on CPUs, where eager code starts at once, only if the user says so.

    Raises UserError without the compiler that torch calls there.
    """
    if choice and device == HOST and not shutil.which(cxx := os.environ.get("CXX", "g++")):
        raise UserError(f"--use_torch_compile=True: on a CPU it needs the C++ compiler {cxx}; install it, or use False")
    return row.compile is not None and (device != HOST if choice is None else choice)


def find_devices() -> tuple[str, int]:
    """Return the type of this host's accelerator, of those that --device offers, and how many this process can use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or SETTINGS["device"].fault(accelerator.type):
        return HOST.type, 0
    return accelerator.type, torch.accelerator.device_count()


def device_type(name: str) -> str:
    """Return the type of device that `name` stands for: itself, or for "auto" the accelerator if there is one."""
    return find_devices()[0] if name == "auto" else name


def open_device(config: TrainConfig) -> torch.device:
    """Return this process's device: of several GPUs the one of its local rank. Raises UserError if there is none."""
    name, processes = device_type(config.device), read_processes()
    row = accelerator_of(config, name)
    if name == HOST.type:
        keep_freed_memory()
        return HOST
    if row.package:
        if importlib.util.find_spec(row.package) is None:
            raise UserError(f"--device={name} needs the package {row.package}: {row.install}")
        importlib.import_module(row.package)
    found, count = find_devices()
    if found != name:
        raise UserError(f"--device={name}, but PyTorch finds no {row.title}; leave the flag out, or use --device=cpu")
    if row.launch_variables:
        missing = [variable for variable in row.launch_variables if variable not in os.environ]
        if missing and processes.is_launched:
            remedy = "start the processes with `ENGINE=torch bash scripts/train.sh`, which sets it"
            raise UserError(f"{missing[0]} is not set: {remedy}")
        return torch.device(name)
    if processes.local_rank >= count:
        remedy = f"there are {count}; use NPROC_PER_NODE={count} or fewer"
        raise UserError(f"process {processes.local_rank} of this host has no GPU: {remedy}")
    torch.accelerator.set_device_index(processes.local_rank)
    return torch.device(name, processes.local_rank)


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors for later ones.

    It returns tensors of more than 32 MiB to the system, which clears every page that it gives out: 0.29 of the 1.79
    CPU s of a step of the tiny model, with the same peak memory (benchmarks/RESULTS.md).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)


def backend_of(row: Accelerator, device: torch.device) -> str:
    """Return torch.distributed's backend for tensors on `device`; objects and barriers use gloo on the CPU."""
    host = f"{HOST.type}:{ACCELERATORS[HOST.type].backend}"
    return row.backend if device == HOST else f"{host},{device.type}:{row.backend}"


def set_matmul_precision(row: Accelerator, compute: torch.dtype) -> None:
    """Choose the precision of fp32 products, before anything is compiled: "highest" unless the run's are 16 bits wide.

    A TPU otherwise rounds their factors to bf16.
    """
    is_fp32 = compute == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.9 announces other names for TF32's switches
        torch.set_float32_matmul_precision("highest" if is_fp32 else row.mixed_matmul_precision)


def device_name(device: torch.device) -> str:
    """Return the name as extensions/devices.py has it: "NVIDIA H200", "TPU v5e", "CPU"."""
    if device == HOST:
        return ACCELERATORS[HOST.type].title
    module: Any = torch.get_device_module(device)
    return module.get_device_name(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak bytes allocated on a device, or the process's peak on a CPU; None where it reports none."""
    if device == HOST:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated() or None
