"""The XLA engine beside plain PyTorch: compile time against depth, and the time of a step.

    python -m benchmarks.xla [--steps=21]

Prints two ratios: compile time (the first step less a later one) at 64 layers over that at 4 layers, and the median
step of the engine on one CPU device over eager PyTorch and torch.compile, with the same model, batch and cores. The
contenders of the second take turns, in rounds of a few steps, so that a change of the machine's speed meets all of
them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model
from pretraining.models.ops import next_token_loss
from pretraining.optim.adamw import build_optimizer

ROUND = 3  # steps of one contender before the next has its turn
FIELDS = {
    "model_variant": "tiny",
    "seq_length": 256,
    "batch_size": 16,
    "global_batch_size": 16,
    "mixed_precision": False,
    "sharding_strategy": "fsdp",
    "use_dummy_dataset": True,
}


def batch_of(config: TrainConfig) -> dict[str, np.ndarray]:
    """One batch of random tokens."""
    rows = np.random.default_rng(0).integers(0, 4096, (16, config.seq_length + 1)).astype(np.int32)
    return {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}


class Xla:
    """The engine, waiting for each step's result."""

    def __init__(self, layers: int) -> None:
        from pretraining.parallel.xla import XlaEngine

        config = TrainConfig(**FIELDS, num_layers=layers)  # type: ignore[arg-type]
        self.engine = XlaEngine(config)
        self.model = self.engine.place(build_model(config))
        self.optimizer = build_optimizer(config, self.model.named_parameters(), **self.engine.optimizer_options)
        self.engine.prepare(self.optimizer)
        self.batch = batch_of(config)

    def step(self) -> None:
        self.engine.train_step(self.model, self.optimizer, self.batch, 1e-3).read()


class Plain:
    """The same model and optimizer in PyTorch alone."""

    def __init__(self, compiled: bool) -> None:
        config = TrainConfig(**FIELDS)  # type: ignore[arg-type]
        model = build_model(config)
        self.weights = list(model.parameters())
        self.optimizer = build_optimizer(config, model.named_parameters())
        self.model = torch.compile(model) if compiled else model
        self.batch = {name: torch.from_numpy(array).long() for name, array in batch_of(config).items()}

    def step(self) -> None:
        loss = next_token_loss(self.model(self.batch["tokens"]), self.batch["labels"]) / self.batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def seconds(step: Xla | Plain) -> float:
    """Wall time of one step."""
    began = time.perf_counter()
    step.step()
    return time.perf_counter() - began


def compile_time(layers: int) -> float:
    """Seconds that the first step takes longer than a later one, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.xla", f"--compile={layers}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """See the module."""
    os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"] = "CPU", "1"
    options = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
    if "compile" in options:
        engine = Xla(int(options["compile"]))
        first, *later = (seconds(engine) for _ in range(3))
        print(first - min(later))
        return
    shallow, deep = (statistics.median(compile_time(layers) for _ in range(3)) for layers in (4, 64))
    print(
        f"compile time: {shallow:.2f} s at 4 layers, {deep:.2f} s at 64 layers, ratio {deep / shallow:.2f}", flush=True
    )
    contenders: dict[str, Xla | Plain] = {
        "xla": Xla(6),
        "eager": Plain(compiled=False),
        "compiled": Plain(compiled=True),
    }
    for contender in contenders.values():
        for _ in range(2):
            contender.step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(int(options.get("steps", "21")) // ROUND):
        for name, contender in contenders.items():
            times[name] += [seconds(contender) for _ in range(ROUND)]
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    for name, median in medians.items():
        print(f"{name:<9} median step {median:.3f} s, {medians['xla'] / median:.2f} = xla / {name}")


if __name__ == "__main__":
    main()
