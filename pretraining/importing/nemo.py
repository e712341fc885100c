"""NeMo's Megatron YAML: what it adds to the keys it shares with NxD Training. Meanings: NeMo 1.14 to 1.23."""

from __future__ import annotations

from typing import Any

from pretraining.importing import lightning, megatron, megatron_optim
from pretraining.importing.conversions import Conversion, ignored, implied, mapped, unsupported
from pretraining.importing.foreign import ForeignConfig
from pretraining.importing.mappings import Format, KeyMapping, choice, ignore, must_be_off, only, to
from pretraining.importing.nxdt import SEQUENCE_PARALLEL, pipeline, virtual_pipeline

_HALF = implied("bf16 needs no loss scale", precision="mixed_bf16", mixed_precision=True)
_BF16 = mapped(precision="mixed_bf16", mixed_precision=True)
_FP32 = mapped(precision="fp32", mixed_precision=False)


def _profile_end(value: Any, source: ForeignConfig) -> Conversion:
    start = source.get("model.nsys_profile.start_step")
    if not source.get("model.nsys_profile.enabled"):
        return ignored("profiling is off")
    if not isinstance(value, int) or not isinstance(start, int) or value < start:
        return unsupported("expected a step from start_step on")
    return implied("end_step - start_step + 1", profile_num_steps=value - start + 1)


def _profile_start(value: Any, source: ForeignConfig) -> Conversion:
    if not source.get("model.nsys_profile.enabled"):
        return ignored("profiling is off")
    if not isinstance(value, int):
        return unsupported("expected a whole number")
    return implied("batches are counted from 0 there, steps from 1 here", profile_start_step=value + 1)


PROFILE = {
    "model.nsys_profile.enabled": to("use_profiler"),
    "model.nsys_profile.start_step": KeyMapping(_profile_start, ("profile_start_step",), "plus 1"),
    "model.nsys_profile.end_step": KeyMapping(_profile_end, ("profile_num_steps",), "from start_step to this"),
    "model.nsys_profile.ranks": ignore("profiler_rank0_only says which processes"),
    "model.nsys_profile.gen_shape": ignore("of another profiler"),
}

FORMAT = Format(
    "nemo",
    "NeMo Megatron",
    {
        "name": to("run_name"),
        "restore_from_path": must_be_off(".nemo archives; import Hugging Face's safetensors with --ckpt_load_path"),
        **lightning.TRAINER,
        "trainer.precision": choice(
            {
                **dict.fromkeys((32, "32", "32-true"), _FP32),
                **dict.fromkeys(("bf16", "bf16-mixed"), _BF16),
                **dict.fromkeys((16, "16", "16-mixed"), _HALF),
            }
        ),
        **lightning.EXP_MANAGER,
        **megatron.ARCHITECTURE,
        "model.micro_batch_size": to("batch_size"),
        "model.global_batch_size": to("global_batch_size"),
        "model.tensor_model_parallel_size": to("tensor_parallel_size"),
        "model.pipeline_model_parallel_size": KeyMapping(pipeline, ("pipeline_parallel_size",), "or import_pp"),
        "model.virtual_pipeline_model_parallel_size": KeyMapping(virtual_pipeline, ("virtual_pipeline_size",)),
        "model.context_parallel_size": to("context_parallel_size"),
        "model.pipeline_model_parallel_split_rank": only((0,), "models with an encoder"),
        "model.sequence_parallel": SEQUENCE_PARALLEL,
        **{
            f"model.{name}": ignore("fp8 is off")
            for name in (
                *("fp8_e4m3", "fp8_hybrid", "fp8_margin", "fp8_interval", "fp8_amax_history_len"),
                "fp8_amax_compute_algo",
            )
        },
        **PROFILE,
        **megatron.data_rules("model.data."),
        **megatron.tokenizer_rules("model.tokenizer."),
        **megatron_optim.OPTIM,
    },
    {
        **lightning.DEFAULTS,
        **megatron_optim.ABSENT,
        "model.do_layer_norm_weight_decay": False,
        "trainer.precision": 32,
        "model.normalization": "layernorm",
        "model.activation": "gelu",
        "model.position_embedding_type": "learned_absolute",
        "model.bias": True,
        "model.hidden_dropout": 0.1,
        "model.attention_dropout": 0.1,
        "model.share_embeddings_and_output_weights": True,
        "model.make_vocab_size_divisible_by": 128,
    },
    (
        megatron_optim.schedule_is_indented,
        megatron.batch_check("model.", "model."),
    ),
)
