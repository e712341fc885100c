"""What may change between a checkpoint and the run that continues it: refused, noted or free, field by field.

A field in none of the tables is noted: the change is made and said. Needs no tensors, so a mistake is reported before
one is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from pretraining.config.errors import ConfigError, Problem
from pretraining.config.optimizers import FLAGS, hyperparameters
from pretraining.config.training import TrainConfig
from pretraining.config.validate import CURVE
from pretraining.config.variants import model_shape

# Another value makes tensors of another shape.
DIMENSIONS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_kv_heads",
    "intermediate_size",
    "head_dim",
)
# Another value makes another function of the same weights.
FUNCTION = (
    "norm_type",
    "norm_eps",
    "norm_bias",
    "qk_norm",
    "activation",
    "attn_bias",
    "mlp_bias",
    "parallel_residual",
    "position_embedding_type",
    "rotary_percentage",
    "rope_theta",
    "rope_scaling_type",
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position",
    "sliding_window",
)
# Another value has other tensors; a new run may tie or untie the head of the weights it starts from, and take another
# optimizer to them.
TENSORS = (
    *("tie_word_embeddings", "optimizer", "optimizer_args"),
    *("lora_rank", "lora_target_modules", "lora_bias", "lora_modules_to_save", "lora_save_mode"),
)
# Another value is refused unless override_lr_on_resume says that it is meant.
RATE = ("learning_rate", "training_stage", "lr_schedule", *CURVE)
# Where things are, what is reported, what is saved and how: nothing of the training itself.
FREE = (
    "model_variant",  # its dimensions are compared instead
    "max_position_embeddings",
    "data_path",  # the data's own fingerprint is compared when its state is restored
    *("plan", "plan_devices", "plan_device_kind", "plan_search", "plan_compile", "plan_topology", "plan_json"),
    "run_name",
    "log_dir",
    "report_interval",
    "tensorboard_dir",
    "tracker",
    "tracker_dir",
    "tracker_project_name",
    "tracker_run_id",
    "use_profiler",
    "profiler_rank0_only",
    "profile_start_step",
    "profile_num_steps",
    *("memory_profiling", "log_grad_norm", "log_param_norm"),
    "compile_cache_dir",
    "low_cpu_fsdp",
    "num_workers",
    "collective_timeout",
    "ckpt_load_path",
    "ckpt_save_path",
    "checkpoint_interval",
    "checkpoint_scale",
    "extra_checkpoint_steps",
    "keep_last_n_checkpoints",
    "resume",
    "load_weights_only",
    "strict_load",
    "override_lr_on_resume",
    "save_optimizer",
    "checkpoint_dtype",
    "async_checkpointing",
    "ckpt_io_workers",
    "ckpt_max_failures",
)


class Change(NamedTuple):
    """A field whose value in the checkpoint is not this run's."""

    field: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.field} {self.saved} -> {self.here}"


def changes(saved: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """Every field that differs, the model's dimensions as its variant resolves them, FREE ones left out.

    Fields that only one of the two knows are left out: they are another version's.
    """
    old, new = _resolved(saved_config(saved)), _resolved(config)
    known = [name for name in new if name not in FREE and (name in saved or name in DIMENSIONS or name in FUNCTION)]
    return [Change(name, old[name], new[name]) for name in known if old[name] != new[name]]


def saved_config(saved: Mapping[str, Any]) -> TrainConfig:
    """The configuration in a checkpoint's facts; fields of another version that this one does not know are dropped."""
    names = {field.name for field in fields(TrainConfig)}
    return TrainConfig(**{name: value for name, value in saved.items() if name in names})


def _resolved(config: TrainConfig) -> dict[str, Any]:
    rate, decay, arguments = hyperparameters(config)
    optimizer = {"learning_rate": rate, "weight_decay": decay}
    optimizer |= {field: arguments[name] for name, field in FLAGS.items() if name in arguments}
    return {**asdict(config), **asdict(model_shape(config)), **optimizer}


def check_resume(saved: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """The changes to note when a run continues; ConfigError that lists those which are refused."""
    found = changes(saved, config)
    bound = {*DIMENSIONS, *FUNCTION, *TENSORS}
    problems = [
        Problem(f"--{name}={new}", f"the checkpoint was trained with {old}; give that, or another --ckpt_save_path")
        for name, old, new in found
        if name in bound
    ]
    if not config.override_lr_on_resume:
        problems += [
            Problem(f"--{name}={new}", f"the checkpoint was trained with {old}; --override_lr_on_resume accepts it")
            for name, old, new in found
            if name in RATE
        ]
    if problems:
        raise ConfigError(problems)
    return [change for change in found if change.field not in bound]


def check_start(saved: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """The changes to note when a new run takes a checkpoint's weights; ConfigError where they cannot fit.

    The dimensions must be the same, and with strict_load the function of the weights; a new run may lay out another
    schedule as it likes.
    """
    found = changes(saved, config)
    problems = [
        Problem(f"--{name}={new}", f"the checkpoint at ckpt_load_path has {old}; give that{remedy}")
        for names, remedy in ((DIMENSIONS, ""), (FUNCTION, ", or --strict_load=False to change it"))
        for name, old, new in found
        if name in names and (names is DIMENSIONS or config.strict_load)
    ]
    if problems:
        raise ConfigError(problems)
    return [change for change in found if change.field in FUNCTION]


def check_moments(saved: Mapping[str, Any], config: TrainConfig) -> None:
    """ConfigError where a new run would take up the state of another optimizer."""
    before = saved_config(saved).optimizer
    if before != config.optimizer and not config.load_weights_only:
        remedy = f"the checkpoint at ckpt_load_path has {before}'s state; --load_weights_only=True leaves it there"
        raise ConfigError([Problem(f"--optimizer={config.optimizer}", remedy)])
