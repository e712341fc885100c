"""Dispatches pairs of programs with collectives on all devices, a chain of products and a sum, and waits now and then.

PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 python in_flight_driver.py PAIRS

XLA's CPU client has threads for one collective at a time unless the engine asks for more; then pairs of programs hang
and XLA aborts the process after ten seconds.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import pretraining.parallel.xla.engine  # noqa: F401  # sets the number of threads

WIDTH, DEPTH = 64, 8


def main(pairs: int) -> None:
    """Dispatch this many pairs; print {"pairs": count} at the end."""
    xr.use_spmd()
    devices = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(devices), (devices,), ("x",))

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        """Share the rows out over the devices."""
        xs.mark_sharding(tensor, mesh, ("x", None))
        return tensor

    device = torch_xla.device()
    weights = [shard(torch.randn(WIDTH, WIDTH).to(device)) for _ in range(DEPTH)]
    small = shard(torch.randn(devices, 4).to(device))
    for pair in range(pairs):
        hidden = shard(torch.randn(WIDTH, WIDTH).to(device))
        for weight in weights:
            hidden = shard(torch.tanh(hidden @ (weight * 1.5)))
        torch_xla.sync(wait=False)
        total = small.sum(0) * (pair % 3)  # [4]
        torch_xla.sync(wait=False)
        both = hidden.sum(0) + total.sum()  # [WIDTH]
        torch_xla.sync(wait=False)
        if pair % 37 == 0:
            both.sum().item()
    print(json.dumps({"pairs": pairs}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
