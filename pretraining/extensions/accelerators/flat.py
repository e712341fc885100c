"""FSDP2's flat buffers on devices whose memory is tiled, such as TPUs.

FSDP2 gathers the shards of a module as one vector, and lays gradients out as a row for each rank. A TPU stores neither
like a matrix of 128 columns: unless its length is a multiple of 1024, gathering a vector moves each element on its own,
and so does cutting long rows into a vector. Compiled by libtpu 0.0.52 for a block of llama3_8b and 16 chips of a v6e,
million cycles: all-gather 67 -> 3, layout of the gradients 72 -> 5.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

ROW = 128  # elements: rows of so many are stored one after another, as in a vector


def use_rows(module: nn.Module) -> None:
    """Have FSDP2 gather and lay out the buffers of `module`, which it has sharded, in rows."""
    _lay_out_in_order()
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_custom_all_gather(RowAllGather())


class RowAllGather(DefaultAllGather):
    """All-gather of vectors as matrices of rows."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather `input_tensor`, [n], to `output_tensor`, [ranks * n]."""
        if input_tensor.numel() % ROW == 0:
            output_tensor, input_tensor = output_tensor.view(-1, ROW), input_tensor.view(-1, ROW)
        return super().__call__(output_tensor, input_tensor, group, async_op)


@functools.cache
def _lay_out_in_order() -> torch.library.Library:
    """Replace the operations by which FSDP2 lays shards and gradients out, for devices that are no part of torch.

    Returns what keeps it replaced.
    """
    library = torch.library.Library("fsdp", "IMPL")
    library.impl("all_gather_copy_in", all_gather_copy_in, "PrivateUse1")
    library.impl("chunk_cat", chunk_cat, "PrivateUse1")
    return library


def all_gather_copy_in(
    all_gather_inputs: list[Tensor],
    all_gather_output: Tensor,
    inp_split_sizes: list[int],
    all_gather_input_numel: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Return the vector of the shards, and the buffer for all ranks' vectors.

    FSDP2's vector is a part of that buffer, which a TPU writes whole where it writes the part.
    """
    return torch.cat(all_gather_inputs), all_gather_output


def chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Compute torch._chunk_cat for dim=0: cut each of `tensors` into chunks of rows, and join those of a number.

    A tensor is padded with rows of zeros. out: [chunks, elements of all tensors / chunks], in one piece of memory.
    """
    assert dim == 0
    padded = [F.pad(x.flatten(), (0, -len(x) % num_chunks * x[0].numel())) for x in tensors]
    chunks = [x.chunk(num_chunks) for x in padded]
    in_order = [parts[rank] for rank in range(num_chunks) for parts in chunks]
    out.view(-1).copy_(torch.cat(in_order) if len(tensors) > 1 else padded[0])
