"""What a configuration must satisfy whatever the machine: ranges of single fields, and rules across fields.

Every problem is collected; none is raised here. Rules that need the device count are the engine's
(`pretraining/parallel/mesh.py`), rules that need files are the data's and the checkpoint's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from pretraining.config.devices import PLAN_KINDS
from pretraining.config.errors import Problem
from pretraining.config.lora import MODULES, PROJECTIONS, adapted, matches
from pretraining.config.optimizers import FLAGS, OPTIMIZERS, hyperparameters, is_like, parse_arguments
from pretraining.config.variants import CUSTOM, GATED, REQUIRED_OF_CUSTOM, VARIANTS, model_shape

if TYPE_CHECKING:
    from pretraining.config.training import TrainConfig


def problems(config: TrainConfig, unreadable: Collection[str] = (), missing_matters: bool = True) -> list[Problem]:
    """Everything wrong with `config`. Rules that read an `unreadable` field, or one whose own range is already
    violated, are left out: they would only repeat that mistake. `missing_matters` False leaves out what is not given.
    """
    found = {name: problem for name, problem in _single(config) if name not in unreadable}
    bad = {*unreadable, *found}
    rules = (*RULES, *RULES_OF_PRESENCE) if missing_matters else RULES
    across = [problem for rule in rules if not bad & set(rule.fields) for problem in rule.broken(config)]
    return [*found.values(), *across]


def flag(config: TrainConfig, name: str) -> str:
    """The flag as the user would type it: "--seq_length=4096"."""
    return f"--{name}={getattr(config, name)}"


# ---- single fields


class Range(NamedTuple):
    """The numbers a field may hold. None is always allowed: it means that the field is not given."""

    holds: Callable[[Any], bool]
    words: str


POSITIVE = Range(lambda value: value >= 1, "must be at least 1")
NOT_NEGATIVE = Range(lambda value: value >= 0, "must be at least 0")
ABOVE_ZERO = Range(lambda value: value > 0, "must be above 0")
OR_ALL = Range(lambda value: value >= -1, "must be at least 0, or -1 for all")
DECAY = Range(lambda value: 0 <= value < 1, "must be at least 0 and below 1")

RANGES = {
    "num_layers": POSITIVE,
    "hidden_size": POSITIVE,
    "intermediate_size": POSITIVE,
    "num_attention_heads": POSITIVE,
    "num_kv_heads": POSITIVE,
    "head_dim": Range(lambda value: value >= 2 and value % 2 == 0, "must be even: rotary embeddings turn pairs"),
    "vocab_size": POSITIVE,
    "make_vocab_size_divisible_by": POSITIVE,
    "max_position_embeddings": POSITIVE,
    "norm_eps": ABOVE_ZERO,
    "rope_theta": ABOVE_ZERO,
    "rope_scaling_factor": POSITIVE,
    "rope_low_freq_factor": ABOVE_ZERO,
    "rope_high_freq_factor": ABOVE_ZERO,
    "rope_original_max_position": POSITIVE,
    "init_std": NOT_NEGATIVE,
    "sliding_window": POSITIVE,
    "lora_rank": NOT_NEGATIVE,
    "plan_devices": NOT_NEGATIVE,
    "lora_alpha": ABOVE_ZERO,
    "lora_dropout": DECAY,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "ffn_dropout"), DECAY),
    "rotary_percentage": Range(lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
    "sharding_group_size": NOT_NEGATIVE,
    **dict.fromkeys(("tensor_parallel_size", "context_parallel_size"), POSITIVE),
    **dict.fromkeys(("pipeline_parallel_size", "virtual_pipeline_size"), POSITIVE),
    "kv_replication": NOT_NEGATIVE,
    "collective_timeout": POSITIVE,
    "loss_scale": NOT_NEGATIVE,
    "initial_scale_power": Range(lambda value: 0 <= value <= 32, "must be between 0 and 32"),
    **dict.fromkeys(("loss_scale_window", "loss_scale_hysteresis"), POSITIVE),
    "min_loss_scale": ABOVE_ZERO,
    "checkpoint_num_layers": POSITIVE,
    "learning_rate": ABOVE_ZERO,
    "adam_beta1": DECAY,
    "adam_beta2": DECAY,
    "optimizer_eps": ABOVE_ZERO,
    "weight_decay": NOT_NEGATIVE,
    "grad_clip_thresh": NOT_NEGATIVE,
    "grad_clip_norm_type": Range(lambda value: value == 0 or value >= 1, "must be at least 1, or 0 for the largest"),
    **dict.fromkeys(("lr_warmup_steps", "lr_hold_steps", "lr_constant_steps", "min_lr"), NOT_NEGATIVE),
    "lr_warmup_ratio": DECAY,
    **dict.fromkeys(("lr_decay_steps", "lr_step_size", "lr_d_model"), POSITIVE),
    **dict.fromkeys(("lr_power", "lr_decay_rate"), ABOVE_ZERO),
    "lr_gamma": Range(lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
    "max_skipped_steps": NOT_NEGATIVE,
    "batch_size": POSITIVE,
    "global_batch_size": POSITIVE,
    "gradient_accumulation_steps": POSITIVE,
    "seq_length": POSITIVE,
    "num_steps": POSITIVE,
    # The data's order mixes the seed as 64 bits; torch's generators take the same range.
    "seed": Range(lambda value: 0 <= value < 2**63, "must be at least 0 and below 2^63"),
    "logical_shards": POSITIVE,
    **dict.fromkeys(("sep_token", "eos_token", "bos_token", "bol_token", "eol_token"), NOT_NEGATIVE),
    "max_samples": POSITIVE,
    "num_workers": POSITIVE,
    "num_epochs": POSITIVE,
    "val_interval": NOT_NEGATIVE,
    **dict.fromkeys(("val_steps", "val_sanity_steps", "test_steps"), OR_ALL),
    "checkpoint_interval": NOT_NEGATIVE,
    "keep_last_n_checkpoints": NOT_NEGATIVE,
    "ckpt_io_workers": POSITIVE,
    "ckpt_max_failures": POSITIVE,
    "report_interval": POSITIVE,
    "step_timeout": NOT_NEGATIVE,
    "source_world_size": POSITIVE,
    "profile_start_step": POSITIVE,
    "profile_num_steps": POSITIVE,
}

# Schedule -> the fields that it reads besides learning_rate and num_steps.
_SPAN = ("lr_warmup_steps", "lr_warmup_ratio", "lr_decay_steps", "min_lr")
SCHEDULES = {
    "fms_cosine": (),
    "fms_annealing": (),
    "constant": _SPAN,
    "linear_warmup_decay": ("lr_warmup_steps", "lr_warmup_ratio", "lr_decay_steps"),
    "cosine": (*_SPAN, "lr_constant_steps"),
    "wsd": (*_SPAN, "lr_hold_steps"),
    "warmup_hold": (*_SPAN, "lr_hold_steps"),
    "square": _SPAN,
    "square_root": _SPAN,
    "noam": ("lr_warmup_steps", "lr_warmup_ratio", "lr_decay_steps", "min_lr", "lr_d_model"),
    "noam_hold": (*_SPAN, "lr_hold_steps", "lr_decay_rate"),
    "warmup_annealing": _SPAN,
    "inverse_sqrt": _SPAN,
    "poly": (*_SPAN, "lr_power", "lr_cycle"),
    "poly_hold": (*_SPAN, "lr_power", "lr_cycle", "lr_hold_steps"),
    "step": ("lr_step_size", "lr_gamma"),
    "exponential_lr": ("lr_gamma",),
    **{f"{era}_{shape}": _SPAN for era in ("neox", "neox2022") for shape in ("linear", "cosine", "exponential")},
}
NEEDED = {"noam": ("lr_d_model",), "step": ("lr_step_size", "lr_gamma"), "exponential_lr": ("lr_gamma",)}
CURVE = tuple(dict.fromkeys(name for names in SCHEDULES.values() for name in names))  # every field of some schedule

CHOICES: dict[str, Collection[str]] = {
    "model_variant": (*VARIANTS, CUSTOM),
    "norm_type": ("rmsnorm", "layernorm"),
    "activation": (*GATED, "gelu", "gelu_tanh", "relu", "silu"),
    "position_embedding_type": ("rope", "learned_absolute", "none"),
    **dict.fromkeys(
        ("init_method", "output_init_method"),
        ("normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform"),
    ),
    "rope_scaling_type": ("none", "linear", "llama3"),
    "engine": ("auto", "xla", "torch"),
    "device": ("auto", "cuda", "cpu", "tpu"),
    "sharding_strategy": ("ddp", "zero1", "zero2", "fsdp", "hsdp"),
    "checkpoint_granularity": ("full", "selective"),
    "plan_device_kind": ("", *PLAN_KINDS),
    "lora_bias": ("none", "all", "lora_only"),
    "lora_init": ("default", "gaussian"),
    "lora_save_mode": ("adapter", "base_and_adapter", "merged"),
    "precision": ("auto", "fp32", "mixed_bf16", "mixed_bf16_sr", "bf16_sr", "autocast", "fp16", "manual"),
    "reduce_dtype": ("auto", "fp32", "bf16"),
    "optimizer": OPTIMIZERS,
    "training_stage": ("initial", "annealing"),
    "lr_schedule": SCHEDULES,
    "checkpoint_scale": ("linear", "log"),
    "resume": ("auto", "must", "never"),
    "checkpoint_dtype": ("auto", "fp32", "bf16"),
    "tracker": ("", "wandb"),
    "file_type": ("auto", "arrow", "parquet", "megatron"),
    "shuffle": ("shards", "none"),
    "import_format": ("auto", "nxdt", "nemo", "neox"),
    "import_pp": ("keep", "fold"),
    "neox_era": ("auto", "2022", "head"),
    "neox_gated_ffn": ("auto", "head", "legacy"),
}


def _single(config: TrainConfig) -> Iterator[tuple[str, Problem]]:
    for name, allowed in RANGES.items():
        value = getattr(config, name)
        if value is not None and not allowed.holds(value):
            yield name, Problem(flag(config, name), allowed.words)
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            words = ", ".join(choice or "nothing" for choice in choices)
            yield name, Problem(flag(config, name), f"must be one of {words}")
    for name, (read, words) in LISTS.items():
        try:
            read(getattr(config, name))
        except ValueError:
            yield name, Problem(flag(config, name), words)


def comma_separated(text: str) -> list[str]:
    """The items of a comma-separated field, without blanks around them; of an empty one, none."""
    return [item.strip() for item in text.split(",")] if text.strip() else []


def parse_weights(text: str) -> list[float]:
    """Shares of a mixture. Raises ValueError unless each is a finite number above 0."""
    shares = [float(item) for item in comma_separated(text)]
    if not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"expected numbers above 0, got {text}")
    return shares


def parse_steps(text: str) -> list[int]:
    """Step numbers. Raises ValueError unless each is a whole number, 0 or above."""
    steps = [int(item) for item in comma_separated(text)]
    if any(step < 0 for step in steps):
        raise ValueError(f"expected step numbers from 0, got {text}")
    return steps


def parse_split(text: str) -> list[float]:
    """Shares of train, valid and test, missing ones 0; of an empty text, none. Raises ValueError otherwise."""
    shares = [float(part) for part in text.replace("/", ",").split(",")] if text.strip() else []
    if shares and (len(shares) > 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf")):
        raise ValueError(f"expected up to three shares, got {text}")
    return shares and shares + [0.0] * (3 - len(shares))


def parse_selective(text: str) -> int | Fraction:
    """selective_checkpointing: k for "every k-th block", or the exact share of the blocks, between 0 and 1.

    "2" is 2, "1/3" one third, "0.5" one half (the decimal as written, not its nearest float), "1.0" all: 1.
    Raises ValueError for anything else.
    """
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    if re.fullmatch(r"\d+/0*[1-9]\d*|\d*\.\d+|\d+\.", text) and 0 < (share := Fraction(text)) <= 1:
        return share if share < 1 else 1
    raise ValueError(f"expected a whole number from 1 or a fraction between 0 and 1, got {text}")


PARTS = ("checkpoint_granularity", "checkpoint_modules", "checkpoint_num_layers")  # what of a chosen block
RECOMPUTABLE = ("core_attention", "mlp", "norm", "mlp_activation")


def parse_modules(text: str) -> list[str]:
    """checkpoint_modules. Raises ValueError for a name that is no module."""
    names = comma_separated(text)
    if set(names) - set(RECOMPUTABLE):
        raise ValueError(f"expected {', '.join(RECOMPUTABLE)}, got {text}")
    return names


# Text fields with a grammar: its reader, and what it expects.
LISTS: dict[str, tuple[Callable[[str], object], str]] = {
    "selective_checkpointing": (
        parse_selective,
        "expected every how many blocks (1, 2, 3, ...) or a share of them between 0 and 1 (1/3, 0.5); to recompute "
        "none, --fsdp_activation_checkpointing=False",
    ),
    "checkpoint_modules": (parse_modules, f"expected some of {', '.join(RECOMPUTABLE)}, comma-separated"),
    "optimizer_args": (parse_arguments, "expected name=value, comma-separated, such as momentum=0.9,nesterov=True"),
    "weights": (parse_weights, "expected a number above 0 for each dataset, comma-separated, such as 2,1,0.5"),
    "valid_weights": (parse_weights, "expected a number above 0 for each dataset, comma-separated, such as 2,1,0.5"),
    "strip_tokens": (parse_steps, "expected token ids, comma-separated, such as 0,1"),
    "split": (parse_split, "expected up to three numbers for train, valid and test, such as 949,50,1"),
    "import_lr_steps": (parse_steps, "expected step numbers from 0, comma-separated, such as 0,100,1000"),
    "extra_checkpoint_steps": (parse_steps, "expected step numbers from 0, comma-separated, such as 0,100,1000"),
}


# ---- rules across fields


class Rule(NamedTuple):
    """A rule and the fields it reads."""

    broken: Callable[[TrainConfig], Iterable[Problem]]
    fields: tuple[str, ...]


def _custom_is_complete(config: TrainConfig) -> Iterator[Problem]:
    missing = [f"--{name}" for name in REQUIRED_OF_CUSTOM if getattr(config, name) is None]
    if config.model_variant == CUSTOM and missing:
        yield Problem("--model_variant=custom", f"needs {', '.join(missing)} too")


def _is_complete(config: TrainConfig) -> bool:
    return config.model_variant != CUSTOM or not list(_custom_is_complete(config))


def _heads_divide(config: TrainConfig) -> Iterator[Problem]:
    if not _is_complete(config):
        return
    shape = model_shape(config)
    heads, kv_heads = shape.num_attention_heads, shape.num_kv_heads
    if heads % kv_heads:
        remedy = f"does not divide num_attention_heads={heads}; use {_or(divisors(heads))}"
        yield Problem(f"--num_kv_heads={kv_heads}", remedy)
    if config.head_dim is not None:
        return
    if shape.hidden_size % heads:
        remedy = (
            f"does not divide hidden_size={shape.hidden_size}; use {_or(divisors(shape.hidden_size))}, or --head_dim"
        )
        yield Problem(f"--num_attention_heads={heads}", remedy)
    elif shape.head_dim % 2:
        remedy = (
            f"leaves {shape.head_dim} of hidden_size={shape.hidden_size} a head; rotary embeddings need an even number"
        )
        yield Problem(f"--num_attention_heads={heads}", remedy)


def divisors(number: int, limit: int = 256) -> list[int]:
    """The divisors of `number` up to `limit`, ascending."""
    return [candidate for candidate in range(1, min(number, limit) + 1) if number % candidate == 0]


def _or(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _tensor_ranks_divide(config: TrainConfig) -> Iterator[Problem]:
    """Every tensor rank takes whole heads and as many feed-forward channels; the vocabulary is padded."""
    if not _is_complete(config):
        return
    shape, ranks = model_shape(config), config.tensor_parallel_size
    for name in ("num_attention_heads", "intermediate_size"):
        extent = getattr(shape, name)
        if extent % ranks:
            remedy = f"does not divide {name}={extent}; use {_or(divisors(extent))}"
            yield Problem(flag(config, "tensor_parallel_size"), remedy)


def _kv_heads_repeat(config: TrainConfig) -> Iterator[Problem]:
    repeats, ranks = config.kv_replication, config.tensor_parallel_size
    if repeats <= 1 or not _is_complete(config):
        return
    heads = model_shape(config).num_kv_heads
    valid = [r for r in divisors(ranks) if heads * r % ranks == 0]
    if repeats not in valid:
        remedy = f"x num_kv_heads={heads} does not give each of tensor_parallel_size={ranks} ranks as many heads"
        yield Problem(flag(config, "kv_replication"), f"{remedy}; use {_or(valid)}, or 0 for the least")


def _tokens_divide(config: TrainConfig) -> Iterator[Problem]:
    tensor = config.tensor_parallel_size if config.sequence_parallel else 1
    parts = config.context_parallel_size * tensor
    if config.seq_length % parts:
        named = [f"context_parallel_size={config.context_parallel_size}"] * (config.context_parallel_size > 1)
        named += [f"tensor_parallel_size={tensor} (sequence_parallel)"] * (tensor > 1)
        down, up = config.seq_length // parts * parts, math.ceil(config.seq_length / parts) * parts
        remedy = f"is not a multiple of {' x '.join(named)}; use {f'{down} or {up}' if down else up}"
        yield Problem(flag(config, "seq_length"), remedy)


def _group_has_a_use(config: TrainConfig) -> Iterator[Problem]:
    if config.sharding_group_size and config.sharding_strategy != "hsdp":
        remedy = f"is for sharding_strategy=hsdp, not {config.sharding_strategy}; leave one of the two out"
        yield Problem(flag(config, "sharding_group_size"), remedy)


def _pipeline_is_planned_at_most(config: TrainConfig) -> Iterator[Problem]:
    if config.plan:
        yield from _stages_divide(config)
        return
    for name in ("pipeline_parallel_size", "virtual_pipeline_size"):
        if getattr(config, name) > 1 and not config.import_only:
            remedy = (
                "training has no pipeline yet; use 1, or --import_pp=fold for an imported file, and shard with "
                "sharding_strategy or tensor_parallel_size"
            )
            yield Problem(flag(config, name), remedy)


def _stages_divide(config: TrainConfig) -> Iterator[Problem]:
    stages, pieces = config.pipeline_parallel_size, config.virtual_pipeline_size
    if pieces > 1 and stages == 1:
        yield Problem(flag(config, "virtual_pipeline_size"), "needs pipeline_parallel_size above 1")
    elif _is_complete(config) and model_shape(config).num_layers % (stages * pieces):
        product = f"x virtual_pipeline_size={pieces} = {stages * pieces} " if pieces > 1 else ""
        remedy = f"{product}does not divide num_layers={model_shape(config).num_layers}"
        yield Problem(flag(config, "pipeline_parallel_size"), remedy)
    if config.plan_devices % stages:
        yield Problem(flag(config, "pipeline_parallel_size"), f"does not divide plan_devices={config.plan_devices}")
    elif stages > 1 and config.plan_topology:
        yield Problem(flag(config, "plan_topology"), "has no place for stages; use plan_devices")


def _positions_reach(config: TrainConfig) -> Iterator[Problem]:
    if not _is_complete(config):
        return
    longest = model_shape(config).max_position_embeddings
    if config.seq_length > longest:
        remedy = f"is above max_position_embeddings={longest}; shorten it, or give --max_position_embeddings as well"
        yield Problem(flag(config, "seq_length"), remedy)


def _norm_has_a_bias(config: TrainConfig) -> Iterator[Problem]:
    if config.norm_bias and config.norm_type != "layernorm":
        yield Problem("--norm_bias=True", f"is for norm_type=layernorm, not {config.norm_type}; leave one of them out")


def _rotation_has_pairs(config: TrainConfig) -> Iterator[Problem]:
    if config.position_embedding_type != "rope" and (
        config.rotary_percentage < 1 or config.rope_scaling_type != "none"
    ):
        name = "rotary_percentage" if config.rotary_percentage < 1 else "rope_scaling_type"
        yield Problem(
            flag(config, name),
            f"turns nothing with position_embedding_type={config.position_embedding_type}; leave one of them out",
        )
    if _is_complete(config) and int(model_shape(config).head_dim * config.rotary_percentage) < 2:
        remedy = f"of head_dim={model_shape(config).head_dim} is less than one pair of channels"
        yield Problem(flag(config, "rotary_percentage"), remedy)


def _rope_bands_order(config: TrainConfig) -> Iterator[Problem]:
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling_type == "llama3" and high <= low:
        yield Problem(flag(config, "rope_high_freq_factor"), f"must be above rope_low_freq_factor={low}")


def _batch_arithmetic(config: TrainConfig) -> Iterator[Problem]:
    """The part that holds on any number of devices: the global batch is a multiple of what one device takes."""
    if config.global_batch_size is None:
        return
    passes = config.gradient_accumulation_steps or 1
    part, total = config.batch_size * passes, config.global_batch_size
    if total % part:
        each = f"batch_size={config.batch_size}"
        each += f" x gradient_accumulation_steps={passes} = {part}" if config.gradient_accumulation_steps else ""
        down, up = total // part * part, (total // part + 1) * part
        remedy = f"is not a multiple of {each}; use {f'{down} or {up}' if down else up}, or another batch_size"
        yield Problem(flag(config, "global_batch_size"), remedy)


def _recomputes_something(config: TrainConfig) -> Iterator[Problem]:
    if not config.fsdp_activation_checkpointing or not _is_complete(config):
        return
    layers, choice = model_shape(config).num_layers, parse_selective(config.selective_checkpointing)
    none = choice > layers if isinstance(choice, int) else choice * layers < Fraction(1, 2)
    if none:
        remedy = f"recomputes none of num_layers={layers}; choose more, or --fsdp_activation_checkpointing=False"
        yield Problem(flag(config, "selective_checkpointing"), remedy)


PLAN = ("plan_devices", "plan_device_kind", "plan_search", "plan_compile", "plan_topology", "plan_json")


def _plan_is_complete(config: TrainConfig) -> Iterator[Problem]:
    if config.plan:
        if not config.plan_devices and not config.plan_topology:
            yield Problem("--plan=True", "needs --plan_devices=N")
        if not config.plan_device_kind:
            yield Problem("--plan=True", f"needs --plan_device_kind: one of {', '.join(PLAN_KINDS)}")
        return
    for name in PLAN:
        if getattr(config, name):
            yield Problem(flag(config, name), "needs --plan=True")


def _topology_fits(config: TrainConfig) -> Iterator[Problem]:
    """The slice is one of its kind's, and as large as said."""
    if not (config.plan_topology and config.plan_device_kind):
        return
    subject, axes = flag(config, "plan_topology"), PLAN_KINDS[config.plan_device_kind].topology_axes
    if not axes:
        tpus = ", ".join(name for name, kind in PLAN_KINDS.items() if kind.topology_axes)
        remedy = f"is a slice of TPUs, and plan_device_kind={config.plan_device_kind}; use {tpus}"
        yield Problem(subject, remedy)
        return
    if not re.fullmatch(r"[1-9]\d*" + r"x[1-9]\d*" * (axes - 1), config.plan_topology):
        yield Problem(subject, f"of {config.plan_device_kind} needs {axes} axes, such as {'x'.join(['4'] * axes)}")
    elif config.plan_devices not in (0, topology_devices(config)):
        yield Problem(subject, f"has {topology_devices(config)} chips, and plan_devices={config.plan_devices}")


