"""The keys that NeMo and NxD Training share because both run on PyTorch Lightning: `trainer.*` and `exp_manager.*`.

Meanings: NeMo 1.14 `utils/exp_manager.py` and Lightning 1.9. Steps are optimizer updates: one batch of the data loader
is one global batch in both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretraining.config.errors import counted
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
    choice,
    differ,
    each,
    ignore,
    must_be_off,
    one_switch,
    only,
    to,
    to_one_of,
)
from pretraining.tools.importing.shared import has_share, names_parts, planned_devices

# ---- trainer


WORLD = ("source_world_size", "plan_devices")


def _devices(value: Any, source: ForeignConfig) -> Conversion:
    devices, nodes = source.integer("trainer.devices"), source.integer("trainer.num_nodes")
    if not is_integer(value) or value < 1:
        return unsupported_value("expected a whole number, at least 1")
    note = f"{counted(devices, 'device')} on each of {counted(nodes, 'node')}"
    planned = planned_devices(source, devices * nodes if source.get("trainer.devices") else None)
    return implied(note, source_world_size=devices * nodes, **planned)


def _max_steps(value: Any, source: ForeignConfig) -> Conversion:
    if value != -1:
        return mapped(num_steps=value)
    if source.has_flag("num_steps"):
        return implied("no limit in the file", num_steps=source.flags["num_steps"])
    if source.get("trainer.max_epochs", -1) == -1:
        return unsupported_value("no stopping criterion: max_epochs is -1 too; give --num_steps")
    if _has_open_schedule(source):
        return unsupported_value("max_epochs ends the run, and where its schedule ends is not known; give --num_steps")
    return implied("no limit in steps; max_epochs ends the run")


def _has_open_schedule(source: ForeignConfig) -> bool:
    """Return whether the learning rate falls until a step that only the data have. NxD Training builds no schedule."""
    name, last = (source.get(f"model.optim.sched.{key}") for key in ("name", "max_steps"))
    has_end = last not in (None, -1) and source.get("model_source") is None
    return not (has_end or str(name).lower() == "warmuppolicy" or source.has_flag("lr_decay_steps", "lr_schedule"))


def _max_epochs(value: Any, source: ForeignConfig) -> Conversion:
    return implied("-1: max_steps ends the run", num_epochs=None) if value == -1 else mapped(num_epochs=value)


def _has_data(part: int, source: ForeignConfig) -> bool:
    """Return whether the file names data to validate on (part 1) or to test on (part 2)."""
    name, folder = {1: ("validation", "data.val_dir"), 2: ("test", "data.test_dir")}[part]
    if any(source.get(key) for key in (folder, f"data.data_prefix.{name}", f"model.data.data_prefix.{name}")):
        return True
    if names_parts(source):
        return False
    return has_share(source.get("data.splits_string") or source.get("model.data.splits_string"), part)


def _val_interval(value: Any, source: ForeignConfig) -> Conversion:
    if not source.get("trainer.limit_val_batches", 1.0):
        return implied("limit_val_batches is 0: no validation", val_interval=0)
    if not source.has_flag("valid_data_path", "split", "use_dummy_dataset") and not _has_data(1, source):
        return implied("the file names no validation data: none", val_interval=0)
    if isinstance(value, float) and source.values.get("trainer.val_check_interval") is None:
        return differs("Lightning validates, and saves, at the end of each epoch; give --val_interval in steps")
    if isinstance(value, float):
        reason = "a share of an epoch, whose length only the data have; give --val_interval in steps"
        return unsupported_value(reason, val_interval=value)
    steps = source.steps("trainer.max_steps", -1)
    if is_integer(value) and value > steps > 0:
        return implied(f"never reached within max_steps={steps}: no validation", val_interval=0)
    return mapped(val_interval=value)


def _validates(source: ForeignConfig) -> bool:
    """Return whether --val_interval, or without it val_check_interval, leaves any validation."""
    if source.has_flag("val_interval"):
        return str(source.flags["val_interval"]) != "0"
    conversion = _val_interval(source.get("trainer.val_check_interval"), source)
    return conversion.status != "unsupported" and bool(conversion.values.get("val_interval"))


def _count_batches(value: Any) -> int | None:
    """Return Lightning's limit as a number of batches, -1 for all (1.0); None for a share of them, such as 0.5."""
    if is_integer(value):
        return value
    return {0.0: 0, 1.0: -1}.get(value) if isinstance(value, float) else None


