"""Time the operations of the tiny model's step on one CPU device of XLA next to torch's kernels, in CPU seconds.

    OMP_NUM_THREADS=1 taskset -c 1 python -m benchmarks.cpu_operations

16 sequences of 256 tokens, 6 heads of 32 channels, hidden size 192, 4096 ids, fp32. Each is a program of its own; the
least of 30 calls in turns. "x y^T" names a product whose right operand is stored with the summed dimension last.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cpu import seconds, use_one_device
from pretraining.parallel import accelerator
from pretraining.parallel.xla.engine import CPU_FLAGS

ROUNDS = 30


def operations() -> dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    """Return functions with their arguments."""
    heads, scores = torch.randn(16, 6, 256, 32), torch.randn(16, 6, 256, 256)
    rows, wide, logits = torch.randn(4096, 192), torch.randn(4096, 512), torch.randn(4096, 4096)
    up, head, labels = torch.randn(512, 192), torch.randn(4096, 192), torch.randint(0, 4096, (4096,))
    return {
        "attention: q k^T": (lambda q, k: q @ k.transpose(-1, -2), [heads, heads + 1]),
        "attention: p v": (torch.matmul, [scores, heads]),
        "attention: p^T g": (lambda p, g: p.transpose(-1, -2) @ g, [scores, heads]),
        "attention: softmax": (lambda x: x.softmax(-1), [scores]),
        "feed-forward: x w^T": (lambda x, w: x @ w.t(), [rows, up]),
        "feed-forward: g w": (torch.matmul, [wide, up]),
        "feed-forward: g^T x": (lambda g, x: g.t() @ x, [wide, rows]),
        "feed-forward: silu(a) b": (lambda a, b: torch.nn.functional.silu(a) * b, [wide, wide + 1]),
        "head: x w^T": (lambda x, w: x @ w.t(), [rows, head]),
        "head: g w": (torch.matmul, [logits, head]),
        "head: g^T x": (lambda g, x: g.t() @ x, [logits, rows]),
        "cross-entropy": (torch.nn.functional.cross_entropy, [logits, labels]),
        "RMS norm": (lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt(), [rows]),
    }


def compute_on_xla(function: Callable[..., torch.Tensor], arguments: list[torch.Tensor]) -> None:
    """Compute and wait."""
    import torch_xla
    from torch_xla.core import xla_model

    result = function(*arguments)  # kept, or nothing is computed
    torch_xla.sync()
    xla_model.wait_device_ops()
    del result


def compute(function: Callable[..., torch.Tensor], arguments: list[torch.Tensor]) -> None:
    """Compute with torch's kernels."""
    function(*arguments)


def main() -> None:
    """Measure and print; see the module's docstring."""
    use_one_device()
    os.environ["XLA_FLAGS"] = CPU_FLAGS
    accelerator.keep_freed_memory()  # as the torch engine does, or new pages are measured, too
    import torch_xla

    device = torch_xla.device()
    print("| operation | XLA, CPU ms | torch, CPU ms | XLA / torch |\n|---|---|---|---|")
    for name, (function, arguments) in operations().items():
        placed = [argument.to(device) for argument in arguments]
        calls = partial(compute_on_xla, function, placed), partial(compute, function, arguments)
        times = [[1000 * seconds(call)[1] for call in calls] for _ in range(ROUNDS)]
        xla, plain = (min(column) for column in zip(*times, strict=True))
        print(f"| {name} | {xla:.1f} | {plain:.1f} | {xla / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
