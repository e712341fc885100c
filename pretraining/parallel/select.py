"""Choice of the engine. Only the chosen engine is imported, so that the other one's packages may be absent."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from pretraining.config.errors import ConfigError, UserError, counted
from pretraining.config.support import unsupported
from pretraining.config.training import TrainConfig
from pretraining.parallel import accelerator
from pretraining.parallel.engine import Engine
from pretraining.parallel.processes import read_processes

# Variables with which torch-xla casts every fp32 tensor to 16 bits
DOWNCAST_VARIABLES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16")


def open_engine(config: TrainConfig) -> Engine:
    """Open the engine that `config` asks for; process 0 prints which one it is and why.

    Raises ConfigError with every setting that the engine does not support, before it opens a device.
    """
    name, reason = choose_engine(config)
    device = accelerator.device_type(config.device) if name == "torch" else None
    if problems := list(unsupported(config, name, device)):
        raise ConfigError(problems)
    if name == "xla":
        refuse_variables()
    engine: Engine = engine_class(config, name)(config)
    if engine.process_index == 0:
        lines = (f"engine: {name} on {engine.device_name} ({reason})", *engine.remarks)
        print(config.printed("\n  ".join(lines)), flush=True)
    return engine


def choose_engine(config: TrainConfig) -> tuple[str, str]:
    """Return the engine's name and the reason, from the flags, the devices and the installed packages."""
    if config.engine == "xla":
        if not _has_xla():
            remedy = "it is made for Linux on x86-64 and Python 3.11 to 3.13; --engine=torch runs on CUDA and CPUs"
            raise UserError(f"--engine=xla, but the package torch_xla is not installed: {remedy}")
        return "xla", "--engine"
    kind, count = accelerator.find_devices()
    kind = kind if config.device == "auto" else config.device
    row = accelerator.accelerator_of(config, kind)
    caveat = f", {row.caveat}" if row.caveat else ""
    if config.engine == "torch":
        return "torch", f"--engine{caveat}"
    if config.device != "auto":
        return "torch", f"--device={kind}{caveat}"
    if count:
        return "torch", f"{counted(count, row.title)} found{caveat}"
    if read_processes().world_size > 1:
        return "torch", "several processes per host, and xla uses one"
    if _has_xla():
        return "xla", "no CUDA GPU found, torch-xla is installed"
    return "torch", "no CUDA GPU found, torch-xla is not installed"


def _has_xla() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def refuse_variables() -> None:
    """Raise UserError where an environment variable would override --precision, the CPU has no virtual device, or a
    launcher has started several processes, each of which would train alone."""
    is_set = {name: os.environ.get(name, "").lower() not in ("", "0", "false") for name in DOWNCAST_VARIABLES}
    if settings := [f"{name}={os.environ[name]}" for name in DOWNCAST_VARIABLES if is_set[name]]:
        remedy = "unset it and use --precision (bf16_sr keeps no fp32 copy)"
        raise UserError(f"{', '.join(settings)} in the environment casts all fp32 tensors to 16 bits: {remedy}")
    devices, is_cpu = os.environ.get("CPU_NUM_DEVICES", "1"), os.environ.get("PJRT_DEVICE", "CPU") == "CPU"
    if is_cpu and (count := read_processes().world_size) > 1:
        raise UserError(f"--engine=xla trains on CPUs in one process, and there are {count}: use --engine=torch")
    if is_cpu and not (devices.isdecimal() and int(devices)):
        remedy = "set it to a number of virtual devices, or unset it"
        raise UserError(f"CPU_NUM_DEVICES={devices} in the environment: {remedy}")


def engine_class(config: TrainConfig, name: str) -> Any:
    """Return the class of the engine that runs `config`, and import no other."""
    if extended := config.engine_class(name):
        return extended
    if name == "xla":
        from pretraining.parallel.xla.engine import XlaEngine

        return XlaEngine
    from pretraining.parallel.torch.engine import TorchEngine

    return TorchEngine
