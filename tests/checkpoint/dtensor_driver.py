"""Two gloo processes: saves DTensors of several placements, or loads them into others; run under torchrun's variables.

python dtensor_driver.py FOLDER save|load|hosts. hosts: each process is a host with a folder of its own. It saves there,
and loads what it needs with the same placements, but not with others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
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
    folder, act = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    facts = Facts(1, 0, {}, {}, "torch", {"shard": 2})
    if act == "load":
        load_and_compare(folder, state_of(1, zero=True))
    elif act == "save":
        save(folder, state_of(0), facts)
    else:
        from pretraining.extensions.local_tier.saving import HostSave, check_host_has_all

        os.environ["LOCAL_RANK"], folder = "0", folder / f"host{dist.get_rank()}"
        HostSave(folder, state_of(0), facts, Peers()).write()
        load_and_compare(folder, state_of(0, zero=True))
        check_host_has_all(open_checkpoint(folder / "step_1"), state_of(0))
        try:
            check_host_has_all(open_checkpoint(folder / "step_1"), state_of(1))
        except UnreadableError as error:
            print(error)
    dist.destroy_process_group()


def state_of(choice: int, zero: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors, or zeros, distributed by the first or the second placements."""
    mesh = init_device_mesh("cpu", (2,))
    source = {name: torch.zeros_like(tensor) if zero else tensor for name, tensor in reference().items()}
    return {name: distribute_tensor(tensor, mesh, [PLACEMENTS[name][choice]]) for name, tensor in source.items()}


def load_and_compare(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Load, and compare with what was saved."""
    load(open_checkpoint(folder / "step_1"), state)
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor) and torch.equal(tensor.full_tensor(), reference()[name]), name


if __name__ == "__main__":
    main()
