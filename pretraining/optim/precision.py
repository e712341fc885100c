"""Which dtype everything has: products, parameters, gradients and the optimizer's state."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pretraining.config.training import TrainConfig
from pretraining.config.validate import precision_mode

WIDE, NARROW = torch.float32, torch.bfloat16


class Precision(NamedTuple):
    """The dtypes of a run."""

    stream: torch.dtype = WIDE  # activations between blocks
    products: torch.dtype = WIDE  # matrix products and what they read
    stored: torch.dtype = WIDE  # parameters
    gradients: torch.dtype = WIDE  # their sum over micro-batches
    state: torch.dtype = WIDE  # the optimizer's
    # Stochastic rounding: of what is stored where that is bf16, otherwise of the copy that the products read.
    rounds: bool = False
    reduced: torch.dtype = WIDE  # gradients, where they are added up over devices (torch engine)

    @property
    def copies(self) -> bool:
        """Whether the model runs on a rounded copy of its parameters."""
        return self.rounds and self.stored == WIDE


MODES = {
    "fp32": Precision(),
    "mixed_bf16": Precision(stream=NARROW, products=NARROW),
    "mixed_bf16_sr": Precision(stream=NARROW, products=NARROW, rounds=True),
    "bf16_sr": Precision(NARROW, NARROW, NARROW, NARROW, NARROW, rounds=True),
    "autocast": Precision(products=NARROW),
    "fp16": Precision(stream=torch.float16, products=torch.float16),
}


def precision_of(config: TrainConfig) -> Precision:
    """The dtypes that `precision`, `mixed_precision` and the settings of "manual" ask for."""
    mode = precision_mode(config)
    chosen = _by_hand(config) if mode == "manual" else MODES[mode]
    # Its name says so: NxD Core's keeps its state in fp32 beside parameters in bf16.
    state = WIDE if config.optimizer == "adamw_fp32" else chosen.state
    return chosen._replace(state=state, reduced=NARROW if config.reduce_dtype == "bf16" else WIDE)


def _by_hand(config: TrainConfig) -> Precision:
    kept = WIDE if config.master_weights is not False else NARROW
    gradients = WIDE if config.fp32_grad_acc is not False else NARROW
    return Precision(NARROW, NARROW, kept, gradients, kept, rounds=bool(config.stochastic_rounding))


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the activations between blocks."""
    return precision_of(config).stream


def dtypes_told(config: TrainConfig) -> str:
    """The mode and what has which dtype, in a line."""
    chosen = precision_of(config)
    told = {"stream": "activations", "products": "products", "stored": "parameters", "gradients": "gradients"}
    listed = [
        f"{words} {_short(getattr(chosen, name))}" for name, words in {**told, "state": "optimizer state"}.items()
    ]
    return f"{precision_mode(config)}: {', '.join(listed)}{'; rounded stochastically' if chosen.rounds else ''}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