def _compiles_what_a_tpu_runs(config: TrainConfig) -> Iterator[Problem]:
    if not config.plan_compile:
        return
    if not config.plan_topology:
        yield Problem("--plan_compile=True", "needs --plan_topology, such as 4x4 of tpu-v6e")
    if config.plan_search:
        yield Problem("--plan_compile=True", "compiles one configuration; leave out plan_search")
    if config.pipeline_parallel_size > 1:
        yield Problem("--plan_compile=True", "compiles what can be trained; --pipeline_parallel_size=1")
    if config.engine == "torch":
        yield Problem("--plan_compile=True", "compiles what the xla engine runs; leave out --engine=torch")


def topology_devices(config: TrainConfig) -> int:
    """Chips of plan_topology: on every generation since v4, a chip is one device."""
    return math.prod(map(int, config.plan_topology.split("x")))


LORA = (
    *("lora_alpha", "lora_use_rslora", "lora_dropout", "lora_target_modules", "lora_bias", "lora_modules_to_save"),
    *("lora_init", "lora_save_mode", "lora_load_path", "lora_load_tag"),
)


def _adapters_fit(config: TrainConfig) -> Iterator[Problem]:
    defaults = {field.name: field.default for field in fields(config)}
    if not config.lora_rank:
        for name in LORA:
            if getattr(config, name) != defaults[name]:
                yield Problem(flag(config, name), "needs --lora_rank=R, above 0")
        return
    try:
        found = adapted(config)
    except re.error as error:
        yield Problem(flag(config, "lora_target_modules"), f"is no regular expression: {error}")
        return
    if not found:
        names = ", ".join(name.rpartition(".")[2] for name in PROJECTIONS)
        yield Problem(flag(config, "lora_target_modules"), f"names no projection; there are {names}")
    for name in comma_separated(config.lora_modules_to_save):
        if not any(matches(module, name) for module in MODULES):
            yield Problem(
                flag(config, "lora_modules_to_save"), f"names no module {name}; there are {', '.join(MODULES)}"
            )


