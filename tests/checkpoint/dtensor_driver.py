"""Two gloo processes: saves DTensors of several placements, or loads them into others; run under torchrun's variables.

python dtensor_driver.py FOLDER save|load
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.store import load
from tests.checkpoint.saving import save

SHAPES = {"even": (8, 6), "uneven": (5, 3), "one_row": (1, 7), "optimizer.vector": (9,)}
PLACEMENTS: dict[str, tuple[Placement, Placement]] = {  # saved, loaded
    "even": (Shard(0), Shard(1)),
    "uneven": (Shard(1), Shard(0)),
    "one_row": (Shard(0), Replicate()),
    "optimizer.vector": (Replicate(), Shard(0)),
}


def reference() -> dict[str, torch.Tensor]:
    """The whole tensors."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def main() -> None:
    """See the module's docstring."""
    folder, loading = Path(sys.argv[1]), sys.argv[2] == "load"
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = reference()
    source = {name: torch.zeros_like(tensor) if loading else tensor for name, tensor in whole.items()}
    state = {name: distribute_tensor(tensor, mesh, [PLACEMENTS[name][loading]]) for name, tensor in source.items()}
    if loading:
        load(open_checkpoint(folder / "step_1"), state)
        for name, tensor in state.items():
            assert isinstance(tensor, DTensor) and torch.equal(tensor.full_tensor(), whole[name]), name
    else:
        save(folder, state, Facts(1, 0, {}, {}, "torch", {"shard": 2}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
