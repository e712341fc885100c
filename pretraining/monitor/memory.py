"""Will the model's state fit? Asked before a byte of it is allocated.

Knows the configuration and the host, not the engine. Only what is certain is counted (parameters, gradients,
moments), so a refusal is never wrong; activations come on top.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import ModelShape
from pretraining.monitor.figures import amount, size

CGROUP = Path("/sys/fs/cgroup")  # of this container, version 2


class StateBytes(NamedTuple):
    """Bytes of one whole copy of the model's state."""

    parameters: int
    gradients: int
    moments: int  # the optimizer's: AdamW's two

    @property
    def total(self) -> int:
        return sum(self)


def check_memory(
    config: TrainConfig,
    shape: ModelShape,
    whole: StateBytes,
    *,
    state_copies: float,
    processes: int = 1,
    available: int | None = None,
) -> None:
    """Raise UserError if this host cannot hold what the run certainly allocates in host memory.

    whole: bytes of one copy of the state. state_copies: such copies that this host holds: where the devices are CPUs,
    the host's devices over those of a sharding group (8 virtual devices: 1 with fsdp, 8 with ddp); on accelerators 0.
    processes: on this host; each builds a whole model first unless low_cpu_fsdp. available: bytes; None asks the host.
    """
    free = available_memory() if available is None else available
    state = int(whole.total * state_copies)
    build = 0 if config.low_cpu_fsdp else 4 * shape.parameters * processes
    # The built model is gone before the moments are made, so the larger of the two decides, not their sum.
    if max(state, build) <= free:
        return
    needs = _state_text(shape, whole, state_copies) if state > free else f"{size(build)} to build the whole model first"
    remedy = _remedy(state, build, state_copies, free)
    raise UserError(
        f"--model_variant={config.model_variant} needs {needs}, but this host has {size(free)} of memory left; {remedy}"
    )


def _state_text(shape: ModelShape, whole: StateBytes, copies: float) -> str:
    parts = {name: size(count * copies) for name, count in whole._asdict().items()}
    listed = ", ".join(f"{name} {text}" for name, text in parts.items())
    each = f"{whole.total / shape.parameters:.3g} bytes for each of {amount(shape.parameters)} parameters"
    return f"at least {size(whole.total * copies)} ({listed}: {each}, {copies:g} x)"


def _remedy(state: int, build: int, copies: float, free: int) -> str:
    if state <= free:
        return "set --low_cpu_fsdp=True, which makes each shard in place"
    if copies > 1 and max(state / copies, build) <= free:
        return "set --sharding_strategy=fsdp, which keeps one copy"
    return "choose a smaller model, or run on more hosts or on accelerators"


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take: what the kernel has left, or the control group, if that is less."""
    limit = _text(cgroup / "memory.max")
    if not limit.isdigit():  # "max", or no control group
        return _kernel_available()
    # The page cache counts as used but is given back under pressure.
    cache = next(line.split()[1] for line in _text(cgroup / "memory.stat").splitlines() if line.startswith("file "))
    used = int(_text(cgroup / "memory.current")) - int(cache)
    return min(_kernel_available(), max(int(limit) - used, 0))


def _kernel_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS tells only the total


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