def _recomputed_parts_agree(config: TrainConfig) -> Iterator[Problem]:
    selective, modules = config.checkpoint_granularity == "selective", parse_modules(config.checkpoint_modules)
    if (selective or config.checkpoint_num_layers > 1) and not config.fsdp_activation_checkpointing:
        name = "checkpoint_granularity" if selective else "checkpoint_num_layers"
        yield Problem(flag(config, name), "needs --fsdp_activation_checkpointing=True")
    if selective and not modules:
        yield Problem(
            "--checkpoint_granularity=selective", f"needs --checkpoint_modules={','.join(RECOMPUTABLE)}, or some"
        )
    if modules and not selective:
        yield Problem(flag(config, "checkpoint_modules"), "is for --checkpoint_granularity=selective")
    whole = not selective and parse_selective(config.selective_checkpointing) == 1
    if config.checkpoint_num_layers > 1 and not whole:
        remedy = "recomputes every block whole; leave selective_checkpointing and checkpoint_granularity out"
        yield Problem(flag(config, "checkpoint_num_layers"), remedy)


def _schedule_reads_what_is_given(config: TrainConfig) -> Iterator[Problem]:
    defaults = {field.name: field.default for field in fields(config)}
    for name in CURVE:
        if getattr(config, name) != defaults[name] and name not in SCHEDULES[config.lr_schedule]:
            takes = [schedule for schedule, names in SCHEDULES.items() if name in names]
            remedy = f"is not read by lr_schedule={config.lr_schedule}; leave it out, or use {', '.join(takes)}"
            yield Problem(flag(config, name), remedy)
    missing = [name for name in NEEDED.get(config.lr_schedule, ()) if getattr(config, name) is None]
    if missing:
        yield Problem(flag(config, "lr_schedule"), f"needs {', '.join(f'--{name}' for name in missing)}")
    if config.training_stage == "annealing" and config.lr_schedule != "fms_annealing":
        remedy = f"contradicts --training_stage=annealing, which is {'fms_annealing'}; leave one out"
        yield Problem(flag(config, "lr_schedule"), remedy)


