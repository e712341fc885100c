"""How the torch engine moves FSDP2's flat buffers on tiled devices. Its collectives run in test_emulated_tpu.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp  # registers FSDP2's operations

from pretraining.parallel.torch.flat import chunk_cat


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_laid_out_as_fsdp2_does_and_padded_where_ranks_do_not_divide_them(
    ranks: int, dtype: torch.dtype
) -> None:
    gradients = [torch.randn(shape) for shape in ((5, 3), (8, 2, 2), (7,), (3, 4))]
    columns = sum(-(-len(gradient) // ranks) * gradient[0].numel() for gradient in gradients)
    ours, expected = (torch.empty(ranks, columns, dtype=dtype) for _ in range(2))
    chunk_cat(gradients, 0, ranks, ours)
    torch.ops.fsdp.chunk_cat(gradients, 0, ranks, out=expected)
    assert torch.equal(ours, expected)
