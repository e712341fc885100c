"""The torch engine's devices, by name: one table of what differs between them. The core names devices here alone.

The table has what torch.accelerator cannot answer. A new kind of device is a row, and a choice of --device.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from pretraining.config.errors import UserError
from pretraining.config.training import SETTINGS
from pretraining.models.ops import Kernel
from pretraining.parallel.processes import Processes, read_processes
from pretraining.parallel.torch.tpu_compile import compile_for_tpu, fuse_operations


class Accelerator(NamedTuple):
    """What the torch engine must know about a type of device. The defaults are for one that nobody has tried."""

    title: str  # in messages; torch's name of a device (device_name) selects its peak figures
    backend: str  # of torch.distributed for its tensors
    compile: Mapping[str, Any] | None = None  # arguments of torch.compile; None: nobody has tried
    kernel: Kernel = "chunked"  # of causal attention
    has_kernel: Callable[[torch.dtype, int], bool] = lambda dtype, width: True  # for q of this dtype and head width
    skips_masked_blocks: bool = False  # whether flex_attention computes no empty block of a mask
    divides_gradients: bool = False  # whether its fused AdamW divides gradients in place, at no cost in memory traffic
    pins_memory: bool = False  # whether a copy from pinned memory does not wait for the device
    is_tiled: bool = False  # whether its memory is tiled, so that vectors are slower to move than rows (torch_flat.py)
    fuse: Callable[[], AbstractContextManager[None]] = nullcontext  # around a step: fuses what is not compiled
    mixed_matmul_precision: str = "highest"  # of fp32 products in a run whose other products are 16 bits wide
    package: str = ""  # that registers the device with torch, and is imported for it alone
    install: str = ""  # how to get the package
    launch_variables: tuple[str, ...] = ()  # the same in all processes; set before they start, each with one device
    caveat: str = ""  # printed with the choice of the device


def _torch_tpu_has_kernel(dtype: torch.dtype, width: int) -> bool:
    return dtype in (torch.float32, torch.bfloat16) and (width < 128 or width % 128 == 0)


SLICE_VARIABLE = "TORCH_TPU_TOPOLOGY"
ACCELERATORS = {
    "cpu": Accelerator("CPU", "gloo", {"dynamic": False}, kernel="repeated", divides_gradients=True),
    "cuda": Accelerator(
        "CUDA GPU", "nccl", {}, "grouped", skips_masked_blocks=True, divides_gradients=True, pins_memory=True
    ),
    # torch_tpu 0.2.0: the cache of compiled programs does not know the matmul precision, hence not serializable. Its
    # flex_attention computes all scores. fp32 products whose factors are bf16 are exact in one pass ("medium"). Its
    # fused AdamW writes divided gradients back to FSDP's buffers, and copies those: 104 GB for 8 B parameters on 16.
    # What a compiled block keeps is stored by its strides: to move queries and keys of one row of 4096 tokens that are
    # transposed views takes 35 million cycles in each backward pass.
    "tpu": Accelerator(
        "TPU",
        "tpu_dist",
        {"backend": compile_for_tpu, "dynamic": False, "options": {"serializable": False}},
        "contiguous",
        _torch_tpu_has_kernel,
        is_tiled=True,
        fuse=fuse_operations,
        mixed_matmul_precision="medium",
        package="torch_tpu",
        install="`ENGINE=torch bash scripts/train.sh` installs it on a host with TPUs; or use --engine=xla",
        launch_variables=(SLICE_VARIABLE, "TORCH_TPU_SLICEBUILDER_ADDRESSES"),
        caveat="not run on TPU hardware yet",
    ),
    # From AWS's documentation of torch-neuronx 2.13.
    "neuron": Accelerator(
        "NeuronCore",
        "neuron",
        {"backend": "neuron", "dynamic": False},
        package="torch_neuronx",
        install="docs/clusters.md says where it is",
        caveat="untested on hardware",
    ),
}
HOST = torch.device("cpu")


def chooses_compile(device: torch.device, choice: bool | None) -> bool:
    """Return whether blocks are compiled; on CPUs, where eager code starts at once, only if the user says so.

    Raises UserError without the compiler that torch calls there.
    """
    if choice and device == HOST and not shutil.which(cxx := os.environ.get("CXX", "g++")):
        raise UserError(f"--use_torch_compile=True: on a CPU it needs the C++ compiler {cxx}; install it, or use False")
    return ACCELERATORS[device.type].compile is not None and (device != HOST if choice is None else choice)


def find_devices() -> tuple[str, int]:
    """Return the type of this host's accelerator, of those that --device offers, and how many this process can use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or SETTINGS["device"].fault(accelerator.type):
        return HOST.type, 0
    return accelerator.type, torch.accelerator.device_count()


def device_type(name: str) -> str:
    """Return the type of device that `name` stands for: itself, or for "auto" the accelerator if there is one."""
    return find_devices()[0] if name == "auto" else name


def open_device(name: str) -> torch.device:
    """Return this process's device: of several GPUs the one of its local rank. Raises UserError if there is none."""
    name, processes = device_type(name), read_processes()
    row = ACCELERATORS[name]
    if name == HOST.type:
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


def linked_processes(processes: Processes) -> tuple[int, str]:
    """Return how many processes have devices with fast links between all of them, and why. Opens no device.

    TorchTPU's launch variable names the chips along each axis of a slice, and each process has one of them.
    """
    grid = os.environ.get(SLICE_VARIABLE, "")
    if not re.fullmatch(r"\d+(,\d+)*", grid):
        return processes.local_world_size, f"a host has {processes.local_world_size} processes"
    return (chips := math.prod(map(int, grid.split(",")))), f"a TPU slice has {chips} chips"


def backend_of(device: torch.device) -> str:
    """Return torch.distributed's backend for tensors on `device`; objects and barriers use gloo on the CPU."""
    backend, host_backend = ACCELERATORS[device.type].backend, ACCELERATORS[HOST.type].backend
    return backend if device == HOST else f"{HOST.type}:{host_backend},{device.type}:{backend}"


def kernel_of(device: torch.device, dtype: torch.dtype, head_width: int) -> Kernel:
    """Return how causal attention is computed on `device`."""
    row = ACCELERATORS[device.type]
    return row.kernel if row.has_kernel(dtype, head_width) else "chunked"


def set_matmul_precision(device: torch.device, compute: torch.dtype) -> None:
    """Choose the precision of fp32 products, before anything is compiled: "highest" unless the run's are 16 bits wide.

    A TPU otherwise rounds their factors to bf16.
    """
    is_fp32 = compute == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.9 announces other names for TF32's switches
        torch.set_float32_matmul_precision("highest" if is_fp32 else ACCELERATORS[device.type].mixed_matmul_precision)


def device_name(device: torch.device) -> str:
    """Return the name as in config/devices.py: "NVIDIA H200", "TPU v5e", "CPU"."""
    if device == HOST:
        return ACCELERATORS[HOST.type].title
    module: Any = torch.get_device_module(device)
    return module.get_device_name(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak bytes allocated on a device, or the process's peak on a CPU; None where it reports none."""
    if device == HOST:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated() or None


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its queued work."""
    if device != HOST:
        torch.accelerator.synchronize()
