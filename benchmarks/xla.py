"""The XLA engine: compile time against depth, and a step beside plain PyTorch.

    python -m benchmarks.xla [--steps=21]

Prints two ratios: compile time (the first step less a later one) at 64 layers over that at 4 layers, and the median
step of the engine on one CPU device over eager PyTorch and torch.compile, with the same model, batch and cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.cpu import compare, plain, seconds, use_one_device, xla


def compile_time(layers: int) -> float:
    """Seconds that the first step takes longer than a later one, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.xla", f"--compile={layers}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """See the module."""
    options = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
    use_one_device()
    if "compile" in options:
        step = xla(int(options["compile"]))
        first, *later = (seconds(step) for _ in range(3))
        print(first - min(later))
        return
    shallow, deep = (statistics.median(compile_time(layers) for _ in range(3)) for layers in (4, 64))
    told = f"compile time: {shallow:.2f} s at 4 layers, {deep:.2f} s at 64 layers, ratio {deep / shallow:.2f}"
    print(told, flush=True)
    contenders = {"xla": xla(), "eager": plain(compiled=False), "torch.compile": plain(compiled=True)}
    compare(contenders, int(options.get("steps", "21")))


if __name__ == "__main__":
    main()
