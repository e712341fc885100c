"""The settings that an engine does not support: read before a device is opened, and printed in docs/settings.md.

A value of a setting that has no row works on both engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from pretraining.config.declaration import settings_of
from pretraining.config.errors import Problem, UnknownValueError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem

Places = tuple[str, ...]
XLA: Places = ("xla",)
TORCH: Places = ("torch",)
NO_CUDA: Places = ("xla", "torch on cpu", "torch on tpu")


class Limit(NamedTuple):
    """Values of a setting that an engine does not support."""

    setting: str
    missing_on: Places
    reason: str
    values: str = ""  # as docs/settings.md prints them; all but the default if empty
    is_set: Callable[[Any], bool] | None = None  # whether a configuration has such a value

    def applies(self, config: TrainConfig) -> bool:
        """Return whether `config` has one of the values."""
        if self.is_set:
            return self.is_set(config)
        return bool(getattr(config, self.setting) != settings_of(type(config))[self.setting].default)


def _reduces_in_another_dtype(config: TrainConfig) -> bool:
    """Return whether gradients are products in another dtype on the xla engine, which sums these over devices."""
    if config.has_bf16_weights:
        return config.reduce_dtype == "fp32"
    has_bf16_products = config.precision_mode != "fp32" and config.division.stages == 1
    return config.reduce_dtype == "bf16" and not has_bf16_products


LIMITS = (
    Limit("device", XLA, "PJRT_DEVICE names the device of the xla engine"),
    Limit("reduce_dtype", XLA, "gradients are summed in bf16 only if products are bf16, in fp32 only if parameters are",
          values="fp32 with bf16 parameters; bf16 with fp32 products or in a pipeline",
          is_set=_reduces_in_another_dtype),
    Limit("collective_timeout", XLA, "collectives of XLA have no timeout"),
    Limit("cpu_offload", NO_CUDA, "only the torch engine on CUDA offloads"),
    Limit("attention_impl", TORCH, "splash is a program of XLA; with auto, scaled_dot_product_attention runs",
          values="splash", is_set=lambda config: config.attention_impl == "splash"),
    Limit("save_attention", TORCH, "blocks that are recomputed together keep only the input of the first",
          values="True with blocks that are recomputed together",
          is_set=lambda config: config.save_attention and config.checkpoint_num_layers > 1),
    Limit("compile_cache_dir", TORCH, "this is the cache of XLA's compiler"),
)  # fmt: skip


def limits_of(configuration: type[TrainConfig]) -> tuple[Limit, ...]:
    """Return the rows about the core's settings and those of extensions."""
    return (*LIMITS, *configuration.limits())


def unsupported(config: TrainConfig, engine: str, device: str | None = None) -> Iterator[Problem]:
    """Yield the problem with every setting that `engine` on `device` (None: not known yet) does not support."""
    for limit in limits_of(type(config)):
        with suppress(UnknownValueError):
            places = {engine, f"{engine} on {device}"} & set(limit.missing_on)
            if places and limit.applies(config):
                others = {XLA: "torch", TORCH: "xla"}
                other = f", or use --engine={others[limit.missing_on]}" if limit.missing_on in others else ""
                remedy = f"is not supported by engine={min(places)}: {limit.reason}; remove it{other}"
                yield problem(config, limit.setting, remedy)
