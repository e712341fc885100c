"""Time the operations of the tiny model's step on one CPU device of XLA next to torch's kernels, in CPU seconds.

    OMP_NUM_THREADS=1 taskset -c 1 python -m benchmarks.cpu_operations

16 sequences of 256 tokens, 6 heads of 32 channels, hidden size 192, 4096 ids, fp32. Each is a program of its own; the
least of five rounds in turns. "x y^T" names a product whose right operand is stored with the summed dimension last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from benchmarks.cpu import use_one_device
from pretraining.parallel.xla.engine import CPU_FLAGS

ROUNDS, CALLS = 5, 6


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


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU milliseconds of a call, all threads together."""
    began = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - began) / CALLS * 1000


def main() -> None:
    """Measure and print; see the module's docstring."""
    use_one_device()
    os.environ["XLA_FLAGS"] = CPU_FLAGS
    import torch_xla
    from torch_xla.core import xla_model

    device = torch_xla.device()
    print("| operation | XLA, CPU ms | torch, CPU ms | XLA / torch |\n|---|---|---|---|")
    for name, (function, arguments) in operations().items():
        placed = [argument.to(device) for argument in arguments]

        def on_xla(function: Callable[..., torch.Tensor] = function, placed: list[torch.Tensor] = placed) -> None:
            result = function(*placed)  # kept, or nothing is computed
            torch_xla.sync()
            xla_model.wait_device_ops()
            del result

        def on_torch(function: Callable[..., torch.Tensor] = function, given: list[torch.Tensor] = arguments) -> None:
            function(*given)

        on_xla()
        on_torch()
        times = [(cpu_ms(on_xla), cpu_ms(on_torch)) for _ in range(ROUNDS)]
        xla, plain = (min(column) for column in zip(*times, strict=True))
        print(f"| {name} | {xla:.1f} | {plain:.1f} | {xla / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
