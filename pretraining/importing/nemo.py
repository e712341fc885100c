"""NeMo's Megatron YAML: what it adds to the keys it shares with NxD Training. Meanings: NeMo 1.14 to 1.23."""

from __future__ import annotations

from pretraining.importing import lightning, megatron, megatron_optim
from pretraining.importing.conversions import implied, mapped
from pretraining.importing.mappings import Format, choice, each, ignore, must_be_off, to
from pretraining.importing.shared import profiled_steps

FORMAT = Format(
    "nemo",
    "NeMo Megatron",
    {
        "name": to("run_name"),
        "restore_from_path": must_be_off(".nemo archives; import Hugging Face's safetensors with --ckpt_load_path"),
        **lightning.TRAINER,
        "trainer.precision": choice(
            {
                **dict.fromkeys((32, "32", "32-true"), mapped(precision="fp32", mixed_precision=False)),
                **dict.fromkeys(("bf16", "bf16-mixed"), mapped(precision="mixed_bf16", mixed_precision=True)),
                **dict.fromkeys(
                    (16, "16", "16-mixed"),
                    implied("bf16 needs no loss scale", precision="mixed_bf16", mixed_precision=True),
                ),
            }
        ),
        **lightning.EXP_MANAGER,
        **megatron.ARCHITECTURE,
        "model.micro_batch_size": to("batch_size"),
        "model.global_batch_size": to("global_batch_size"),
        **megatron.parallel_section("model."),
        **each(
            "fp8_e4m3 fp8_hybrid fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo",
            ignore("fp8 is off"),
            "model.",
        ),
        "model.nsys_profile.enabled": to("use_profiler"),
        **profiled_steps(
            "model.nsys_profile.enabled", "model.nsys_profile.start_step", "model.nsys_profile.end_step", offset=1
        ),
        "model.nsys_profile.ranks": ignore("profiler_rank0_only decides which processes"),
        "model.nsys_profile.gen_shape": ignore("of another profiler"),
        **megatron.data_section("model.data."),
        **megatron.tokenizer_section("model.tokenizer."),
        **megatron_optim.MAPPINGS,
    },
    {
        **lightning.DEFAULTS,
        **megatron_optim.DEFAULTS,
        "model.do_layer_norm_weight_decay": False,
        "trainer.precision": 32,
        **{f"model.{name}": value for name, value in megatron.DEFAULTS.items()},
        "model.bias": True,
        "model.attention_dropout": 0.1,
    },
    (
        megatron_optim.schedule_is_indented,
        megatron.batch_check("model.", "model."),
    ),
)