def _schedule_fits(config: TrainConfig) -> Iterator[Problem]:
    total = config.lr_decay_steps or config.num_steps
    if config.lr_warmup_steps is not None and config.lr_warmup_ratio is not None:
        remedy = f"says the same as lr_warmup_steps={config.lr_warmup_steps}; give one of the two"
        yield Problem(flag(config, "lr_warmup_ratio"), remedy)
        return
    peak = hyperparameters(config).learning_rate
    if config.min_lr > peak:
        yield Problem(flag(config, "min_lr"), f"is above learning_rate={peak}")
    warmup = config.lr_warmup_steps or int((config.lr_warmup_ratio or 0) * total)
    parts: dict[str, int] = {"lr_warmup_steps": warmup, "lr_hold_steps": config.lr_hold_steps}
    parts["lr_constant_steps"] = config.lr_constant_steps
    if 0 < total <= sum(parts.values()):
        longest = max(parts, key=lambda name: parts[name])
        said = " + ".join(f"{name}={steps}" for name, steps in parts.items() if steps)
        span = "lr_decay_steps" if config.lr_decay_steps else "num_steps"
        remedy = f"leaves no step to decay in: {said} of {span}={total}; the rate would fall off a cliff"
        yield Problem(f"--{longest}={parts[longest]}", remedy)


