"""The torch engine's device, selected by name. The only module that uses torch.cuda."""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.config.errors import UserError
from pretraining.parallel.processes import read_processes

MEMORY_EVENTS = 100_000  # kept allocations and frees: some steps of a small model, about 100 MB of file


def cuda_gpus() -> int:
    """Return the number of CUDA GPUs that this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_type(name: str) -> str:
    """Return the type of device that `name` stands for: itself, or for "auto" cuda where there is a GPU, else cpu."""
    if name != "auto":
        return name
    return "cuda" if cuda_gpus() else "cpu"


def open_device(name: str) -> torch.device:
    """Return this process's device: of several GPUs the one of its local rank. Raises UserError if there is none."""
    name = device_type(name)
    if name == "cpu":
        return torch.device("cpu")
    if name == "tpu":
        return _open_tpu()
    local, gpus = read_processes().local_rank, cuda_gpus()
    if not gpus:
        raise UserError("--device=cuda, but PyTorch finds no CUDA GPU; leave the flag out, or use --device=cpu")
    if local >= gpus:
        raise UserError(
            f"process {local} of this host has no GPU: there are {gpus}; use NPROC_PER_NODE={gpus} or fewer"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _open_tpu() -> torch.device:
    if importlib.util.find_spec("torch_tpu") is None:
        raise UserError("--device=tpu needs the package torch_tpu (TorchTPU); without it, TPUs run with --engine=xla")
    importlib.import_module("torch_tpu")
    return torch.device("tpu")


def backend_of(device: torch.device) -> str:
    """Return torch.distributed's backend for tensors on `device`; objects and barriers use gloo on the CPU."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def device_name(device: torch.device) -> str:
    """Return the name as in config/devices.py: "NVIDIA H200", "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak bytes allocated on a GPU, or the process's peak on a CPU; None where the device reports none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return None


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record_memory() -> None:
    """Start recording every allocation on the GPU with its stack trace."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)


def dump_memory(path: Path) -> None:
    """Write the recorded allocations for pytorch.org/memory_viz, and stop recording."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def compiles(device: torch.device) -> bool:
    """Return whether torch.compile pays: on CPUs matrix products dominate, and eager code starts at once."""
    return device.type == "cuda"
