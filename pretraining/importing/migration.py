"""The migration tables of configs.md: from the keys of other trainers to our fields, out of the importer's own tables.

fms-fsdp and NxD Core have no configuration files: their tables are for readers alone.
"""

from __future__ import annotations

from collections.abc import Callable

from pretraining.config.flags import field_types
from pretraining.importing import huggingface
from pretraining.importing.formats import FORMATS
from pretraining.importing.mappings import Format, KeyMapping, ignore, must_be_off, to

_AXES = ("tensor_parallel_size", "pipeline_parallel_size")
FMS = Format(
    "",
    "fms-fsdp",
    {
        "model_variant": to("model_variant"),
        **{
            name: to(name)
            for name in (
                *("ckpt_load_path", "ckpt_save_path", "use_dummy_dataset", "data_path", "datasets", "weights"),
                *("file_type", "col_name", "tokenizer_path", "seq_length", "vocab_size", "sep_token", "eos_token"),
                *("bos_token", "bol_token", "eol_token", "strip_tokens", "logical_shards", "num_workers"),
                *("sharding_strategy", "fsdp_activation_checkpointing", "mixed_precision", "low_cpu_fsdp"),
                *("batch_size", "num_steps", "training_stage", "learning_rate", "grad_clip_thresh", "seed"),
                *("use_profiler", "profiler_rank0_only", "report_interval", "checkpoint_interval", "tracker"),
                *("tracker_dir", "tracker_project_name", "tracker_run_id", "use_torch_compile"),
            )
        },
        "selective_checkpointing": KeyMapping(
            to("selective_checkpointing").convert,
            ("selective_checkpointing",),
            "1, 2, ...: every k-th; 1/3, 0.5: a share",
        ),
        "sharding_group_size": to("sharding_group_size"),
        "resuming_dataset": ignore("the checkpoint holds the data's position"),
        "speculator fields": must_be_off("training of speculators"),
    },
)
NXD_CORE = Format(
    "",
    "NxD Core",
    {
        **{f"neuronx_distributed_config.{name}": to(name) for name in (*_AXES, "sequence_parallel")},
        "pipeline_config.num_microbatches": KeyMapping(
            to("gradient_accumulation_steps").convert, ("gradient_accumulation_steps",), "micro-batches of a step"
        ),
        "pipeline_config.virtual_pipeline_size": to("virtual_pipeline_size"),
        "pipeline_config.pipeline_cuts": to("pipeline_cuts"),
        "optimizer_config.zero_one_enabled": KeyMapping(
            to("").convert, ("sharding_strategy",), "true: zero1, false: ddp"
        ),
        "optimizer_config.grad_clipping": KeyMapping(to("").convert, ("grad_clip_thresh",), "false: 0"),
        "optimizer_config.max_grad_norm": to("grad_clip_thresh"),
        "activation_checkpoint_config": KeyMapping(to("").convert, ("fsdp_activation_checkpointing",), "full: true"),
        "pad_model": must_be_off("choose tensor_parallel_size among the divisors of the heads"),
        "model_init_config.meta_device_init": to("low_cpu_fsdp"),
        "model_init_config.sequential_move_factor": ignore("for the host memory of Neuron's workers"),
        **{
            f"LoraConfig.{name}": to(ours)
            for name, ours in {
                **{name: name for name in ("lora_rank", "lora_alpha", "lora_dropout")},
                "use_rslora": "lora_use_rslora",
                "bias": "lora_bias",
                "target_modules": "lora_target_modules",
                "init_lora_weights": "lora_init",
                "modules_to_save": "lora_modules_to_save",
                "save_lora_config_adapter": "lora_config_in_adapter",
                "lora_load_tag": "lora_load_tag",
            }.items()
        },
        "LoraConfig.save_lora_base, merge_lora": KeyMapping(
            to("").convert,
            ("lora_save_mode",),
            "false, false: adapter; true, false: base_and_adapter; true, true: merged",
        ),
        "save_checkpoint.path": to("ckpt_save_path"),
        "save_checkpoint.num_workers": to("ckpt_io_workers"),
        "save_checkpoint.num_kept_ckpts": KeyMapping(to("").convert, ("keep_last_n_checkpoints",), "-1: 0, all"),
        "save_checkpoint.async_save": to("async_checkpointing"),
        "save_checkpoint.use_xser": ignore("checkpoints are always written shard by shard"),
        "load_checkpoint.path, tag": to("ckpt_load_path"),
        "load_checkpoint.strict": to("strict_load"),
        "GQAQKVColumnParallelLinear.kv_size_multiplier": to("kv_replication"),
    },
)


def migration_tables(cell: Callable[[str], str]) -> str:
    """One Markdown table for each trainer; keys of one meaning share a row. cell: makes text safe inside a cell."""
    tables = [*FORMATS.values(), FMS, NXD_CORE, huggingface.FORMAT]
    return "\n\n".join(["## Coming from other trainers", *(_table(table, cell) for table in tables)])


def _table(table: Format, cell: Callable[[str], str]) -> str:
    together: dict[tuple[str, str], list[str]] = {}
    for key, rule in table.mappings.items():
        together.setdefault((_fields(rule), cell(rule.description)), []).append(f"`{key}`")
    rows = [f"| {', '.join(keys)} | {here} | {how} |" for (here, how), keys in together.items()]
    return "\n".join([f"### From {table.title}", "", "| key there | here | how |", "|---|---|---|", *rows])


def _fields(rule: KeyMapping) -> str:
    """The fields a rule sets; those that this recipe has not got refuse all but its own way."""
    return ", ".join(f"`{name}`" + ("" if name in field_types() else " (not yet)") for name in rule.fields) or "-"
