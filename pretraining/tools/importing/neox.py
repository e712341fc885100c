"""GPT-NeoX's YAML and JSON files. Meanings: its code of 2022 (8d53ee0f) and of today (ea7aefd).

Keys are read with underscores. Several files are one configuration.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.tools.importing.conversions import (
    Conversion,
    differs,
    ignored,
    implied,
    mapped,
    unchanged,
    unsupported_value,
)
from pretraining.tools.importing.foreign import ForeignConfig, is_integer
from pretraining.tools.importing.mappings import (
    KeyMapping,
    TrainerFormat,
    choice,
    each,
    ignore,
    must_be_off,
    only,
    read_with,
    to,
)
from pretraining.tools.importing.neox_model import ARCHITECTURE, GATED, ONE_BIT, OPTIM, PARAMS, optimizer_of
from pretraining.tools.importing.neox_run import RUN, WORLD, batch_agrees
from pretraining.tools.importing.shared import pipeline, tokenizer_kind

# GPT-NeoX has three eras: its learning rates changed in August 2023, its defaults on 2023-12-26. Keys that
# left before or came after: checkpoint_factor, of December 2022, is in all three.
# eval_batch_size is of Stability AI's fork, StableLM's: what is public of it has the defaults of 2022.
ONLY_2022 = ("save_interval", "gas", "zero_allow_untested_optimizer", "detect_nvlink_pairs", "eval_batch_size")
ONLY_HEAD = (
    "mlp_multiple_of",
    "expansion_factor",
    "rope_fusion",
    "layernorm_fusion",
    "rmsnorm_fusion",
    "use_qk_layernorm",
    "use_bias_in_mlp",
    "train_impl",
    "dataset_impl",
    "moe_num_experts",
    "sequence_parallel",
    "sliding_window_width",  # of January 2024, pull request 1131
    "te_*",  # Transformer Engine, of September 2024, pull request 1269
)
PYTHIA_STEPS = 143_000  # two of its files have no key that tells the era
UNKNOWN = "every key of the file is in all three eras"


def era_of(leaves: dict[str, Any], asked: str) -> tuple[str, str]:
    """Return the era, "2022", "2023" or "head", and the reason. asked: --neox_era, "auto" to decide by the keys."""
    if asked != "auto":
        return asked, "by --neox_era"
    for era, keys in (("2022", ONLY_2022), ("head", ONLY_HEAD)):
        if given := [key for pattern in keys for key in fnmatch.filter(leaves, pattern)]:
            return era, f"because of {given[0]}"
    if leaves.get("train_iters") == PYTHIA_STEPS:
        return "2022", f"because of train_iters={PYTHIA_STEPS}, Pythia's"
    if str(leaves.get("activation", "")).lower() in GATED and "intermediate_size" in leaves:
        return "head", "because of intermediate_size with a gated activation"
    return "head", UNKNOWN


def era_is_known(source: ForeignConfig) -> Iterator[Problem]:
    """Check that the era is known where it decides what is trained."""
    if source.era_reason != UNKNOWN:
        return
    style = str(source.get("lr_decay_style")).lower()
    outcomes = []
    is_read = optimizer_of(source) != ONE_BIT and not source.has_flag("lr_schedule")
    if style in ("linear", "cosine", "exponential") and is_read:
        outcomes.append(f"lr_schedule=neox2022_{style} before August 2023 (2022), neox_{style} since (2023, head)")
    for key, field, old, new in CHANGED_DEFAULTS:
        if FORMAT.mappings[key].convert(old, source).status == "ignored":
            continue
        if source.default(key) is not None and source.values.get(key) is None and not source.has_flag(field):
            outcomes.append(f"{field}={old} before 2023-12-26 (2022, 2023), {new} since (head)")
    if outcomes:
        yield Problem("--neox_era=auto", f"{UNKNOWN}; give --neox_era=2022, 2023 or head: {'; '.join(outcomes)}")


def spelling_is_one(source: ForeignConfig) -> Iterator[Problem]:
    """Check that no key has two values, of which NeoX takes the later one, because it is spelled in two ways."""
    for other, key in source.replaced.items():
        yield Problem(other, f"is not read: {key}={source.get(key)} in {source.files[key]}, another spelling, is later")


# Key, our field, default before 2023-12-26 and since (`megatron/neox_arguments/neox_args.py`, `deepspeed_args.py`).
CHANGED_DEFAULTS = (
    ("gradient_clipping", "grad_clip_thresh", 0.0, 1.0),
    ("weight_decay", "weight_decay", 0.01, 0.1),
    ("hidden_dropout", "hidden_dropout", 0.1, 0.0),
    ("attention_dropout", "attention_dropout", 0.1, 0.0),
)


def _by_era(old: float, new: float) -> Callable[[ForeignConfig], float]:
    return lambda source: new if source.era == "head" else old


_DEFAULTS_BY_ERA = {key: _by_era(old, new) for key, _, old, new in CHANGED_DEFAULTS}


# ---- parallelism


def _stages(value: Any, source: ForeignConfig) -> Conversion:
    if not is_integer(value) or value < 0:
        return unsupported_value("expected a whole number")
    return pipeline(value, source) if value else implied("0 is one stage", pipeline_parallel_size=1)


def _tensor(value: Any, _: ForeignConfig) -> Conversion:
    return mapped(tensor_parallel_size=value) if value else implied("0 is 1", tensor_parallel_size=1)


_OFFLOADED = "with parameters, gradients and optimizer state"


def _offload(value: Any, _: ForeignConfig) -> Conversion:
    """The device of one part of the state; here all of it is in host memory, or none."""
    if value == "none":
        return unchanged("on the devices")
    return unsupported_value(f"give --cpu_offload=True, {_OFFLOADED} in host memory", cpu_offload=True)


def _zero_stage(value: Any, source: ForeignConfig) -> Conversion:
    names = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
    if not is_integer(value) or value not in names:
        return unsupported_value("expected one stage: 0, 1, 2 or 3")
    stages = source.integer("pipe_parallel_size", 0)
    if value >= 2 and stages >= 2:
        return unsupported_value(f"stages 2 and 3 do not go with pipe_parallel_size={stages}")
    if value >= 2 and stages == 1:
        return implied(f"pipe_parallel_size=1 counts as 0 with stage {value}", sharding_strategy=names[value])
    return mapped(sharding_strategy=names[value])


def _partition(_: Any, source: ForeignConfig) -> Conversion:
    if source.integer("pipe_parallel_size") < 2:
        return ignored("without stages")
    return differs("stages are as equal as possible; --pipeline_cuts sets others")


# Reason -> keys that are ignored.
_IGNORED = {
    "how processes are launched": """launcher deepspeed_slurm deepspeed_mpi hostfile include exclude master_port
        master_addr no_ssh_check force_multi comment account distributed_backend detect_nvlink_pairs deepspeed deepscale
        deepscale_config use_shared_fs ssh_port deepspeed_extra_args.ssh_port""",
    "how DeepSpeed moves memory": """partition_activations synchronize_each_layer contiguous_checkpointing
        profile_backward deepspeed_activation_checkpointing zero_allow_untested_optimizer
        zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size zero_optimization.overlap_comm
        zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size zero_optimization.contiguous_gradients
        zero_optimization.load_from_fp32_weights zero_optimization.round_robin_gradients zero_reduce_scatter
        zero_optimization.stage3_* zero_optimization.sub_group_size zero_optimization.offload_*.pin_memory
        zero_optimization.offload_*.buffer_* zero_optimization.offload_*.max_in_cpu
        zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size activation_checkpointing.*
        prescale_gradients gradient_predivide_factor sparse_gradients""",
    "a kernel's choice": """scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion rope_fusion
        layernorm_fusion rmsnorm_fusion bias_dropout_fusion onnx_safe use_flashattn_swiglu output_layer_parallelism
        adlr_autoresume adlr_autoresume_interval lazy_mpu_init use_flash_cross_entropy rotary_save_freqs_buffer""",
    "tokens are prepared before": "vocab_file merge_file",
    "derived by NeoX itself": """zero_stage padded_vocab_size batch_size is_pipe_parallel world_size rank local_rank
        iteration do_train do_valid do_test config_files config_files.* git_hash user_script dynamic_loss_scale
        save_iters curriculum_seqlen optimizer_type lr no_checkpoint_arg_validation""",
    "the loss is in fp32": "full_precision_lm_cross_entropy",
    "of an option that is off or refused": """mup_* base_shapes_file scalenorm_epsilon rpe_num_buckets
        rpe_max_distance gmlp_attn_dim param_sharing_style weighted_sampler_alpha gradient_noise_scale_*""",
    "without meaning for this training": """steps_per_print checkpoint_validation_with_forward_pass mmap_warmup
        use_cpu_initialization short_seq_prob char_level_ppl temperature top_k top_p maximum_tokens prompt_end recompute
        num_samples sample_input_file sample_output_file text_gen_type eval_tasks eval_batch_size return_logits
        log_grad_pct_zeros wandb_name wandb_id wandb_resume s3_sync_interval checkpoint.* allow_chopped load_universal
        peak_theoretical_tflops eval_results_prefix dump_state no_load_rng no_save_rng wandb_group wandb_team wandb_host
        wandb_run_name wandb_init_all_ranks comet_workspace comet_project comet_experiment_name comet_tags comet_others
        wandb memory_profiling_path log_optimizer_states log_gradient_noise_scale flops_profiler.* comms_logger.*
        tensorboard.* csv_monitor.* deepspeed_extra_args.comms_logger.*""",
}

# Reason -> keys that are refused unless they are off.
_OFF = {
    "activations stay on the devices": "checkpoint_in_cpu",
    "muP by base shapes: use mup_base_width": "use_mup save_base_shapes load_base_shapes coord_check",
    "the loss is in fp32": "fp16_lm_cross_entropy",
    "positions count from 0": "opt_pos_emb_offset",
    "mixtures of corpora by their size": "weight_by_num_documents",
    "trackers: wandb and aim": "use_comet",
    "optimizers in 8 bits": "use_bnb_optimizer",
    "another kind of model": """soft_prompt_tuning soft_prompt_tuning.* num_unique_layers sparsity_config
        sparsity_config.* mamba_* rwkv_*""",
    "Transformer Engine": "te_*",
    "attention in fp8": "te_fp8_mha",
    "DeepSpeed's own schedule, which replaces lr_decay_style": "scheduler scheduler.*",
    "every layer attends to all before it": "sparse_attention sparse_attention.*",
    "DeepSpeed's own trials": """curriculum_learning autotuning elasticity compression_training data_efficiency amp
        autotuning_run autotuning.* curriculum_learning.* elasticity.* data_efficiency.* amp.*
        compression_training.*""",
    "alignment recipes": "dpo_* kto_* reinforce_* label_data_paths *_label_data_paths",
    "checkpoints are not copied: ckpt_save_path may be in object storage": "s3_path",
    "weights are not served while training": "serve_model_weights",
    "stopping before train_iters": "exit_interval",
    "another way to pack documents": "enforce_sample_length",
    "documents with their middle at the end": "fim_rate extra_sentinel_tokens",
}

FORMAT = TrainerFormat(
    "neox",
    "GPT-NeoX",
    {
        "pipe_parallel_size": KeyMapping(_stages, ("pipeline_parallel_size",), "0 is one stage"),
        "pipe_partition_method": KeyMapping(_partition, (), "different: stages are as equal as possible"),
        "model_parallel_size": KeyMapping(_tensor, ("tensor_parallel_size",), "0 is 1"),
        "sequence_parallel": to("sequence_parallel"),
        "zero_optimization.cpu_offload": choice(
            {True: mapped(cpu_offload=True), False: unchanged("on the devices unless the optimizer's type says CPU")}
        ),
        "zero_optimization.cpu_offload_params": choice(
            {True: implied(_OFFLOADED, cpu_offload=True), False: unchanged("on the devices")}
        ),
        **each(
            "offload_optimizer.device offload_param.device",
            KeyMapping(_offload, ("cpu_offload",), "none; otherwise give --cpu_offload=True"),
            "zero_optimization.",
        ),
        "zero_optimization.stage": KeyMapping(_zero_stage, ("sharding_strategy",), "ddp, zero1, zero2, fsdp"),
        **ARCHITECTURE,
        **OPTIM,
        **RUN,
        **each("num_nodes num_gpus global_num_gpus", WORLD),
        **{name: ignore(reason) for reason, names in _IGNORED.items() for name in names.split()},
        **{name: must_be_off(reason) for reason, names in _OFF.items() for name in names.split()},
        **each(
            "te_fp8_format te_fp8_wgrad te_fp8_amax_history_len te_fp8_amax_compute_algo te_fp8_margin",
            read_with("te_fp8_mha"),
        ),
        **each(
            "batch_scheduling batch_scheduling.*",
            must_be_off("another growth of the global batch: give --rampup_batch_size", "rampup_batch_size"),
        ),
        "tokenizer_type": tokenizer_kind("vocab_file"),
        "moe_num_experts": only((0, 1), "mixtures of experts"),
        "train_impl": only(("normal",), "alignment recipes"),
        "dataset_impl": only(("gpt2",), "another kind of data"),
        "pack_impl": only(("packed",), "another way to pack documents"),
    },
    {
        # The defaults that decide what is trained (`megatron/neox_arguments/neox_args.py`).
        **_DEFAULTS_BY_ERA,
        "gradient_clipping": lambda source: None if _clips(source) else _DEFAULTS_BY_ERA["gradient_clipping"](source),
        "weight_decay": lambda source: (
            None if source.get(f"{PARAMS}weight_decay") is not None else _DEFAULTS_BY_ERA["weight_decay"](source)
        ),
        "norm": "layernorm",
        "layernorm_epsilon": 1e-5,
        "rms_norm_epsilon": 1e-8,
        "pos_emb": "learned",
        "no_weight_tying": False,
        "activation": "gelu",
        "expansion_factor": lambda source: None if source.get("intermediate_size") else 4,
        "use_bias_in_norms": True,
        "use_bias_in_attn_linear": True,
        "use_bias_in_mlp": True,
        "gpt_j_residual": False,
        "init_method": "normal",
        "output_layer_init_method": "scaled_normal",
        "make_vocab_size_divisible_by": 128,
        "zero_optimization.stage": 0,
        "optimizer.type": "Adam",
        f"{PARAMS}lr": 0.001,
        f"{PARAMS}betas": lambda source: [0.9, 0.999] if optimizer_of(source) == "adamw" else None,
        f"{PARAMS}eps": lambda source: 1e-8 if optimizer_of(source) == "adamw" else None,
        "lr_decay_style": "linear",
        "warmup": 0.01,
        "min_lr": lambda source: 0.0 if source.values.get("decay_lr_to") is None else None,
        "seed": 1234,
        "tokenizer_type": "GPT2BPETokenizer",
        "split": lambda source: "969, 30, 1" if _one_corpus(source) else None,
        "eval_interval": 1000,
        "eval_iters": 100,
        "fp32_allreduce": lambda source: None if source.values.get("communication_data_type") else False,
        "fp16.enabled": lambda source: (
            None if any(source.values.get(key) for key in ("precision", "bf16.enabled")) else False
        ),
    },
    (batch_agrees, era_is_known),
    (spelling_is_one,),
    required={
        ("seq_length",): "seq_length",
        ("train_iters", "train_epochs"): "num_steps",
        ("train_micro_batch_size_per_gpu", "train_batch_size"): "batch_size",
    },
)


def _one_corpus(source: ForeignConfig) -> bool:
    """Return whether NeoX would divide one corpus by `split`, its own data_path or --data_path."""
    apart = source.values.get("valid_data_paths") or source.values.get("valid_data_path")
    return not apart and (source.values.get("data_path") is not None or source.has_flag("data_path"))


def _clips(source: ForeignConfig) -> bool:
    """Return whether another key than gradient_clipping gives the threshold."""
    return any(source.values.get(key) is not None for key in ("clip_grad", f"{PARAMS}max_grad_norm"))
