"""NeMo's Megatron YAML: what it adds to the keys it shares with NxD Training. Meanings: NeMo 1.14 to 1.23."""

from __future__ import annotations

import math
from typing import Any

from pretraining.tools.importing import lightning, megatron, megatron_optim, shared
from pretraining.tools.importing.conversions import (
    Conversion,
    differs,
    ignored,
    implied,
    mapped,
    precision,
    unsupported_value,
)
from pretraining.tools.importing.foreign import ForeignConfig
from pretraining.tools.importing.mappings import (
    KeyMapping,
    TrainerFormat,
    choice,
    each,
    ignore,
    must_be_off,
    read_with,
    to,
)
from pretraining.tools.importing.shared import profiled_steps

LAUNCHER = "for NeMo's launcher"


def _fsdp(value: Any, source: ForeignConfig) -> Conversion:
    if not value:
        return ignored("off")
    strategies = {"full": "fsdp", "hybrid": "hsdp", "grad": "zero2"}
    name = str(source.get("model.fsdp_sharding_strategy", "full"))
    if name not in strategies:
        return unsupported_value(f"fsdp_sharding_strategy={name}: known are {', '.join(strategies)}")
    return implied(f"fsdp_sharding_strategy={name}", sharding_strategy=strategies[name])


def _encoder_length(value: Any, source: ForeignConfig) -> Conversion:
    rows = source.integer("model.data.seq_length", 0)
    return implied("rows have data.seq_length") if rows not in (0, value) else mapped(seq_length=value)


def _fsdp_reduce(value: Any, source: ForeignConfig) -> Conversion:
    if not source.get("model.fsdp"):
        return ignored("without fsdp")
    names = {"32": "fp32", "fp32": "fp32", "bf16": "bf16"}
    return mapped(reduce_dtype=names.get(str(value), value))


def _norm_decay(value: Any, source: ForeignConfig) -> Conversion:
    """megatron-core's own optimizer decays no vector."""
    is_core = any(source.get(f"model.{name}") for name in ("mcore_gpt", "transformer_engine"))
    own = str(source.get("model.optim.name")).lower() == "mcore_distributed_optim"
    return megatron.norm_decay(value, finds_norms=not is_core or own)


def _transformer_engine(value: Any, source: ForeignConfig) -> Conversion:
    """AutocastTransformerLayer of NeMo's `megatron/transformer.py`, which takes neither of these settings."""
    own = {"activation": "gelu", "bias": True, "position_embedding_type": "learned_absolute", "ffn_dropout": 0.0}
    others = [f"{name}={found}" for name in own if (found := source.get(f"model.{name}", own[name])) != own[name]]
    if str(source.get("model.normalization")).lower() == "rmsnorm":
        others.append("normalization=rmsnorm")
    if not value or source.get("model.mcore_gpt") or not others:
        return ignored("a kernel's choice")
    return differs(f"{', '.join(others)} as written; its layers without mcore_gpt read none of them")


def _unread_by_core(source: ForeignConfig) -> str:
    return "megatron-core's layers, of mcore_gpt, do not read it" if source.get("model.mcore_gpt") else ""


_PRECISIONS = choice(
    {
        **dict.fromkeys((32, "32", "32-true"), precision("fp32")),
        **dict.fromkeys(("bf16", "bf16-mixed"), precision("mixed_bf16")),
        **dict.fromkeys((16, "16", "16-mixed"), precision("fp16")),
    }
)


def _precision(value: Any, source: ForeignConfig) -> Conversion:
    conversion = _PRECISIONS.convert(value, source)
    if conversion.values.get("precision") == "fp16":
        conversion = shared.half(source)
    if _fp8(source.get("model.fp8"), source).status != "different":
        return conversion
    return precision("fp8", conversion.note or "with fp8")


