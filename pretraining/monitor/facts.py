"""The facts that follow from the configuration, printed before the first step. Does not depend on an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pretraining.config.devices import DeviceKind
from pretraining.config.errors import counted
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.monitor.figures import amount, describe_micro_batches, flop, size
from pretraining.monitor.flops import flops_per_token


def describe(
    config: TrainConfig,
    *,
    mesh: Mapping[str, int],
    per_device: Mapping[str, int],
    device_name: str,
    recompute: Sequence[bool],
    rates: Mapping[int, float],
    dtypes: str,
    attention: str,
) -> str:
    """Return the derived facts as lines of text.

    mesh: axis -> size. per_device: bytes of "parameters", "gradients" and "moments" on one device, as the engine's
    layout shards them. recompute: True for each block that is recomputed. rates: learning rates of some 0-based
    updates. dtypes: as optim/precision.py describes them. attention: how it is computed, empty for no row. The batch
    fields of `config` must be resolved (global_batch_size and gradient_accumulation_steps not None).
    """
    rows = [
        ("model", _model(config)),
        ("FLOP/token", _flops(config)),
        ("devices", _devices(mesh, device_name)),
        ("batch", _batch(config)),
        ("precision", dtypes),
        *([("attention", attention)] if attention else []),
        ("memory/device", _memory(per_device)),
        ("recomputed", _mask(recompute)),
        ("learning rate", _rates(config, rates)),
        *config.facts.items(),
        ("MFU against", _peak(config.device_kind(device_name))),
    ]
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _model(config: TrainConfig) -> str:
    shape = model_shape(config)
    heads = f"{counted(shape.num_attention_heads, 'head')} ({shape.num_kv_heads} key/value) of {shape.head_dim}"
    blocks = f"{counted(shape.num_layers, 'layer')}, hidden {shape.hidden_size}, {heads}"
    sizes = f"{blocks}, feed-forward {shape.intermediate_size}"
    return f"{config.model_variant}: {shape.parameters:,} parameters; {sizes}, vocabulary {shape.vocab_size}"


def _flops(config: TrainConfig) -> str:
    full, causal = flops_per_token(model_shape(config), config.seq_length)
    return f"{flop(full)} (6N + 12LdS), {flop(causal)} with causal attention counted half"


def _devices(mesh: Mapping[str, int], device_name: str) -> str:
    axes = " x ".join(f"{axis} {extent}" for axis, extent in mesh.items() if extent > 1)
    return f"{math.prod(mesh.values())} x {device_name}{axes and ': '}{axes}"


def _batch(config: TrainConfig) -> str:
    assert config.global_batch_size and config.gradient_accumulation_steps
    tokens = config.tokens_per_step
    rows = f"{counted(config.global_batch_size, 'sequence')} of {config.seq_length}"
    split = describe_micro_batches(config.gradient_accumulation_steps, config.batch_size)
    total = f"{amount(config.sequences_of_run * config.seq_length)} tokens in {counted(config.num_steps, 'step')}"
    return f"{tokens:,} tokens/step = {rows} ({split}){config.batch_changes}; {total}"


def _memory(per_device: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} {size(count)}" for name, count in per_device.items())
    return f"{size(sum(per_device.values()))} of state ({listed}), before activations"


def _mask(recompute: Sequence[bool]) -> str:
    return f"{sum(recompute)} of {len(recompute)} blocks: {' '.join('FT'[chosen] for chosen in recompute)}"


def _rates(config: TrainConfig, rates: Mapping[int, float]) -> str:
    listed = ", ".join(f"{rate:.3g} at step {update + 1:,}" for update, rate in rates.items())
    return f"{config.lr_schedule}: {listed}"


def _peak(kind: DeviceKind | None) -> str:
    if not kind:
        return "n/a: the peak of this device is unknown; see --peak_tflops"
    return f"{flop(kind.peak_flops)}/s dense {kind.dtype}, {kind.title}"


def data_lines(facts: Mapping[str, Any]) -> str:
    """Return one line per dataset and per note on how they are read, from a stream's `facts()`."""
    return "\n".join(f"{'data':<14} {line}" for line in [*map(_dataset, facts["datasets"]), *facts.get("notes", [])])


def _dataset(dataset: Mapping[str, Any]) -> str:
    if dataset["tokens"] is None:
        return "counters, deterministic (use_dummy_dataset)" if dataset["name"] == "dummy" else dataset["name"]
    counts = ", ".join(counted(dataset[f"{noun}s"], noun) for noun in ("token", "document", "shard"))
    epochs = "" if dataset["epochs"] is None else f", {dataset['epochs']:.3g} epochs in this run"
    return f"{dataset['name']}: {counts}, {dataset['share']:.1%} of the mixture{epochs}"


def placed_line(measured: Mapping[str, int], unsharded: Mapping[str, int]) -> str:
    """Describe the bytes of one device as the engine measured them on live shards, with their share of one copy."""
    parts = (f"{name} {size(n)} ({n / max(unsharded[name], 1):.1%} of a copy)" for name, n in measured.items())
    return f"{'placed/device':<14} {', '.join(parts)}"
