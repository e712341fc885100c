"""The settings that an engine does not support: one table, read before a device is opened and printed in configs.md.

A value of a setting that has no row works on both engines. A test runs every row's value on the engine that lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from pretraining.config.errors import Problem, UnknownValueError
from pretraining.config.training import SETTINGS, TrainConfig
from pretraining.config.validate import problem
from pretraining.config.variants import model_shape

XLA, TORCH, TORCH_CPU, TORCH_TPU = "xla", "torch", "torch on cpu", "torch on tpu"


class Limit(NamedTuple):
    """A setting, the values of it that an engine does not support, and why."""

    setting: str
    values: str  # as configs.md prints them
    is_set: Callable[[TrainConfig], bool]  # whether a configuration has such a value
    missing_on: tuple[str, ...]
    reason: str
    remedy: str = "remove it"


def _reduces_in_another_dtype(config: TrainConfig) -> bool:
    has_bf16_parameters = config.precision_mode == "bf16_sr" or config.master_weights is False
    return config.reduce_dtype not in ("auto", "bf16" if has_bf16_parameters else "fp32")


def _splits_kv_heads_unevenly(config: TrainConfig) -> bool:
    return model_shape(config).num_kv_heads % config.tensor_parallel_size > 0


LIMITS = (
    Limit(
        setting="device",
        values="all but auto",
        is_set=lambda config: config.device != "auto",
        missing_on=(XLA,),
        reason="the xla engine runs on the device that PJRT_DEVICE names",
        remedy="set PJRT_DEVICE instead, or --engine=torch",
    ),
    Limit(
        setting="precision",
        values="fp16",
        is_set=lambda config: config.precision == "fp16",
        missing_on=(XLA,),
        reason="TPUs and Trainium have bf16, which needs no loss scale",
        remedy="use mixed_bf16, or --engine=torch",
    ),
    Limit(
        setting="reduce_dtype",
        values="another dtype than the parameters'",
        is_set=_reduces_in_another_dtype,
        missing_on=(XLA,),
        reason="the xla engine sums gradients over devices in the dtype of the parameters",
        remedy="remove it, or use --engine=torch",
    ),
    Limit(
        setting="cpu_offload",
        values="True",
        is_set=lambda config: config.cpu_offload,
        missing_on=(XLA, TORCH_CPU, TORCH_TPU),
        reason="it needs the torch engine on CUDA",
    ),
    Limit(
        setting="memory_profiling",
        values="True",
        is_set=lambda config: config.memory_profiling,
        missing_on=(XLA, TORCH_CPU, TORCH_TPU),
        reason="it needs the torch engine on CUDA",
    ),
    Limit(
        setting="collective_timeout",
        values=f"all but {SETTINGS['collective_timeout'].default}",
        is_set=lambda config: config.collective_timeout != SETTINGS["collective_timeout"].default,
        missing_on=(XLA,),
        reason="XLA's collectives have no timeout of ours",
    ),
    Limit(
        setting="context_parallel_size",
        values="above 1",
        is_set=lambda config: config.context_parallel_size > 1,
        missing_on=(TORCH,),
        reason="the torch engine does not split sequences",
        remedy="remove it, or use --engine=xla",
    ),
    Limit(
        setting="kv_replication",
        values="above 1",
        is_set=lambda config: config.kv_replication > 1,
        missing_on=(TORCH,),
        reason="the torch engine does not replicate key/value heads",
        remedy="remove it, or use --engine=xla",
    ),
    Limit(
        setting="tensor_parallel_size",
        values="not a divisor of num_kv_heads",
        is_set=_splits_kv_heads_unevenly,
        missing_on=(TORCH,),
        reason="the torch engine does not replicate key/value heads",
        remedy="use a divisor of num_kv_heads, or --engine=xla",
    ),
    Limit(
        setting="sequence_parallel",
        values="True with hidden_dropout",
        is_set=lambda config: config.sequence_parallel and config.hidden_dropout > 0,
        missing_on=(TORCH,),
        reason="the torch engine does not drop values of a residual stream that is split over tokens",
        remedy="use --hidden_dropout=0, or --engine=xla",
    ),
    Limit(
        setting="dump_sharding",
        values="a file",
        is_set=lambda config: bool(config.dump_sharding),
        missing_on=(TORCH,),
        reason="the torch engine does not write one",
        remedy="remove it, or use --engine=xla",
    ),
    Limit(
        setting="compile_cache_dir",
        values="a folder",
        is_set=lambda config: bool(config.compile_cache_dir),
        missing_on=(TORCH,),
        reason="it is XLA's cache of compiled programs",
    ),
)


def unsupported(config: TrainConfig, engine: str, device: str | None = None) -> Iterator[Problem]:
    """Yield the problem with every setting that `engine` on `device` (None: not known yet) does not support."""
    for limit in LIMITS:
        with suppress(UnknownValueError):
            if {engine, f"{engine} on {device}"} & set(limit.missing_on) and limit.is_set(config):
                place = engine if engine in limit.missing_on else f"{engine} on {device}"
                remedy = f"is not supported by engine={place}: {limit.reason}; {limit.remedy}"
                yield problem(config, limit.setting, remedy)
