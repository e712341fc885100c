"""The rows of TPUs and NeuronCores: see parallel/accelerator.py."""

from __future__ import annotations

import math
import os
import re

import torch

from pretraining.extensions.accelerators.flat import use_rows
from pretraining.extensions.accelerators.tpu_compile import compile_for_tpu, fuse_operations
from pretraining.parallel.accelerator import Accelerator, linked_processes
from pretraining.parallel.processes import Processes

SLICE_VARIABLE = "TORCH_TPU_TOPOLOGY"


def _torch_tpu_has_kernel(dtype: torch.dtype, width: int) -> bool:
    return dtype in (torch.float32, torch.bfloat16) and (width < 128 or width % 128 == 0)


def linked_chips(processes: Processes) -> tuple[int, str]:
    """Return how many processes have devices with fast links between all of them, and why. Opens no device.

    TorchTPU's launch variable names the chips along each axis of a slice, and each process has one of them.
    """
    grid = os.environ.get(SLICE_VARIABLE, "")
    if not re.fullmatch(r"\d+(,\d+)*", grid):
        return linked_processes(processes)
    return (chips := math.prod(map(int, grid.split(",")))), f"a TPU slice has {chips} chips"


ACCELERATORS = {
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
        after_sharding=use_rows,
        fuse=fuse_operations,
        mixed_matmul_precision="medium",
        package="torch_tpu",
        install="`ENGINE=torch bash scripts/train.sh` installs it on a host with TPUs; or use --engine=xla",
        launch_variables=(SLICE_VARIABLE, "TORCH_TPU_SLICEBUILDER_ADDRESSES"),
        linked=linked_chips,
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