def precision_mode(config: TrainConfig) -> str:
    """`precision`, its "auto" resolved."""
    if config.precision != "auto":
        return config.precision
    return "mixed_bf16" if config.mixed_precision else "fp32"


def _precision_agrees(config: TrainConfig) -> Iterator[Problem]:
    wanted = precision_mode(config) != "fp32"
    if wanted != config.mixed_precision:
        remedy = (
            f"contradicts mixed_precision={config.mixed_precision}; give --mixed_precision={wanted}, or leave one out"
        )
        yield Problem(flag(config, "precision"), remedy)
    for name in BY_HAND:
        if getattr(config, name) is not None and config.precision != "manual":
            remedy = f"is for precision=manual; precision={precision_mode(config)} has its own"
            yield Problem(flag(config, name), remedy)


def _scale_has_a_use(config: TrainConfig) -> Iterator[Problem]:
    given = [
        field.name for field in fields(config) if field.name in SCALING and getattr(config, field.name) != field.default
    ]
    for name in given:
        if precision_mode(config) != "fp16":
            yield Problem(
                flag(config, name), f"is for precision=fp16; precision={precision_mode(config)} needs no scale"
            )
        elif config.loss_scale and name != "loss_scale":
            yield Problem(flag(config, name), f"is of the dynamic scale; loss_scale={config.loss_scale} is fixed")


