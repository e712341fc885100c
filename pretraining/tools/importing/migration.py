"""Write the tables of docs/migrating.md: keys of other trainers -> our fields, from the tables of the importer.

fms-fsdp and NxD Core have no configuration files: their tables are for readers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pretraining.tools.importing.formats import FORMATS
from pretraining.tools.importing.mappings import KeyMapping, TrainerFormat, each, ignore, must_be_off, same_names, to


def _call(what: str) -> KeyMapping:
    """A function of theirs, which is no setting here."""
    return ignore("")._replace(description=what)


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
    **each(
        "input_size output_sizes bias gather_output sequence_parallel_enabled init_method dtype device fuse_qkv",
        ignore("layers are plain PyTorch; the sharding table places their parameters"),
        "GQAQKVColumnParallelLinear.",
    ),
    "mixed_precision_config.use_master_weights": to("master_weights", "with precision=manual"),
    "mixed_precision_config.use_fp32_grad_acc": to("fp32_grad_acc", "with precision=manual"),
    "mixed_precision_config.use_master_weights_in_ckpt": to("checkpoint_dtype", "true: fp32"),
    **each(
        "initialize_parallel_model initialize_parallel_optimizer",
        _call("`Training(settings)` builds and places both"),
    ),
    "model_fn, model_args, model_kwargs, include_buffers": _call("`Training(settings, build=...)`: returns the model"),
    "opt_cls, optimizer_class, opt_kwargs": to("optimizer", "and its settings; other classes are refused"),
    "scheduler_cls, scheduler_args, scheduler_kwargs": to("lr_schedule", "and the lr_ settings"),
    "NxDModel.run_train, NxDPPModel.run_train": _call("`training.train_step(step)`: forward, backward and update"),
    "NxDPPModel.run_eval": _call("`training.evaluate(batch)`"),
    "NxDOptimizer.step, zero_grad, scheduler.step": _call("part of `training.train_step(step)`"),
    "param_init_fn": _call("`Training(settings, build=...)`: returns the model with its initial weights"),
    "save_checkpoint.model, optimizer, scheduler": _call(
        "`training.save(folder, step)`; save_optimizer=False leaves it out"
    ),
    "save_checkpoint.user_content": _call("`training.save(..., user_content=...)`: a JSON value"),
    "load_checkpoint.model, optimizer, scheduler": _call("`training.load(folder, step)`, of any mesh"),
    "save_checkpoint.tag": _call("the step: step_N"),
    "save_checkpoint.zero1_optimizer": ignore("every optimizer's state is sharded alike"),
    **each(
        "save load",
        _call("`training.save` and `training.load`: a checkpoint does not depend on the mesh"),
        "parallel_layers.",
    ),
    "parallel_layers.save.down_cast_bf16": to("checkpoint_dtype", "true: bf16"),
    "parallel_layers.load.sharded": ignore("a checkpoint is of whole tensors for every reader"),
    "clip_grad_norm.max_norm": to("grad_clip_thresh", "`training.train_step` returns grad_norm"),
    "clip_grad_norm.norm_type": to("grad_clip_norm_type", "inf: 0"),
    **each(
        "save_serially save_xser load_xser", ignore("every process writes and reads its own shards"), "parallel_layers."
    ),
    **each(
        "pin_layout sharding_groups grad_norm_groups save_sharded_state_dict load_sharded_state_dict",
        ignore("the engine shards the optimizer's state"),
        "NeuronZero1Optimizer.",
    ),
    "NxDPPModel.num_microbatches": to("gradient_accumulation_steps"),
    "NxDPPModel.virtual_pipeline_size": to("virtual_pipeline_size"),
    "NxDPPModel.pipeline_cuts": to("pipeline_cuts"),
    "NxDPPModel.use_zero1_optimizer": to("sharding_strategy", "true: zero1"),
    **each(
        "transformer_layer_cls auto_partition input_names leaf_module_cls autowrap_functions autowrap_modules "
        "tracer_cls output_loss_value_spec",
        ignore("stages are made from the model's list of blocks: nothing is traced"),
        "NxDPPModel.",
    ),
    **each(
        "return_mb_loss broadcast_and_average_loss return_loss_on_cpu",
        ignore("every process gets the mean loss of the global batch"),
        "NxDPPModel.",
    ),
    **each(
        "deallocate_pipeline_outputs fuse_microbatches",
        ignore("how a step of stages is computed: --pipeline_schedule"),
        "NxDPPModel.",
    ),
    "NeuronLTModule, NeuronXLAStrategy, NeuronXLAPrecisionPlugin": _call(
        "`pretraining.train(settings)`: loop and reports"
    ),
    "NeuronLTModule.grad_accum_steps": to("gradient_accumulation_steps"),
    "NeuronLTModule.log_rank0, manual_opt": ignore("the first process alone writes; the loop updates"),
    "NeuronTensorBoardLogger.save_dir": to("tensorboard_dir"),
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
