"""Whether the model's state fits into the memory of this host, before any of it is allocated.

Does not depend on an engine. Counts only what is certain (parameters, gradients, moments), so a refusal is never
wrong; activations come on top.
"""

from __future__ import annotations

from collections.abc import Mapping

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.extensions.memory import available_memory
from pretraining.extensions.units import amount, size


def check_memory(
    config: TrainConfig,
    *,
    unsharded: Mapping[str, int],
    per_device: Mapping[str, int],
    host_devices: int,
    host_processes: int,
    available: int | None = None,
) -> None:
    """Raise UserError if this host cannot hold what the run certainly allocates in host memory.

    unsharded, per_device: bytes of "parameters", "gradients" and "moments", of one copy and of one device.
    host_devices: devices that keep their state in this host's memory; 0 for accelerators. host_processes: processes of
    this host; each builds the unsharded model first unless low_cpu_fsdp. available: bytes; None asks the host.
    """
    free = available_memory() if available is None else available
    state = host_devices * sum(per_device.values())
    parameters = model_shape(config).parameters
    build = 0 if config.low_cpu_fsdp else 4 * parameters * host_processes
    # The built model is freed before the moments are made, so the larger of the two decides, not their sum.
    if max(state, build) <= free:
        return
    if state > free:
        listed = ", ".join(f"{name} {size(count * host_devices)}" for name, count in per_device.items())
        holders = "one device" if host_devices == 1 else f"{host_devices} devices"
        needs = f"at least {size(state)} for the state of {holders} ({listed})"
    else:
        needs = f"{size(build)} to build the unsharded model in {host_processes} processes"
    subject = f"--model_variant={config.model_variant}, {amount(parameters)} parameters, needs {needs}"
    remedy = _remedy(state, build, sum(unsharded.values()), free)
    raise UserError(f"{subject}, but this host has {size(free)} of memory left; {remedy}")


def _remedy(state: int, build: int, unsharded: int, free: int) -> str:
    if state <= free:
        return "set --low_cpu_fsdp=True, which makes each shard in place"
    if state > unsharded and max(unsharded, build) <= free:
        return "set --sharding_strategy=fsdp, which keeps one copy"
    return "choose a smaller model, or run on more hosts or on accelerators"