def _half_needs_torch(config: TrainConfig) -> Iterator[Problem]:
    if config.precision == "fp16" and config.engine == "xla":
        remedy = "is the torch engine's: TPUs and Trainium have bf16, which needs no scale; use mixed_bf16"
        yield Problem("--precision=fp16", remedy)


SCALING = (*("loss_scale", "initial_scale_power", "loss_scale_window", "loss_scale_hysteresis", "min_loss_scale"),)
BY_HAND = ("master_weights", "fp32_grad_acc", "stochastic_rounding")


def _optimizer_has_what_is_given(config: TrainConfig) -> Iterator[Problem]:
    _, decay, takes = OPTIMIZERS[config.optimizer]
    words = f"it takes {', '.join(takes)}" if takes else "it takes none"
    given = parse_arguments(config.optimizer_args)
    for name, value in given.items():
        subject = f"--optimizer_args={name}={value}"
        if name not in takes:
            yield Problem(subject, f"optimizer={config.optimizer} has no {name}; {words}")
        elif not is_like(value, takes[name]):
            yield Problem(subject, f"expected something like {takes[name]}")
        elif name in FLAGS and getattr(config, FLAGS[name]) is not None:
            yield Problem(subject, f"says the same as {flag(config, FLAGS[name])[2:]}; give one of the two")
    for name, field in FLAGS.items():
        if getattr(config, field) is not None and not isinstance(takes.get(name, ()), float | None):
            yield Problem(flag(config, field), f"optimizer={config.optimizer} has no {name} of one number; {words}")
    if config.weight_decay and decay is None:
        remedy = f"optimizer={config.optimizer} has no weight decay; leave it out, or use another optimizer"
        yield Problem(flag(config, "weight_decay"), remedy)