def _batches(field: str) -> KeyMapping:
    """Batches of a validation or of the test."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        if (count := _count_batches(value)) is None:
            return unsupported_value("a share of the data; give a whole number, or 1.0 for all", **{field: value})
        if field == "test_steps" and count and not _has_data(2, source):
            return implied("the file names no test data: none", test_steps=0)
        return mapped(**{field: count})

    return KeyMapping(convert, (field,), "1 is one batch, 1.0 all of them (-1)")


def _sanity_steps(value: Any, source: ForeignConfig) -> Conversion:
    if value and not _validates(source):
        return implied("without validation there is nothing to check", val_sanity_steps=0)
    return mapped(val_sanity_steps=value)


def _each_epoch(value: Any, source: ForeignConfig) -> Conversion:
    if value == 1 and not _validates(source):
        return ignored("without validation")
    return unsupported_value("validation by epochs; make it null and give --val_interval in steps")


def clip(value: Any, _: ForeignConfig) -> Conversion:
    """The norm above which gradients are scaled down."""
    if isinstance(value, int | float) and value <= 0:
        return implied("0 or less: gradients are not clipped", grad_clip_thresh=0.0)
    return mapped(grad_clip_thresh=value)


def _max_time(value: Any, source: ForeignConfig) -> Conversion:
    """Lightning's timer counts the whole run, NeMo's (max_time_per_run, in its place) each start, as here."""
    value = source.get("exp_manager.max_time_per_run", value)
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", str(value).strip())
    if not match:
        return unsupported_value("expected DD:HH:MM:SS")
    days, hours, minutes, seconds = map(int, match.groups())
    return mapped(max_run_seconds=((days * 24 + hours) * 60 + minutes) * 60 + seconds)


_ENGINE = "part of Lightning's own engine"
TRAINER = {
    "trainer.devices": KeyMapping(_devices, WORLD, "per node; times num_nodes; also those of a plan"),
    "trainer.num_nodes": KeyMapping(_devices, WORLD, "times devices"),
    "trainer.max_epochs": KeyMapping(_max_epochs, ("num_epochs",), "-1: none"),
    "trainer.max_steps": KeyMapping(_max_steps, ("num_steps",), "optimizer steps; -1: max_epochs ends a constant rate"),
    "trainer.log_every_n_steps": to("report_interval"),
    "trainer.val_check_interval": KeyMapping(_val_interval, ("val_interval",), "steps; beyond max_steps: 0"),
    "trainer.check_val_every_n_epoch": KeyMapping(_each_epoch, (), "null alone"),
    "trainer.num_sanity_val_steps": KeyMapping(_sanity_steps, ("val_sanity_steps",), "-1: as many as val_steps"),
    "trainer.limit_val_batches": _batches("val_steps"),
    "trainer.limit_test_batches": _batches("test_steps"),
    "trainer.gradient_clip_val": KeyMapping(clip, ("grad_clip_thresh",), "null: 0, never"),
    "trainer.accumulate_grad_batches": only((1,), "accumulation follows from the batch sizes"),
    "trainer.gradient_clip_algorithm": only(("norm",), "gradients are clipped by their norm"),
    "trainer.overfit_batches": only((0.0, 0), "a debugging aid of Lightning's"),
    "trainer.fast_dev_run": must_be_off("a debugging aid of Lightning's"),
    "trainer.max_time": KeyMapping(_max_time, ("max_run_seconds",), "DD:HH:MM:SS of each start"),
    "trainer.profiler": only((), "use --use_profiler"),
    "trainer.limit_train_batches": only((1.0,), "give --max_samples, or fewer max_steps", "max_samples"),
    "trainer.reload_dataloaders_every_n_epochs": only((0,), "the data are opened once"),
    "trainer.detect_anomaly": must_be_off("a debugging aid of Lightning's"),
    **each("min_steps min_epochs", ignore("training does not stop early"), "trainer."),
    **each(
        "accelerator logger enable_checkpointing benchmark use_distributed_sampler replace_sampler_ddp deterministic "
        "enable_model_summary strategy enable_progress_bar plugins sync_batchnorm inference_mode limit_predict_batches",
        ignore(_ENGINE),
        "trainer.",
    ),
}

# ---- exp_manager

CALLBACK = "exp_manager.checkpoint_callback_params"


def _callback(value: Any, _: ForeignConfig) -> Conversion:
    return (
        implied("checkpoint_interval decides how often") if value else implied("no checkpoints", checkpoint_interval=0)
    )


def _save_interval(value: Any, source: ForeignConfig) -> Conversion:
    return mapped(checkpoint_interval=value) if _saves(source) else implied("no checkpoints", checkpoint_interval=0)


def _default_save_interval(source: ForeignConfig) -> Any:
    """Lightning saves after each validation where no interval is given."""
    interval = source.integer_flag("val_interval") or source.get("trainer.val_check_interval")
    return interval if is_integer(interval) else None


def _top_k(value: Any, source: ForeignConfig) -> Conversion:
    if value == 0:
        return implied("no checkpoints", checkpoint_interval=0)
    if _keeps_best(source):
        return implied("the best by val_loss, and the newest", keep_best=value, keep_last_n_checkpoints=1)
    return mapped(keep_last_n_checkpoints=0 if value == -1 else value)


_LOSSES = ("val_loss", "validation_loss")  # names of the same figure


def _saves(source: ForeignConfig) -> bool:
    """Return whether the run saves checkpoints."""
    is_off = not source.get("exp_manager.create_checkpoint_callback", True) or source.get(f"{CALLBACK}.save_top_k") == 0
    return not is_off and str(source.flags.get("checkpoint_interval")) != "0"


def _keeps_best(source: ForeignConfig) -> bool:
    """Return whether checkpoints are saved and validated, and some of them kept by val_loss."""
    count, keys = source.get(f"{CALLBACK}.save_top_k"), (f"{CALLBACK}.monitor", f"{CALLBACK}.mode")
    monitor, mode = (source.get(key, "min") for key in keys)
    is_asked = monitor in _LOSSES and mode == "min" and is_integer(count) and count > 0
    return is_asked and _saves(source) and "keep_best" in source.settings and _validates(source)


def _monitor(value: Any, source: ForeignConfig) -> Conversion:
    if not _saves(source):
        return ignored("no checkpoints")
    if value == "step" or source.get(f"{CALLBACK}.save_top_k") == -1:
        return implied("the newest checkpoints are kept, or all")
    if value not in _LOSSES:
        higher = (
            "a higher value of it is better, and checkpoints are compared by their loss; "
            if "acc" in str(value)
            else ""
        )
        known = f"known are {', '.join(_LOSSES)} and step, the newest; or keep all with save_top_k=-1"
        return unsupported_value(higher + known)
    if _keeps_best(source):
        return implied("the best save_top_k are kept, each by the validation after its own step, and the newest")
    is_worst = source.get(f"{CALLBACK}.mode") == "max"
    return differs(
        f"the newest are kept, because {'max keeps the worst' if is_worst else 'no checkpoint is validated'}"
    )


def _mode(value: Any, source: ForeignConfig) -> Conversion:
    if not _saves(source):
        return ignored("no checkpoints")
    if _keeps_best(source):
        return implied("a lower val_loss is better")
    monitor = source.get(f"{CALLBACK}.monitor")
    return ignored("the newest are kept") if (monitor, value) == ("step", "max") else differs("the newest are kept")


def run_name(value: Any, source: ForeignConfig) -> Conversion:
    """The name at the top, which that of exp_manager replaces."""
    inner = source.get("exp_manager.name")
    return mapped(run_name=value) if inner in (None, value) else implied(f"exp_manager.name={inner} counts")


def _load(value: Any, source: ForeignConfig) -> Conversion:
    """The checkpoint that a run continues from, which wins over those of the run in NeMo."""
    if source.get("model.weight_init_only"):
        return implied("its weights alone: starts at step 0", ckpt_load_path=value)
    note = "continues at its step, unless the run has a checkpoint of its own; a converted one, of step 0, starts there"
    return differs(note, ckpt_load_path=value, load_step=True)


LOAD = KeyMapping(_load, ("ckpt_load_path", "load_step"), "where the run has no checkpoint of its own yet")


def _resume(_: Any, source: ForeignConfig) -> Conversion:
    if any(source.get(key) for key in ("exp_manager.resume_from_checkpoint", "model.resume_from_checkpoint")):
        return differs("with resume_from_checkpoint: the run's own checkpoint, then that one", resume="auto")
    if not source.get("exp_manager.resume_if_exists", False):
        return implied("a checkpoint that is there already is an error", resume="never")
    alone = source.get("exp_manager.resume_ignore_no_checkpoint", False)
    return implied("resume_if_exists with resume_ignore_no_checkpoint", resume="auto" if alone else "must")


def _resume_alone(value: Any, source: ForeignConfig) -> Conversion:
    if not source.get("exp_manager.resume_if_exists", False):
        return ignored("without resume_if_exists")
    return _resume(value, source)


def _log_dir(_: Any, source: ForeignConfig) -> Conversion:
    explicit = source.get("exp_manager.explicit_log_dir") or source.get("exp_manager.exp_log_dir")
    if explicit:
        return mapped(log_dir=explicit)
    parts = [source.get("exp_manager.exp_dir"), source.get("exp_manager.name") or source.get("name") or "default"]
    return implied("exp_dir / name", log_dir=str(Path(*map(str, parts))))


def _load_xser(value: Any, source: ForeignConfig) -> Conversion:
    same = bool(value) == bool(source.get("exp_manager.save_xser", False))
    return implied("a checkpoint names its own format" + ("" if same else ", whatever save_xser is"))


def _tensorboard(value: Any, _: ForeignConfig) -> Conversion:
    return implied("events are written to <log_dir>/tensorboard" if value else "no events", tensorboard=bool(value))


def _ema(_: Any, source: ForeignConfig) -> Conversion:
    """NeMo 1.14 to 1.23, EMAParams: off unless enable, decay 0.999."""
    if not source.get("exp_manager.ema.enable", False):
        return unchanged("off")
    note = "validation runs on the weights themselves; generate and convert take --use_ema"
    return differs(note, ema_decay=source.get("exp_manager.ema.decay", 0.999))


def _ema_steps(value: Any, source: ForeignConfig) -> Conversion:
    if value == 1 or not source.get("exp_manager.ema.enable", False):
        return ignored("off, or as here")
    return unsupported_value("the moving average follows every update")


EXP_MANAGER = {
    "exp_manager.max_time_per_run": KeyMapping(_max_time, ("max_run_seconds",), "wins over trainer.max_time"),
    "exp_manager.explicit_log_dir": KeyMapping(_log_dir, ("log_dir",), "wins over exp_dir"),
    "exp_manager.exp_log_dir": KeyMapping(_log_dir, ("log_dir",), "another spelling of explicit_log_dir"),
    "exp_manager.exp_dir": KeyMapping(_log_dir, ("log_dir",), "exp_dir / name"),
    "exp_manager.name": to("run_name"),
    "exp_manager.create_tensorboard_logger": KeyMapping(_tensorboard, ("tensorboard",)),
    "exp_manager.resume_if_exists": KeyMapping(_resume, ("resume",), "auto or must; false: never"),
    "exp_manager.resume_ignore_no_checkpoint": KeyMapping(_resume_alone, ("resume",), "true: auto, false: must"),
    "exp_manager.create_checkpoint_callback": KeyMapping(_callback, ("checkpoint_interval",), "false: 0"),
    "exp_manager.log_parameter_norm": to("log_param_norm"),
    "exp_manager.log_gradient_norm": to("log_grad_norm"),
    "exp_manager.log_step_timing": one_switch("log_step_timing", "exp_manager.enable_recovery_time_instrumentation"),
    "exp_manager.create_straggler_detection_callback": to("log_stragglers"),
    "exp_manager.enable_recovery_time_instrumentation": choice(
        {True: implied("checkpoints are timed too", log_step_timing=True), False: unchanged("off")}
    ),
    "exp_manager.save_xser": ignore("checkpoints are always written shard by shard"),
    "exp_manager.load_xser": KeyMapping(_load_xser, (), "implied: a checkpoint names its own format"),
    "exp_manager.save_bf16": choice({True: mapped(checkpoint_dtype="bf16"), False: unchanged("as in memory")}),
    "exp_manager.async_checkpointing": to("async_checkpointing"),
    "exp_manager.resume_from_checkpoint": LOAD,
    "exp_manager.create_wandb_logger": to_one_of("tracker", {True: "wandb", False: ""}),
    "exp_manager.wandb_logger_kwargs.project": to("tracker_project_name"),
    "exp_manager.wandb_logger_kwargs.name": ignore("the run is named by run_name"),
    "exp_manager.create_early_stopping_callback": must_be_off("training does not stop early"),
    "exp_manager.ema": must_be_off("give its keys"),
    **each("ema.enable ema.decay", KeyMapping(_ema, ("ema_decay",), "a moving average of the weights"), "exp_manager."),
    "exp_manager.ema.every_n_steps": KeyMapping(_ema_steps, (), "1; not read where ema.enable is off"),
    **each("log_local_rank_0_only log_global_rank_0_only", ignore("the first process alone writes"), "exp_manager."),
    **each(
        "create_mlflow_logger create_dllogger_logger create_clearml_logger create_neptune_logger",
        must_be_off("trackers: wandb and aim"),
        "exp_manager.",
    ),
    **each("version use_datetime_version", differ("log_dir is exp_dir / name"), "exp_manager."),
    **each(
        "ckpt_ptl_version resume_past_end summary_writer_kwargs files_to_copy "
        "step_timing_kwargs step_timing_kwargs.* ema.* *_logger_kwargs *_logger_kwargs.* disable_validation_on_resume "
        "early_stopping_callback_params early_stopping_callback_params.* seconds_to_sleep log_tflops_per_sec_per_gpu "
        "log_delta_step_timing straggler_detection_params.* "
        "create_fault_tolerance_callback create_preemption_callback",
        ignore("of NeMo's own logs and processes"),
        "exp_manager.",
    ),
    f"{CALLBACK}.monitor": KeyMapping(_monitor, (), "val_loss: the best are kept; step, or no validation: the newest"),
    f"{CALLBACK}.save_top_k": KeyMapping(
        _top_k,
        ("keep_best", "keep_last_n_checkpoints", "checkpoint_interval"),
        "with val_loss the best, and the newest one; otherwise the newest; -1: all, 0: no saves",
    ),
    f"{CALLBACK}.mode": KeyMapping(_mode, (), "min for val_loss, max for step"),
    f"{CALLBACK}.save_last": ignore("the last step is always saved, and the newest checkpoint is kept"),
    f"{CALLBACK}.filename": ignore("the checkpoint records step, tokens and position itself"),
    f"{CALLBACK}.model_parallel_size": ignore("checkpoints belong to no mesh"),
    f"{CALLBACK}.every_n_train_steps": KeyMapping(
        _save_interval, ("checkpoint_interval",), "absent: val_check_interval"
    ),
    f"{CALLBACK}.use_master_weights_in_ckpt": choice(
        {True: mapped(checkpoint_dtype="fp32"), False: unchanged("as in memory")}
    ),
    f"{CALLBACK}.save_weights_only": to_one_of("save_optimizer", {True: False, False: True}),
    f"{CALLBACK}.dirpath": to("ckpt_save_path"),
    f"{CALLBACK}.async_save": to("async_checkpointing"),
    **each(
        "prefix postfix auto_insert_metric_name enable_version_counter",
        ignore("names of files are step_N"),
        f"{CALLBACK}.",
    ),
    f"{CALLBACK}.verbose": ignore("each checkpoint is printed"),
    f"{CALLBACK}.train_time_interval": must_be_off("give --checkpoint_seconds", "checkpoint_seconds"),
    **each("every_n_epochs save_on_train_epoch_end", must_be_off("checkpoints are saved by steps"), f"{CALLBACK}."),
    **each(
        "always_save_nemo save_nemo_on_train_end save_best_model",
        choice({True: differs("no .nemo archive: the checkpoints are kept as they are"), False: unchanged("off")}),
        f"{CALLBACK}.",
    ),
}


def _default_val_batches(source: ForeignConfig) -> Any:
    return None if source.values.get("trainer.val_check_interval") is None else 1.0


def _default_callback(value: Any) -> Callable[[ForeignConfig], Any]:
    """A default of the checkpoints of exp_manager, which a file without that section, or without checkpoints, lacks."""

    def default(source: ForeignConfig) -> Any:
        has_section = any(key.startswith("exp_manager.") for key in source.values)
        return value if has_section and source.get("exp_manager.create_checkpoint_callback", True) else None

    return default


DEFAULTS = {
    "trainer.max_steps": -1,
    "trainer.log_every_n_steps": 50,
    "trainer.num_sanity_val_steps": 2,
    "exp_manager.resume_if_exists": False,
    f"{CALLBACK}.save_top_k": _default_callback(3),
    f"{CALLBACK}.monitor": _default_callback("val_loss"),
    "trainer.gradient_clip_val": 0.0,
    "trainer.val_check_interval": 1.0,
    "trainer.limit_val_batches": _default_val_batches,
    f"{CALLBACK}.every_n_train_steps": _default_save_interval,
}
_TRAINER, _MANAGER = "Lightning's Trainer", "NeMo's nemo/utils/exp_manager.py"
SOURCES = {
    "trainer.log_every_n_steps": _TRAINER,
    "trainer.num_sanity_val_steps": _TRAINER,
    "exp_manager.resume_if_exists": f"ExpManagerConfig in {_MANAGER}",
    f"{CALLBACK}.save_top_k": f"CallbackParams in {_MANAGER}",
    f"{CALLBACK}.monitor": f"CallbackParams in {_MANAGER}",
}
