"""Compare the step time of both engines on CPUs with plain PyTorch, eager and compiled.

    python -m benchmarks.cpu [--steps=21] [--contenders="xla engine,eager"]

All contenders train the same small model on the same cores. They take turns in rounds of a few steps, so that a change
of the machine's speed affects all of them. Prints the median step of each, and the ratio of the first one's to it; then
the same of the CPU time of all threads, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model
from pretraining.models.ops import next_token_loss
from pretraining.parallel.engine import Engine

ROUND = 3  # consecutive steps of one contender
WARM_UP = 2
FIELDS: dict[str, Any] = {
    "model_variant": "tiny",
    "seq_length": 256,
    "batch_size": 16,
    "global_batch_size": 16,
    "mixed_precision": False,
    "sharding_strategy": "fsdp",
    "use_dummy_dataset": True,
}
Step = Callable[[], None]  # returns when the loss is computed


def batch_of(config: TrainConfig) -> dict[str, np.ndarray]:
    """Return one batch of random tokens."""
    rows = np.random.default_rng(0).integers(0, 4096, (16, config.seq_length + 1)).astype(np.int32)
    return {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}


def engine_step(engine: Engine, config: TrainConfig) -> Step:
    """Return a function that runs one training step of an engine."""
    trainee = engine.place(build_model(config))
    batch = batch_of(config)

    def step() -> None:
        trainee.train_step(batch, 1e-3).read()

    return step


def xla_step(layers: int = 6) -> Step:
    """Return a training step of the xla engine on one CPU device."""
    from pretraining.parallel.xla.engine import XlaEngine

    config = TrainConfig(**FIELDS, num_layers=layers)
    return engine_step(XlaEngine(config), config)


def torch_step() -> Step:
    """Return a training step of the torch engine in one process."""
    from pretraining.parallel.torch.engine import TorchEngine

    config = TrainConfig(**FIELDS, device="cpu")
    return engine_step(TorchEngine(config), config)


def plain_step(*, compiled: bool) -> Step:
    """Return a training step of the same model and optimizer in plain PyTorch."""
    config = TrainConfig(**FIELDS)
    eager = build_model(config)
    weights = list(eager.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model: Any = torch.compile(eager) if compiled else eager
    batch = {name: torch.from_numpy(array).long() for name, array in batch_of(config).items()}

    def step() -> None:
        loss = next_token_loss(model(batch["tokens"]), batch["labels"]) / batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def seconds(step: Step) -> tuple[float, float]:
    """Return the wall time and the CPU time of one step."""
    began, began_cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began, time.process_time() - began_cpu


def compare(contenders: dict[str, Step], steps: int) -> None:
    """Print the median of `steps` steps of each contender, and the ratio of the first one's to it."""
    for step in contenders.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(steps // ROUND):
        for name, step in contenders.items():
            times[name] += [seconds(step) for _ in range(ROUND)]
    for kind, title in enumerate(("median step", "of CPU time")):
        medians = {name: statistics.median(sample[kind] for sample in samples) for name, samples in times.items()}
        first = next(iter(medians))
        for name, median in medians.items():
            print(f"{name:<14} {title} {median:.3f} s, {medians[first] / median:.2f} = {first} / {name}")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flag that this comparison and that of benchmarks.xla have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=21)
    return parser


def use_one_device() -> None:
    """Give the xla engine one virtual device, which uses all cores."""
    os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"] = "CPU", "1"


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--contenders", help="comma-separated; all by default")
    options = parser.parse_args()
    use_one_device()
    contenders: dict[str, Callable[[], Step]] = {
        "xla engine": xla_step,
        "torch engine": torch_step,
        "eager": lambda: plain_step(compiled=False),
        "torch.compile": lambda: plain_step(compiled=True),
    }
    names = options.contenders.split(",") if options.contenders else contenders
    compare({name: contenders[name]() for name in names}, options.steps)


if __name__ == "__main__":
    main()
