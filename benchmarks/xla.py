"""Measure the compile time of the xla engine against depth, and its step time relative to plain PyTorch.

    python -m benchmarks.xla [--steps=21]

Prints the ratio of the compile times (first step minus a later step) at 64 and 4 layers, and the ratios of the median
step on one CPU device to those of eager PyTorch and torch.compile, with the same model, batch and cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.cpu import compare, parser_of, plain_step, seconds, use_one_device, xla_step


def compile_time(layers: int) -> float:
    """Return the seconds that the first step takes longer than a later one, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.xla", f"--compile={layers}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--compile", type=int, help="print the compile time at this depth alone, of one process")
    options = parser.parse_args()
    use_one_device()
    if options.compile:
        step = xla_step(options.compile)
        first, *later = (seconds(step)[0] for _ in range(3))
        print(first - min(later))
        return
    shallow, deep = (statistics.median(compile_time(layers) for _ in range(3)) for layers in (4, 64))
    ratio = deep / shallow
    print(f"compile time: {shallow:.2f} s at 4 layers, {deep:.2f} s at 64 layers, ratio {ratio:.2f}", flush=True)
    contenders = {"xla": xla_step(), "eager": plain_step(compiled=False), "torch.compile": plain_step(compiled=True)}
    compare(contenders, options.steps)


if __name__ == "__main__":
    main()
