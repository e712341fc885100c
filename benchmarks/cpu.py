"""One step of the same small model on the same cores: both engines, and PyTorch alone, eager and compiled.

    python -m benchmarks.cpu [--steps=21]

The contenders take turns, in rounds of a few steps, so that a change of the machine's speed meets all of them. Prints
each one's median step, and the first one's over it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model
from pretraining.models.ops import next_token_loss
from pretraining.optim.optimizer import build_optimizer
from pretraining.parallel.engine import Engine

ROUND = 3  # steps of one contender before the next has its turn
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
Step = Callable[[], None]  # waits for its result


def batch_of(config: TrainConfig) -> dict[str, np.ndarray]:
    """One batch of random tokens."""
    rows = np.random.default_rng(0).integers(0, 4096, (16, config.seq_length + 1)).astype(np.int32)
    return {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}


def of_engine(engine: Engine, config: TrainConfig) -> Step:
    """A training step of an engine."""
    model = engine.place(build_model(config))
    optimizer = build_optimizer(config, model.named_parameters())
    engine.prepare(optimizer)
    batch = batch_of(config)

    def step() -> None:
        engine.train_step(model, optimizer, batch, 1e-3).read()

    return step


def xla(layers: int = 6) -> Step:
    """The xla engine on one CPU device; `layers` for the time that compiling takes."""
    from pretraining.parallel.xla import XlaEngine

    config = TrainConfig(**FIELDS, num_layers=layers)
    return of_engine(XlaEngine(config), config)


def torch_engine() -> Step:
    """The torch engine in one process."""
    from pretraining.parallel.torch_engine import TorchEngine

    config = TrainConfig(**FIELDS, device="cpu")
    return of_engine(TorchEngine(config), config)


def plain(compiled: bool) -> Step:
    """The same model and optimizer in PyTorch alone."""
    config = TrainConfig(**FIELDS)
    built = build_model(config)
    weights = list(built.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model: Any = torch.compile(built) if compiled else built
    batch = {name: torch.from_numpy(array).long() for name, array in batch_of(config).items()}

    def step() -> None:
        loss = next_token_loss(model(batch["tokens"]), batch["labels"]) / batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def seconds(step: Step) -> float:
    """Wall time of one step."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def compare(contenders: dict[str, Step], steps: int) -> None:
    """Print every contender's median over `steps` steps, and the first one's ratio to it."""
    for step in contenders.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(steps // ROUND):
        for name, step in contenders.items():
            times[name] += [seconds(step) for _ in range(ROUND)]
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    first = next(iter(medians))
    for name, median in medians.items():
        print(f"{name:<14} median step {median:.3f} s, {medians[first] / median:.2f} = {first} / {name}")


def use_one_device() -> None:
    """The xla engine's devices are threads of one processor: one of them has all cores."""
    os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"] = "CPU", "1"


def main() -> None:
    """See the module."""
    options = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
    use_one_device()
    contenders = {"xla engine": xla(), "torch engine": torch_engine()}
    contenders |= {"eager": plain(compiled=False), "torch.compile": plain(compiled=True)}
    compare(contenders, int(options.get("steps", "21")))


if __name__ == "__main__":
    main()
