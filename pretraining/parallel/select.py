"""Which engine runs a configuration. torch-xla is imported by the engine that needs it, and only then."""

from __future__ import annotations

import importlib.util
import os

from pretraining.config.errors import ConfigError, UserError
from pretraining.config.support import unsupported
from pretraining.config.training import TrainConfig
from pretraining.parallel import accelerator
from pretraining.parallel.engine import Engine

CASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16")  # torch-xla's variables
NO = ("", "0", "false")


def open_engine(config: TrainConfig) -> Engine:
    """Open the engine that `config` asks for; process 0 prints which one it is and why.

    Raises ConfigError with every setting that the engine does not support, before it opens a device.
    """
    name, reason = choose(config)
    if problems := list(unsupported(config, name, accelerator.device_type(config.device) if name == "torch" else None)):
        raise ConfigError(problems)
    engine = _open(config, name)
    if engine.process_index == 0:
        print(f"engine: {name} on {engine.device_name} ({reason})", flush=True)
    return engine


def choose(config: TrainConfig) -> tuple[str, str]:
    """The engine's name and the reason, from the flags, the devices and the packages that are there."""
    if config.engine == "xla":
        if not _has_xla():
            remedy = "it is made for Linux on x86-64; --engine=torch runs on CUDA and CPUs"
            raise UserError(f"--engine=xla, but the package torch_xla is not installed: {remedy}")
        return "xla", "as engine asks"
    untested = ", which nobody has tested" if config.device == "tpu" else ""
    if config.engine == "torch":
        return "torch", f"as engine asks{untested}"
    if config.device != "auto":
        return "torch", f"device={config.device} is its own{untested}"
    if gpus := accelerator.cuda_gpus():
        return "torch", f"{gpus} CUDA GPU{'s' * (gpus > 1)} here"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "torch", "several processes, where xla takes one per host"
    if _has_xla():
        return "xla", "no CUDA GPU here, torch-xla is installed"
    return "torch", "no CUDA GPU here, torch-xla is not installed"


def _has_xla() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def refuse_downcast_variables() -> None:
    """UserError where a variable would have torch-xla narrow every number behind the back of --precision."""
    given = [f"{name}={os.environ[name]}" for name in CASTS if os.environ.get(name, "0").lower() not in NO]
    if given:
        remedy = "unset it, and say what is meant with --precision (bf16_sr keeps no fp32 copy)"
        raise UserError(f"{', '.join(given)} in the environment turns all of torch-xla's fp32 into 16 bits; {remedy}")


def _open(config: TrainConfig, name: str) -> Engine:
    if name == "xla":
        refuse_downcast_variables()
        from pretraining.parallel.xla import XlaEngine

        return XlaEngine(config)
    from pretraining.parallel.torch_engine import TorchEngine

    return TorchEngine(config)
