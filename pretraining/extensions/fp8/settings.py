"""Where precision=fp8 runs. Does not depend on torch or on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.support import Limit
from pretraining.config.training import TrainConfig
from pretraining.config.validate import multiples_around
from pretraining.config.variants import model_shape

LIMIT = Limit(
    "precision",
    ("xla", "torch on tpu"),
    "only the torch engine on CUDA and CPUs multiplies float8 matrices",
    values="fp8",
    is_set=lambda config: config.precision == "fp8",
)


@dataclass(frozen=True)
class Float8Config(TrainConfig):
    """A configuration whose precision may be fp8."""

    @classmethod
    def limits(cls) -> tuple[Any, ...]:
        """See TrainConfig."""
        return (*super().limits(), LIMIT)

    def own_precision(self, mode: str) -> Any:
        """See TrainConfig: the dtypes around the products of float8 matrices."""
        if mode != "fp8":
            return super().own_precision(mode)
        from pretraining.optim.precision import MODES

        return MODES["mixed_bf16"]

    def transformation_on(self, device: Any) -> Callable[[Any], None]:
        """See TrainConfig."""
        if self.precision != "fp8":
            return super().transformation_on(device)
        from pretraining.extensions.fp8.linear import require_float8, use_float8

        require_float8(device)
        return use_float8


def check_float8(config: Float8Config) -> Iterator[Problem]:
    """Tensor cores multiply float8 matrices whose sizes are multiples of 16; a rank has its shard of each."""
    if config.precision != "fp8":
        return
    shape, ranks, context = model_shape(config), config.tensor_parallel_size, config.context_parallel_size
    kv_heads = shape.num_kv_heads
    # As many ranks as divide the heads; others have one head at least, and may have two where their neighbours have one
    kv_ranks = ranks if kv_heads % ranks == 0 else kv_heads
    head_width, rows = f"x head_dim={shape.head_dim} ", config.batch_size
    for name, value, factor, text, parts in (
        ("hidden_size", shape.hidden_size, 1, "", 1),
        ("intermediate_size", shape.intermediate_size, 1, "", ranks),
        ("num_attention_heads", shape.num_attention_heads, shape.head_dim, head_width, ranks),
        ("num_kv_heads", kv_heads, shape.head_dim, head_width, kv_ranks),
        *(("batch_size", rows, length, f"x {length} tokens ", context) for length in config.row_lengths),
    ):
        if value * factor % (16 * parts):
            product = f"{text}= {value * factor} " if text else ""
            share = f" = 16 x {parts} ranks" if parts > 1 else ""
            remedy = f"{product}is not a multiple of {16 * parts}{share}, which precision=fp8 needs; "
            yield Problem(f"--{name}={value}", f"{remedy}use {multiples_around(value * factor, 16 * parts)}")


CHECKS = (check_float8,)
