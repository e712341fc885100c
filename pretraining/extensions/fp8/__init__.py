"""precision=fp8: the linear layers of the blocks multiply float8 matrices (torch engine)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig
from pretraining.extensions.fp8.settings import CHECKS, Float8Config

if TYPE_CHECKING:
    from pretraining.parallel.engine import Engine


def note_slow_products(config: TrainConfig, engine: Engine, *_: object) -> None:
    """Print, in process 0, that a CPU has no float8 units."""
    if config.precision != "fp8" or engine.process_index != 0:
        return
    from pretraining.parallel.accelerator import HOST, device_name  # imports torch

    if engine.device_name == device_name(HOST):
        # 2.7 CPU s for a product of [512, 192] and [192, 512] in torch 2.9, 0.0005 in bf16 and 0.0014 in fp32
        why = "a CPU has no float8 units, and torch computes such products one element after the other"
        print(f"note: --precision=fp8: {why}, in 2,000 times the time or more; use mixed_bf16", flush=True)


EXTENSION = Extension(configuration=Float8Config, checks=CHECKS, opened=note_slow_products)
