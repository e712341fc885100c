"""Run splash attention on 8 virtual devices, interpreted, next to attention that has every score at once.

    python splash_driver.py '{"name": {"mesh": {"shard": 8}, "heads": [4, 2], ...}}'

prints name -> the largest difference of the result and of the gradients of queries, keys and values.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor

from pretraining.extensions.splash.kernel import SplashAttention
from pretraining.models.chunked import AttentionMask
from pretraining.models.ops import AttentionKernel
from pretraining.parallel.mesh import Mesh, token_order
from tests.models.reference import reference


def differences(
    mesh: dict[str, int], heads: list[int], length: int, window: int | None = None, *, packed: bool = False
) -> list[float]:
    """Return the largest differences of one case: rows and heads are sharded over `mesh`."""
    torch.manual_seed(length)
    axes = Mesh(**mesh)
    rows, width = axes.size // axes.tensor // axes.context, 16
    shapes = [(rows, count, length, width) for count in (heads[0], heads[1], heads[1])]
    inputs, direction = [torch.randn(shape) for shape in shapes], torch.randn(shapes[0])
    segments = torch.randint(0, 3, (rows, length)).sort(1).values.float() if packed else None

    def results(kernel: AttentionKernel, device: torch.device) -> list[Tensor]:
        q, k, v = (tensor.to(device).requires_grad_() for tensor in inputs)
        y = kernel(q, k, v, AttentionMask(None if segments is None else segments.to(device), window))
        return [tensor.detach().cpu() for tensor in (y, *torch.autograd.grad(y, (q, k, v), direction.to(device)))]

    def by_rank(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Splash attention of tokens in the order in which context ranks have them."""
        order = torch.from_numpy(token_order(length, axes.context)).to(q.device)
        segments = None if mask.segments is None else mask.segments[:, order]
        splash = SplashAttention(axes, xla_mesh, is_interpreted=True)
        y = splash(q[:, :, order], k[:, :, order], v[:, :, order], mask._replace(segments=segments))
        return y[:, :, order.argsort()]

    xla_mesh = xs.Mesh(np.arange(axes.size), tuple(axes), axes._fields)
    got = results(by_rank, torch_xla.device())
    expected = results(reference, torch.device("cpu"))
    return [(one - other).abs().max().item() for one, other in zip(got, expected, strict=True)]


if __name__ == "__main__":
    xr.use_spmd()
    cases: dict[str, dict[str, Any]] = json.loads(sys.argv[1])
    print(json.dumps({name: differences(**case) for name, case in cases.items()}))