def _relative_step_has_no_rate(config: TrainConfig) -> Iterator[Problem]:
    arguments = hyperparameters(config).arguments
    if arguments.get("relative_step") and config.learning_rate is not None:
        remedy = "adafactor's relative_step=True makes its own; leave one of the two out"
        yield Problem(flag(config, "learning_rate"), remedy)
    if arguments.get("warmup_init") and not arguments.get("relative_step"):
        yield Problem("--optimizer_args=warmup_init=True", "is for relative_step=True; give both or none")


def _device_suits_engine(config: TrainConfig) -> Iterator[Problem]:
    if config.engine == "xla" and config.device != "auto":
        remedy = f"is for --engine=torch; the xla engine takes PJRT_DEVICE={config.device.upper()}"
        yield Problem(flag(config, "device"), remedy)
    if config.cpu_offload and (config.engine == "xla" or config.device in ("cpu", "tpu")):
        where = "engine=xla" if config.engine == "xla" else f"device={config.device}"
        yield Problem("--cpu_offload=True", f"works on CUDA alone, not with {where}; leave it out")


def _weights_match(config: TrainConfig) -> Iterator[Problem]:
    for prefix in ("", "valid_"):
        text, names = getattr(config, f"{prefix}weights"), getattr(config, f"{prefix}datasets")
        weights, datasets = len(comma_separated(text)), len(comma_separated(names))
        if weights and weights != datasets:
            have = f"{prefix}datasets={names} has {datasets}" if datasets else f"{prefix}datasets is not given"
            remedy = f"has {weights} shares but {have}; give one share for each dataset"
            yield Problem(flag(config, f"{prefix}weights"), remedy)


def _separator_has_one_name(config: TrainConfig) -> Iterator[Problem]:
    if config.sep_token is not None and config.eos_token is not None and config.sep_token != config.eos_token:
        remedy = f"is another name of sep_token={config.sep_token}; give one of the two"
        yield Problem(flag(config, "eos_token"), remedy)


def _sequence_has_room(config: TrainConfig) -> Iterator[Problem]:
    if config.bol_token is not None and config.seq_length < 2:
        yield Problem(flag(config, "bol_token"), f"leaves no place for data in seq_length={config.seq_length}")


def _data_is_named(config: TrainConfig) -> Iterator[Problem]:
    if not config.use_dummy_dataset and not config.data_path:
        remedy = (
            "train on what? give --data_path=FOLDER of token shards, or --use_dummy_dataset=True for a speed test, or "
            "run bash scripts/train.sh, which prepares a small corpus"
        )
        yield Problem("--data_path", remedy)


def _validation_is_complete(config: TrainConfig) -> Iterator[Problem]:
    if config.val_interval and not config.val_steps:
        yield Problem(flag(config, "val_interval"), "needs --val_steps=N, the global batches of one validation")
    if config.val_interval and not (config.use_dummy_dataset or config.valid_data_path or config.split):
        remedy = (
            "needs held-out data: give --valid_data_path=FOLDER, or --split=949,50,1 to hold back part of data_path"
        )
        yield Problem(flag(config, "val_interval"), remedy)
    if config.val_sanity_steps and not config.val_interval:
        yield Problem(flag(config, "val_sanity_steps"), "needs --val_interval=N and what that needs")


def _test_is_complete(config: TrainConfig) -> Iterator[Problem]:
    shares = parse_split(config.split)
    if config.test_steps and not (config.use_dummy_dataset or config.test_data_path or (shares and shares[2])):
        remedy = "needs test data: give --test_data_path=FOLDER, or a third share, as in --split=949,50,1"
        yield Problem(flag(config, "test_steps"), remedy)