def _scale(name: str) -> KeyMapping:
    """A setting of the loss scale; NeMo's first scale is a number, ours a power of two."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        named = _precision(source.get("trainer.precision"), source).values.get("precision")
        if named != "fp16" or shared.is_replaced(source):
            return ignored("read with precision 16 alone")
        if name != "initial_scale_power":
            return mapped(**{name: value})
        if not isinstance(value, int | float) or value < 1 or not math.log2(value).is_integer():
            return unsupported_value("expected a power of two")
        return implied(f"2 to the power of {math.log2(value):.0f}", initial_scale_power=int(math.log2(value)))

    return KeyMapping(convert, (name,), "with precision 16")


def _fp8(value: Any, source: ForeignConfig) -> Conversion:
    """Transformer Engine's DelayedScaling and this recipe's fp8 differ in the factors alone, or it is refused."""
    if not value:
        return ignored("off")
    other = _PRECISIONS.convert(source.get("trainer.precision"), source).values.get("precision")
    differences = {
        "releases of NeMo differ in what it means without transformer_engine": not source.get(
            "model.transformer_engine"
        ),
        "what is not in fp8 is in bf16 here, not in fp32": other != "mixed_bf16",
        "gradients are e5m2 here: fp8_hybrid without fp8_e4m3": source.get("model.fp8_e4m3")
        or not source.get("model.fp8_hybrid"),
        "the gradients of weights are products in fp8 too: fp8_wgrad": not source.get("model.fp8_wgrad", True),
    }
    for reason, is_another in differences.items():
        if is_another:
            return unsupported_value(f"{reason}; give --precision", precision="fp8")
    note = "factors are powers of two, from the largest elements of the same product instead of earlier ones"
    return precision("fp8", note)._replace(status="different")


def _fp8_factors(_: Any, source: ForeignConfig) -> Conversion:
    note = "factors of fp8 do not follow earlier products"
    return differs(note) if source.get("model.fp8") else ignored("without fp8")


def _other_fp8(value: Any, source: ForeignConfig) -> Conversion:
    if value and source.get("model.fp8"):
        return unsupported_value("not known with fp8")
    return ignored("off, or without fp8")


FORMAT = TrainerFormat(
    "nemo",
    "NeMo Megatron",
    {
        "name": KeyMapping(lightning.run_name, ("run_name",), "where exp_manager.name is absent"),
        "restore_from_path": must_be_off(".nemo archives; import Hugging Face's safetensors with --ckpt_load_path"),
        **lightning.TRAINER,
        "trainer.precision": _PRECISIONS._replace(convert=_precision),
        **lightning.EXP_MANAGER,
        **megatron.ARCHITECTURE,
        "model.transformer_engine": KeyMapping(_transformer_engine, (), "a kernel's choice with mcore_gpt"),
        **megatron.unread(megatron.OF_NXDT, lambda _: "a name of NxD Training's, which NeMo does not read"),
        **megatron.unread("ffn_dropout transformer_block_type", _unread_by_core),
        "model.do_layer_norm_weight_decay": KeyMapping(_norm_decay, ("norm_weight_decay",), "as documented"),
        "model.encoder_seq_length": KeyMapping(_encoder_length, ("seq_length",), "data.seq_length, where it differs"),
        "model.fp8": KeyMapping(_fp8, ("precision", "mixed_precision"), "fp8 with fp8_hybrid, but for the factors"),
        "model.fp8_*": KeyMapping(_other_fp8, (), "refused with fp8"),
        **each("fp8_e4m3 fp8_hybrid fp8_wgrad", read_with("fp8"), "model."),
        **each(
            "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo reduce_amax",
            KeyMapping(_fp8_factors, (), "different: factors of fp8 do not follow earlier products"),
            "model.",
        ),
        "model.native_amp_init_scale": _scale("initial_scale_power"),
        "model.native_amp_growth_interval": _scale("loss_scale_window"),
        "model.hysteresis": _scale("loss_scale_hysteresis"),
        "model.fp8_params": ignore("parameters are in fp32, and rounded in each product"),
        "model.micro_batch_size": to("batch_size"),
        "model.global_batch_size": to("global_batch_size"),
        **megatron.parallel_section("model."),
        "model.nsys_profile.enabled": to("use_profiler"),
        **profiled_steps(
            "model.nsys_profile.enabled", "model.nsys_profile.start_step", "model.nsys_profile.end_step", offset=1
        ),
        "model.nsys_profile.ranks": ignore("profiler_rank0_only decides which processes"),
        "model.nsys_profile.*": ignore("of another profiler"),
        "model.memory_profile.enabled": must_be_off("use --memory_profiling with --use_profiler"),
        "model.memory_profile.*": ignore("of another profiler"),
        "model.fsdp": KeyMapping(_fsdp, ("sharding_strategy",), "with fsdp_sharding_strategy"),
        "model.fsdp_sharding_strategy": read_with("fsdp"),
        "model.fsdp_grad_reduce_dtype": KeyMapping(_fsdp_reduce, ("reduce_dtype",), "with fsdp"),
        **each("fsdp_sharded_checkpoint fsdp_use_orig_params", ignore("checkpoints are sharded here"), "model."),
        **each("run.* hydra.* defaults env_vars.*", ignore(LAUNCHER)),
        "s3_checkpointing.*": ignore("ckpt_save_path may be in object storage"),
        **each(
            "precision target nemo_version gc_interval mcore_customization_config.*", ignore("read below model alone")
        ),
        **megatron.data_section("model.data."),
        **megatron.tokenizer_section("model.tokenizer."),
        **megatron_optim.MAPPINGS,
    },
    {
        **lightning.DEFAULTS,
        **megatron_optim.DEFAULTS,
        "model.do_layer_norm_weight_decay": False,
        "trainer.precision": 32,
        "model.seed": 1234,
        "model.native_amp_init_scale": 2**32,
        **{f"model.{name}": value for name, value in megatron.DEFAULTS.items()},
        "model.bias": lambda source: True if source.values.get("model.has_bias") is None else None,
        "model.bias_activation_fusion": lambda source: source.values.get("model.bias_gelu_fusion", True),
        "model.attention_dropout": 0.1,
    },
    (megatron_optim.schedule_is_indented,),
    (megatron.batch_check("model.", "model."),),  # which NeMo checks on the devices of a run, as this recipe does
    megatron.required("model.", "model.data."),
    lightning.SOURCES,
)
