"""The learning rate as a pure function of the step.

Knows nothing of optimizers or devices. Steps are 0-based optimizer updates; the value returned is the one that
update uses. Formulas: fms-fsdp's `main_training_llama.py`, moved by one step where its first update had rate 0.
"""

from __future__ import annotations

import math

from pretraining.config.training import TrainConfig

# AdamW with its step count on the device divides the root of the second moment by the rate: 0 gives NaN. 1e-20 moves
# no fp32 weight that matters, and the quotient stays 18 decades below fp32's largest number.
SMALLEST = 1e-20


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the 0-based optimizer update `step`, above 0 for every step, past the end included."""
    if config.training_stage.lower() == "annealing":
        rate = annealing(step, config.learning_rate, config.num_steps)
    else:
        rate = fms_cosine(step + 1, config.learning_rate, config.num_steps)
    return max(rate, SMALLEST)


def fms_cosine(step: int, peak: float, total: int) -> float:
    """Quadratic warm-up over min(2000, total // 20) steps under a cosine from `peak` at 0 to a tenth of it at `total`.

    `step` is 1-based, so the first update already moves (at 0 the warm-up is 0). Under 20 steps there is no warm-up.
    After `total` the rate stays at a tenth.
    """
    warmup = min(2000, total // 20)
    rising = 1 - (1 - min(step, warmup) / warmup) ** 2 if warmup else 1.0
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * min(step, total) / total))
    return peak * min(rising, falling)


def annealing(step: int, peak: float, total: int) -> float:
    """A straight line from `peak` at step 0 to 0 at `total`; the last update, total - 1, still has peak / total."""
    return peak * max(1 - step / total, 0.0)
