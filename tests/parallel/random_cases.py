"""Compare random configurations on a mesh with the torch engine on one process.

    python -m tests.parallel.random_cases xla|torch DEVICES NUMBER [SEED]

Draws options of the model, the optimizer and the batch, and a mesh with stages, pieces and schedules, until NUMBER
valid configurations are found; some runs are also saved and resumed in their middle. On the XLA engine, some have
splash attention, interpreted. Prints the largest relative difference of the losses and of the gradient norms of each,
and of those above 1e-4 the configuration.

AdamW's eps is 1e-3. With 1e-8 an update depends on little more than the signs of the gradient, and an element near 0
has its sign by rounding: sums in another order, which differ by 4e-7 in the first norm, differed by 4e-5 after four
steps. No activation has a kink: of 24 runs with relu, rounding put an input of one on the other side of 0, and that was
9e-6 of the first gradient's norm and 4e-3 of the fifth's.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from typing import Any

import numpy as np

from main_training import configure
from pretraining.config.errors import ConfigError
from pretraining.parallel.layout import uneven_shards
from pretraining.parallel.mesh import resolve_batch, resolve_mesh
from tests.parallel.launch import ALONE, HAS_SPLASH, run_on_torch, run_on_xla
from tests.parallel.toy import TOY

Fields = dict[str, Any]
LARGE = 1e-4
EPS = 1e-3
USUAL = 0.6  # share of options that keep their default
SWITCHES = (
    *("norm_bias", "qk_norm", "attn_bias", "qkv_bias", "mlp_bias", "parallel_residual", "shared_norm"),
    *("scale_embeddings", "tie_word_embeddings", "norm_weight_decay"),
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SWITCHES, (True,)),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "ffn_dropout"), (0.1,)),
    "num_layers": (1, 2, 3, 5, 6, 8),
    "num_attention_heads": (4, 6),
    "num_kv_heads": (1, 2, 8),
    "head_dim": (8, 20),
    "vocab_size": (511, 513),
    "make_vocab_size_divisible_by": (96,),
    "seq_length": (48, 128),
    "norm_type": ("layernorm",),
    "activation": ("gelu", "geglu", "squared_relu"),
    "logit_softcap": (3.0,),
    "position_embedding_type": ("learned_absolute", "none"),
    "rotary_percentage": (0.5,),
    "rope_scaling_type": ("linear", "llama3"),
    "sliding_window": (5, 40),
    "mup_base_width": (32,),
    "z_loss": (1e-2,),
    "optimizer": ("adamw", "lion", "muon", "adafactor", "sm3", "novograd", "sgd", "adagrad"),
    "learning_rate": (1e-3, 1e-2),
    "weight_decay": (0.3,),
    "grad_clip_thresh": (0.1, 0.0),
    "grad_clip_norm_type": (1.0, 0.0),
    "ema_decay": (0.9,),
    "lora_rank": (4,),
    "lora_target_modules": ("q_proj,down_proj", ".*_proj"),
    "lora_bias": ("all",),
    "lora_init": ("gaussian",),
    "rampup_batch_size": ("8,8,32",),
    "seq_length_stages": ("16:3",),
}
PLACEMENT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sequence_parallel", "fsdp_activation_checkpointing"), (True,)),
    "sharding_strategy": ("ddp", "fsdp", "hsdp", "zero1", "zero2"),
    "sharding_group_size": (1, 2, 4),
    "tensor_parallel_size": (2, 4),
    "context_parallel_size": (2, 4),
    "kv_replication": (1, 2),
    "pipeline_parallel_size": (2, 4),
    "low_cpu_fsdp": (False,),
    "selective_checkpointing": ("2", "1/3"),
    "checkpoint_granularity": ("selective",),
    "checkpoint_modules": ("mlp,norm", "core_attention"),
    "checkpoint_num_layers": (2,),
    "batch_size": (1, 2, 4),
    **({"attention_impl": ("splash",)} if HAS_SPLASH else {}),
}
OF_STAGES: dict[str, tuple[Any, ...]] = {"virtual_pipeline_size": (2,), "pipeline_schedule": ("GPipe",)}


def can_run(engine: str, devices: int, fields: Fields) -> bool:
    """Return whether the configuration is valid on this many devices."""
    try:
        config = configure({**TOY, **fields, "engine": engine}, report=False)
        mesh = resolve_mesh(config, devices, devices)
        resolve_batch(config, mesh.data_ranks)
    except ConfigError:
        return False
    return engine == "xla" or not list(uneven_shards(config, mesh))


def losses_of(engine: str, devices: int, cases: dict[str, Fields]) -> dict[str, Any]:
    """Train the cases; ALONE devices: one, without a process group."""
    if engine == "torch":
        return run_on_torch(devices, cases)
    return run_on_xla(devices, {name: {**fields, "evaluates": False} for name, fields in cases.items()})[0]


def difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists; NaN if one has it."""
    return float(np.max([abs(one / other - 1) for one, other in zip(found, expected, strict=True)]))


def draw(generator: random.Random, options: dict[str, tuple[Any, ...]]) -> Fields:
    """Return values for some of the options."""
    return {name: generator.choice(values) for name, values in options.items() if generator.random() > USUAL}


def draw_cases(engine: str, devices: int, number: int, seed: int) -> dict[str, tuple[Fields, Fields]]:
    """Return valid configurations by number: options, and placement."""
    found: dict[str, tuple[Fields, Fields]] = {}
    generator = random.Random(seed)
    while len(found) < number:
        options, placement = draw(generator, OPTIONS), draw(generator, PLACEMENT)
        placement |= draw(generator, OF_STAGES) if "pipeline_parallel_size" in placement else {}
        batch = {"batch_size": placement.get("batch_size", 1)}
        if options.get("optimizer", "adamw") == "adamw":
            options["optimizer_eps"] = EPS
        if can_run("torch", 1, options) and can_run(engine, devices, {**options, **placement, **batch}):
            found[str(len(found))] = (options, {**placement, **batch})
    return found


def main(engine: str, devices: int, number: int, seed: int = 0) -> int:
    """Run, print, and return the number of large differences; see the module's docstring."""
    cases = draw_cases(engine, devices, number, seed)
    alone = losses_of("torch", ALONE, {name: dict(options) for name, (options, _) in cases.items()})
    with tempfile.TemporaryDirectory() as folder:
        split = {name: {**options, **placement} for name, (options, placement) in cases.items()}
        for name in list(split)[::3]:
            split[name]["halfway"] = f"{folder}/{name}"
        outcomes = losses_of(engine, devices, split)
    large = 0
    for name, outcome in outcomes.items():
        differences = [difference(outcome[figure], alone[name][figure]) for figure in ("loss", "grad_norm")]
        is_near = all(value <= LARGE for value in differences)  # NaN is not
        large += not is_near
        shown = "" if is_near else json.dumps(cases[name])
        print(name, *(f"{value:.1e}" for value in differences), shown, flush=True)
    print(f"{len(outcomes)} configurations on {devices} devices of the {engine} engine, {large} above {LARGE:g}")
    return large


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
