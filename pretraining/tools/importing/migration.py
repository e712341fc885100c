"""Write the tables of docs/migrating.md: keys of other trainers -> our fields, from the tables of the importer.

fms-fsdp and NxD Core have no configuration files: their tables are for readers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pretraining.tools.importing.formats import FORMATS
from pretraining.tools.importing.mappings import KeyMapping, TrainerFormat, ignore, must_be_off, same_names, to

FMS = {
    **same_names(
        "model_variant ckpt_load_path ckpt_save_path use_dummy_dataset data_path datasets weights file_type col_name "
        "tokenizer_path seq_length vocab_size sep_token eos_token bos_token bol_token eol_token strip_tokens "
        "logical_shards num_workers sharding_strategy fsdp_activation_checkpointing mixed_precision low_cpu_fsdp "
        "batch_size num_steps training_stage learning_rate grad_clip_thresh seed use_profiler profiler_rank0_only "
        "report_interval checkpoint_interval tracker tracker_dir tracker_project_name tracker_run_id use_torch_compile "
        "sharding_group_size"
    ),
    "selective_checkpointing": to("selective_checkpointing", "1, 2, ...: every k-th; 1/3, 0.5: a share"),
    "resuming_dataset": ignore("the checkpoint holds the data's position"),
    "speculator fields": must_be_off("training of speculators"),
}
NXD_CORE = {
    **same_names("tensor_parallel_size pipeline_parallel_size sequence_parallel", "neuronx_distributed_config."),
    "pipeline_config.num_microbatches": to("gradient_accumulation_steps", "micro-batches of a step"),
    "pipeline_config.virtual_pipeline_size": to("virtual_pipeline_size"),
    "pipeline_config.pipeline_cuts": to("pipeline_cuts"),
    "optimizer_config.zero_one_enabled": to("sharding_strategy", "true: zero1, false: ddp"),
    "optimizer_config.grad_clipping": to("grad_clip_thresh", "false: 0"),
    "optimizer_config.max_grad_norm": to("grad_clip_thresh"),
    "activation_checkpoint_config": to("fsdp_activation_checkpointing", "full: true"),
    "pad_model": must_be_off("it adds heads of zeros; choose tensor_parallel_size among the divisors of the heads"),
    "model_init_config.meta_device_init": to("low_cpu_fsdp"),
    "model_init_config.sequential_move_factor": ignore("for the host memory of Neuron's workers"),
    **same_names("lora_rank lora_alpha lora_dropout lora_load_tag", "LoraConfig."),
    "LoraConfig.use_rslora": to("lora_use_rslora"),
    "LoraConfig.bias": to("lora_bias"),
    "LoraConfig.target_modules": to("lora_target_modules"),
    "LoraConfig.init_lora_weights": to("lora_init"),
    "LoraConfig.modules_to_save": to("lora_modules_to_save"),
    "LoraConfig.save_lora_config_adapter": ignore("PEFT's files hold it, unsharded"),
    "LoraConfig.enable_lora": to("lora_rank", "true: above 0"),
    "LoraConfig.load_lora_from_ckpt, lora_save_dir": to("lora_load_path", "the folder, where it is true"),
    "LoraConfig.save_lora_base, merge_lora": to(
        "lora_save_mode", "false, false: adapter; true, false: base_and_adapter; true, true: merged"
    ),
    "save_checkpoint.path": to("ckpt_save_path"),
    "save_checkpoint.num_workers": to("ckpt_io_workers"),
    "save_checkpoint.num_kept_ckpts": to("keep_last_n_checkpoints", "-1: 0, all"),
    "save_checkpoint.async_save": to("async_checkpointing"),
    "save_checkpoint.use_xser": ignore("checkpoints are always written shard by shard"),
    "load_checkpoint.path, tag": to("ckpt_load_path"),
    "load_checkpoint.strict": to("strict_load"),
    "GQAQKVColumnParallelLinear.kv_size_multiplier": to("kv_replication", "of the xla engine; the same function"),
}


def migration_tables(cell: Callable[[str], str], settings: Collection[str]) -> str:
    """Return one Markdown table for each trainer; keys of one meaning share a row. cell: escapes text for a
    cell. settings: names of the fields that this recipe has."""
    from pretraining.tools.importing import huggingface

    formats = [
        *FORMATS.values(),
        TrainerFormat("", "fms-fsdp", FMS),
        TrainerFormat("", "NxD Core", NXD_CORE),
        huggingface.FORMAT,
    ]
    return "\n\n".join([_table(format, cell, settings) for format in formats])


def _table(format: TrainerFormat, cell: Callable[[str], str], settings: Collection[str]) -> str:
    keys_of: dict[tuple[str, str], list[str]] = {}
    for key, mapping in format.mappings.items():
        keys_of.setdefault((_fields(mapping, settings), cell(mapping.description)), []).append(f"`{key}`")
    rows = [f"| {', '.join(keys)} | {fields} | {how} |" for (fields, how), keys in keys_of.items()]
    return "\n".join([f"## From {format.title}", "", "| key there | here | how |", "|---|---|---|", *rows])


def _fields(mapping: KeyMapping, settings: Collection[str]) -> str:
    """Return the fields that a key sets; of those that this recipe does not have, one value alone is accepted."""
    names = (f"`{name}`" + ("" if name in settings else " (not yet)") for name in mapping.fields)
    return ", ".join(names) or "-"