def _log_scale_grows(config: TrainConfig) -> Iterator[Problem]:
    if config.checkpoint_scale == "log" and config.checkpoint_interval == 1:
        yield Problem("--checkpoint_interval=1", "has no powers for checkpoint_scale=log; use 2 or more")


def _load_path_is_named(config: TrainConfig) -> Iterator[Problem]:
    if config.load_weights_only and not config.ckpt_load_path:
        yield Problem("--load_weights_only=True", "does nothing without --ckpt_load_path; give one or leave it out")


def _profile_is_reached(config: TrainConfig) -> Iterator[Problem]:
    last = config.profile_start_step + config.profile_num_steps - 1
    if config.use_profiler and last > config.num_steps:
        remedy = f"traces steps up to {last}, but num_steps={config.num_steps}; start earlier or trace fewer"
        yield Problem(flag(config, "profile_start_step"), remedy)


def _memory_is_traced(config: TrainConfig) -> Iterator[Problem]:
    if config.memory_profiling and not config.use_profiler:
        yield Problem("--memory_profiling=True", "records the steps that use_profiler traces; give --use_profiler=True")


_DIMENSIONS = (
    *("model_variant", "num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_kv_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rope_theta", "seq_length"),
)

RULES = (
    Rule(_heads_divide, _DIMENSIONS),
    Rule(_tensor_ranks_divide, ("tensor_parallel_size", *_DIMENSIONS)),
    Rule(_kv_heads_repeat, ("kv_replication", "tensor_parallel_size", *_DIMENSIONS)),
    Rule(_tokens_divide, ("seq_length", "context_parallel_size", "sequence_parallel", "tensor_parallel_size")),
    Rule(_group_has_a_use, ("sharding_group_size", "sharding_strategy")),
    Rule(
        _pipeline_is_planned_at_most,
        ("pipeline_parallel_size", "virtual_pipeline_size", "plan", "import_only", *PLAN, *_DIMENSIONS),
    ),
    Rule(_positions_reach, _DIMENSIONS),
    Rule(_norm_has_a_bias, ("norm_bias", "norm_type")),
    Rule(_rotation_has_pairs, ("position_embedding_type", "rotary_percentage", "rope_scaling_type", *_DIMENSIONS)),
    Rule(_rope_bands_order, ("rope_scaling_type", "rope_low_freq_factor", "rope_high_freq_factor")),
    Rule(_batch_arithmetic, ("batch_size", "global_batch_size", "gradient_accumulation_steps")),
    Rule(_recomputes_something, ("fsdp_activation_checkpointing", "selective_checkpointing", *_DIMENSIONS)),
    Rule(_plan_is_complete, ("plan", *PLAN)),
    Rule(_topology_fits, ("plan_topology", "plan_device_kind", "plan_devices")),
    Rule(_compiles_what_a_tpu_runs, (*PLAN, "engine", "pipeline_parallel_size")),
    Rule(_adapters_fit, ("lora_rank", *LORA)),
    Rule(_recomputed_parts_agree, ("fsdp_activation_checkpointing", "selective_checkpointing", *PARTS)),
    Rule(_schedule_reads_what_is_given, ("lr_schedule", "training_stage", *CURVE)),
    Rule(_schedule_fits, ("num_steps", "learning_rate", "optimizer", "optimizer_args", *CURVE)),
    Rule(_optimizer_has_what_is_given, ("optimizer", "optimizer_args", "weight_decay", *FLAGS.values())),
    Rule(_relative_step_has_no_rate, ("optimizer", "optimizer_args", "learning_rate")),
    Rule(_precision_agrees, ("precision", "mixed_precision", *BY_HAND)),
    Rule(_scale_has_a_use, ("precision", "mixed_precision", *SCALING)),
    Rule(_half_needs_torch, ("precision", "engine")),
    Rule(_device_suits_engine, ("engine", "device", "cpu_offload")),
    Rule(_weights_match, ("weights", "datasets", "valid_weights", "valid_datasets")),
    Rule(_separator_has_one_name, ("sep_token", "eos_token")),
    Rule(_sequence_has_room, ("bol_token", "seq_length")),
    Rule(_log_scale_grows, ("checkpoint_scale", "checkpoint_interval")),
    Rule(_memory_is_traced, ("memory_profiling", "use_profiler")),
    Rule(_profile_is_reached, ("use_profiler", "profile_start_step", "profile_num_steps", "num_steps")),
)

# A flag that is not given may be one that was misspelt: these wait until every flag has a known name.
RULES_OF_PRESENCE = (
    Rule(_custom_is_complete, _DIMENSIONS),
    Rule(_data_is_named, ("use_dummy_dataset", "data_path")),
    Rule(
        _validation_is_complete,
        ("val_interval", "val_steps", "val_sanity_steps", "use_dummy_dataset", "valid_data_path", "split"),
    ),
    Rule(_test_is_complete, ("test_steps", "use_dummy_dataset", "test_data_path", "split")),
    Rule(_load_path_is_named, ("load_weights_only", "ckpt_load_path")),
)
