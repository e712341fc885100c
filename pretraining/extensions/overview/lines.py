"""The lines of the overview, as pure functions of what they describe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from pretraining.config.declaration import settings_of
from pretraining.config.errors import counted
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig
from pretraining.config.variants import ModelShape, model_shape
from pretraining.extensions.devices import DeviceKind
from pretraining.extensions.flops import flops_formula, training_flops
from pretraining.extensions.milestones import milestone_steps
from pretraining.extensions.state_bytes import state_bytes
from pretraining.extensions.units import amount, describe_micro_batches, flop, size
from pretraining.optim.precision import precision_of
from pretraining.optim.schedule import learning_rate, warmup_steps
from pretraining.parallel.engine import Engine
from pretraining.parallel.mesh import Mesh, kv_repeats
from pretraining.parallel.recompute import model_mask

# Settings of token shards, which counters do not have.
DATA_SETTINGS = (
    "data_path",
    "datasets",
    "weights",
    "logical_shards",
    "sep_token",
    "eos_token",
    "bos_token",
    "bol_token",
    "eol_token",
    "strip_tokens",
    "file_type",
    "split",
    "max_samples",
    "num_epochs",
    "shuffle",
    "eod_mask_loss",
    "accept_data_changes",
    "valid_data_path",
    "valid_datasets",
    "valid_weights",
    "test_data_path",
)


def describe_run(config: TrainConfig, engine: Engine, extensions: Sequence[Extension]) -> str:
    """Return the facts that follow from the configuration and the engine's devices, as lines of text."""
    facts = describe(
        config,
        mesh=engine.mesh._asdict(),
        per_device=state_bytes(config, engine.layout),
        device_name=engine.device_name,
        recompute=model_mask(config),
        dtypes=describe_dtypes(config),
        attention=engine.attention,
        rates={step: learning_rate(config, step) for step in milestone_steps(config)},
    )
    lines = notes(config, model_shape(config), engine.mesh, engine.name, engine.linked)
    return "\n".join([facts, *lines, *settings_without_effect(config, extensions)])


def settings_without_effect(config: TrainConfig, extensions: Sequence[Extension]) -> list[str]:
    """Return a line for each setting that has a value of its own and does nothing."""
    switches = [item for table in (each.switches for each in extensions) for item in table.items()]
    settings = settings_of(type(config))
    idle = {name: switch for switch, names in switches if not getattr(config, switch) for name in names}
    reasons = {name: f"without {key if key in settings else key.replace('_', ' ')}" for name, key in idle.items()}
    if config.use_dummy_dataset:
        reasons |= dict.fromkeys(DATA_SETTINGS, "with use_dummy_dataset")
    if config.position_embedding_type != "rope":
        positions = f"with position_embedding_type={config.position_embedding_type}"
        reasons |= dict.fromkeys(("rope_theta", "rope_scaling_type"), positions)
    changed = (name for name in reasons if getattr(config, name) != settings[name].default)
    return [f"{name}: no effect {reasons[name]}" for name in changed]


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
    full, causal = training_flops(config, config.seq_length)
    return f"{flop(full)} ({flops_formula(config)}), {flop(causal)} with causal attention counted half"


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


def placed_line(measured: Mapping[str, int], unsharded: Mapping[str, int]) -> str:
    """Describe the bytes of one device as the engine measured them on live shards, with their share of one copy."""
    parts = (f"{name} {size(n)} ({n / max(unsharded[name], 1):.1%} of a copy)" for name, n in measured.items())
    return f"{'placed/device':<14} {', '.join(parts)}"


def describe_dtypes(config: TrainConfig) -> str:
    """Return the precision mode and the dtypes in one line."""
    chosen = precision_of(config)
    dtypes = {
        "activations": chosen.activations,
        "products": chosen.compute,
        "parameters": chosen.parameters,
        "gradients": chosen.gradients,
        "optimizer state": chosen.optimizer_state,
    }
    listed = ", ".join(f"{name} {_short(dtype)}" for name, dtype in dtypes.items())
    rounding = "; rounded stochastically" if chosen.stochastic_rounding else ""
    mode = config.precision_mode
    float8 = "; linear layers of the blocks fp8 (e4m3, gradients e5m2), all-gathers bf16" if mode == "fp8" else ""
    return f"{mode}: {listed}{rounding}{float8}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def notes(config: TrainConfig, shape: ModelShape, mesh: Mesh, engine: str, linked: str = "") -> list[str]:
    """Return a line for each setting of schedule, compiler or parallelism with another effect than its name says.

    linked: why devices have fast links between them.
    """
    lines = config.division.notes(engine)
    if config.sharding_strategy == "hsdp" and not config.sharding_group_size and linked and mesh.data_ranks > 1:
        groups = f"{counted(mesh.replica, 'group')} of {mesh.shard}"
        lines.append(f"hsdp: {groups}, because {linked}; see --sharding_group_size")
    decay = (config.lr_decay_steps or config.num_steps) - warmup_steps(config) - config.lr_constant_steps
    if config.lr_constant_steps and decay <= 1:  # the cosine's first step is at the peak
        falls = "the learning rate falls from its peak to min_lr at once"
        lines.append(f"lr_constant_steps={config.lr_constant_steps}: leaves no step for the cosine, {falls}")
    if engine == "xla" and config.use_torch_compile is False:
        lines.append("use_torch_compile=False: no effect, because the xla engine always compiles")
    if config.sequence_parallel and mesh.tensor == 1:
        lines.append("sequence_parallel: off, because tensor_parallel_size is 1")
    if config.sharding_strategy in ("zero1", "zero2") and mesh.shard * mesh.context == 1:
        lines.append(
            f"sharding_strategy={config.sharding_strategy}: same as ddp, because there is one data-parallel rank"
        )
    elif config.sharding_strategy == "zero2" and engine == "xla" and config.gradient_accumulation_steps == 1:
        lines.append("sharding_strategy=zero2: same as zero1, because there is no gradient accumulation")
    if (repeats := kv_repeats(config, shape)) > 1:
        lines.append(f"kv_replication: {repeats} copies of each of {shape.num_kv_heads} key/value heads are used")
    return lines
