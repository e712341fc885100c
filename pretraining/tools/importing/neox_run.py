"""GPT-NeoX's keys of the batch, the data, precision, validation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.validate import multiples_around
from pretraining.tools.importing.conversions import (
    Conversion,
    differs,
    ignored,
    implied,
    mapped,
    precision,
    unchanged,
    unsupported_value,
)
from pretraining.tools.importing.foreign import ForeignConfig, is_integer
from pretraining.tools.importing.mappings import (
    KeyMapping,
    choice,
    each,
    ignore,
    must_be_off,
    one_switch,
    read_with,
    same_names,
    to,
    to_one_of,
)
from pretraining.tools.importing.shared import (
    SPLIT,
    WORKERS,
    corpora,
    half,
    has_share,
    is_replaced,
    micro_batch_sizes,
    names_parts,
    planned_devices,
    profiled_steps,
)

KINDS = ("train", "valid", "test")

# ---- batch


def _batch(source: ForeignConfig) -> tuple[int | None, int | None, int | None]:
    """Return global batch, micro-batch and accumulation steps by NeoX's rule; None where only the devices would decide.

    NeoX takes 1 for absent accumulation even where the other two are given, and then fails; here it is derived.
    """
    total, micro = _size("train_batch_size", source), _size("train_micro_batch_size_per_gpu", source)
    steps = _size("gradient_accumulation_steps", source) or _size("gas", source)
    ranks = _data_ranks(source)
    if ranks is None:
        return total, micro, steps if total is None else None
    if total is None and micro is not None:
        return micro * (steps or 1) * ranks, micro, steps or 1
    if total is not None and micro is None:
        micro = total // ranks // (steps or 1)
    if total is not None and steps is None and micro:
        steps = total // micro // ranks
    return total, micro, steps


def _data_ranks(source: ForeignConfig) -> int | None:
    """Return the data-parallel ranks of the source: its devices by the model's ranks."""
    devices = _devices(source)
    return None if devices is None else max(devices // _model_ranks(source), 1)


def _devices(source: ForeignConfig) -> int | None:
    """Return the devices of the source: --source_world_size, or those of the file."""
    return source.integer_flag("source_world_size") or _devices_of_file(source)


def _devices_of_file(source: ForeignConfig) -> int | None:
    nodes, gpus = _size("num_nodes", source), _size("num_gpus", source)
    return _size("global_num_gpus", source) or (nodes * gpus if nodes and gpus else None)


def _world(_: Any, source: ForeignConfig) -> Conversion:
    return implied("read with train_batch_size", **planned_devices(source, _devices_of_file(source)))


WORLD = KeyMapping(_world, ("plan_devices",), "read with train_batch_size; also the devices of a plan")


def _model_ranks(source: ForeignConfig) -> int:
    return max(source.integer("pipe_parallel_size"), 1) * max(source.integer("model_parallel_size"), 1)


def _size(key: str, source: ForeignConfig) -> int | None:
    """Return a whole number from 1; None where the key is absent or holds none, which is an error of that key."""
    value = source.integer(key, 0)
    return value if value >= 1 else None


def _batch_key(value: Any, source: ForeignConfig) -> Conversion:
    if not is_integer(value) or value < 1:
        return unsupported_value("expected a whole number, at least 1")
    total, micro, steps = _batch(source)
    known = {"global_batch_size": total, "batch_size": micro}
    values = {name: size for name, size in known.items() if size is not None}
    if total is None:
        if steps is not None:
            values["gradient_accumulation_steps"] = steps
        return implied("times the devices of the run: give --source_world_size to keep the global batch", **values)
    return implied("train_batch_size = micro batch x accumulation x data-parallel ranks", **values)


def _gas(value: Any, source: ForeignConfig) -> Conversion:
    """A copy of gradient_accumulation_steps, which NeoX writes over (`calculate_derived` of `arguments.py`)."""
    conversion = _batch_key(value, source)
    if value == 1 or conversion.status == "unsupported" or source.get("gradient_accumulation_steps") is not None:
        return conversion
    return differs("as written; GPT-NeoX replaces it by gradient_accumulation_steps, 1 by default", **conversion.values)


def batch_agrees(source: ForeignConfig) -> Iterator[Problem]:
    """Check that the devices hold whole models, and that the three sizes of a batch are one arithmetic."""
    if source.has_flag("global_batch_size", "batch_size"):
        return
    devices, model = _devices(source), _model_ranks(source)
    if devices and devices % model:
        remedy = f"is no multiple of pipe_parallel_size x model_parallel_size = {model}; give --source_world_size"
        yield Problem(f"devices of the source = {devices}", f"{remedy}, the devices that it ran on")
        return
    total, micro, steps = _batch(source)
    ranks = _data_ranks(source)
    if total is None or micro is None or steps is None or ranks is None or total == micro * steps * ranks:
        return
    step = max(micro, 1) * max(steps, 1) * ranks
    sizes = micro_batch_sizes(total, ranks)
    remedy = f"micro batches that divide: {sizes}" if sizes else f"use {multiples_around(total, step)}"
    yield Problem(
        f"train_batch_size={total}",
        f"is not micro batch {micro} x accumulation {steps} x {ranks} data-parallel ranks; {remedy}",
    )


BATCH = KeyMapping(
    _batch_key,
    ("global_batch_size", "batch_size", "gradient_accumulation_steps"),
    "batch = micro batch x accumulation x ranks",
)

# ---- data, precision, checkpoints


def _corpus(value: Any, source: ForeignConfig) -> Conversion:
    if any(f"{kind}_data_path{ending}" in source.values for kind in KINDS for ending in ("", "s")):
        return unsupported_value("excludes train, valid and test paths; leave one out")
    return corpora([str(value)], [])


def _named(paths: Any) -> list[str]:
    """Return the paths of a list, or of one path, that are not empty."""
    return [str(path) for path in (paths if isinstance(paths, list) else [paths]) if path]


def _paths(kind: str) -> KeyMapping:
    """A corpus or a list of them; those for training, validation and test are given together, or none."""
    part = "" if kind == "train" else f"{kind}_"

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        kinds = [k for k in KINDS if {f"{k}_data_paths", f"{k}_data_path"} & source.values.keys()]
        if len(kinds) != len(KINDS):
            return unsupported_value("train, valid and test paths are given together, or data_path alone")
        paths = _named(value)
        if not paths:
            return ignored(f"no path: give --{part}data_path")
        weights = source.get(f"{kind}_data_weights") or ["1.0"] * len(paths)
        return corpora(paths, [str(weight) for weight in weights], part)

    names = ("data_path",) if kind == "test" else ("data_path", "datasets", "weights")
    return KeyMapping(convert, tuple(part + name for name in names), "all three or none")


def _precision_of(value: Any, source: ForeignConfig) -> Conversion:
    return half(source) if str(value).lower() == "fp16" else _PRECISIONS.convert(value, source)


def _decided(source: ForeignConfig) -> set[str]:
    """Return the precisions that the keys of the file ask for."""
    decided = [_half(source.get("fp16.enabled"), source), _precision_of(source.get("precision"), source)]
    found = {str(each.values["precision"]) for each in decided if "precision" in each.values}
    return found | ({"mixed_bf16"} if source.get("bf16.enabled") else set())


def _sums(value: Any, source: ForeignConfig) -> Conversion:
    """The dtype in which DeepSpeed sums gradients: `communication_data_type` of its `runtime/engine.py`."""
    if str(value).lower() in ("true", "fp32"):
        return mapped(reduce_dtype="fp32")
    if not {"fp16", "mixed_bf16"} & _decided(source):
        return unchanged("gradients are reduced in fp32")
    return differs("gradients are summed in fp32, which DeepSpeed may sum in the dtype of its parameters")


def _scale(name: str) -> KeyMapping:
    """A setting of the loss scale."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        if "fp16" not in _decided(source) or is_replaced(source):
            return ignored("fp16 is off, or another precision is meant")
        return mapped(**{name: value})

    return KeyMapping(convert, (name,), "with fp16")


def _half(value: Any, source: ForeignConfig) -> Conversion:
    named = str(source.get("precision", "")).lower()
    kind = str(source.get("fp16.type", "")).lower()
    if value and named == "fp32":
        return unsupported_value("contradicts precision=fp32")
    if value and (kind == "bfloat16" or named == "bfloat16"):
        return precision("mixed_bf16")
    if value:
        return half(source)
    if named in ("fp16", "bfloat16") or source.get("bf16.enabled"):
        return implied("another key decides the precision")
    return precision("fp32")


def _epochs(value: Any, source: ForeignConfig) -> Conversion:
    """NeoX counts the steps of the epochs when it has the data, and refuses both (`megatron/data/data_utils.py`)."""
    if value and source.values.get("train_iters") and not source.has_flag("num_steps", "num_epochs"):
        return unsupported_value("with train_iters, which NeoX refuses too: remove one of the two")
    known = source.values.get("train_iters") or source.values.get("lr_decay_iters")
    is_constant = str(source.get("lr_decay_style")).lower() == "constant" and not source.get("warmup")
    if not (known or is_constant or source.has_flag("num_steps", "lr_decay_steps", "lr_schedule")):
        return unsupported_value("where its schedule ends is not known; give --num_steps")
    return mapped(num_epochs=value)


def _save(value: Any, source: ForeignConfig) -> Conversion:
    if not source.get("save_interval") and not source.get("checkpoint_factor"):
        return unsupported_value("save without save_interval or checkpoint_factor, which NeoX refuses too")
    return mapped(ckpt_save_path=value)


def _load(value: Any, source: ForeignConfig) -> Conversion:
    for key in ("finetune", "no_load_optim"):
        if source.get(key):
            as_there = implied if key == "finetune" else differs
            return as_there(f"with {key}, weights alone: starts at step 0", ckpt_load_path=value)
    note = "continues at its step; a converted checkpoint, whose step is 0, starts there"
    return implied(note, ckpt_load_path=value, load_step=True)


def _chunks(value: Any, source: ForeignConfig) -> Conversion:
    recomputes = source.get("checkpoint_activations")
    return mapped(checkpoint_num_layers=value) if recomputes else ignored("nothing is recomputed")


def _validation(field: str) -> KeyMapping:
    """NeoX validates where the file has data for it; eval_interval beyond the last step is none."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        has_data = has_share(source.get("split"), 1) or _named(
            source.get("valid_data_path") or source.get("valid_data_paths")
        )
        if not has_data and not source.has_flag("split", "valid_data_path", "use_dummy_dataset"):
            return implied("the file names no data to validate on: none", **{field: 0})
        if field == "val_interval" and 0 < source.steps("train_iters") < source.integer("eval_interval", 0):
            return implied("never reached within train_iters: none", val_interval=0)
        return mapped(**{field: value})

    return KeyMapping(convert, (field,), "where the file names validation data")


def _eval_iters(value: Any, source: ForeignConfig) -> Conversion:
    values = _validation("val_steps").convert(value, source).values
    is_shared = has_share(source.get("split"), 2) and not names_parts(source)
    tested = is_shared or _named(source.get("test_data_path") or source.get("test_data_paths"))
    note = "batches of a validation, and of the test at the end" + _budget(value, source)
    return implied(note, **values, test_steps=value if tested else 0)


def _budget(batches: Any, source: ForeignConfig) -> str:
    """Sequences that NeoX sets aside: (train_iters // eval_interval + 1) x eval_iters x batch, and for the test."""
    total, every, steps = _batch(source)[0], source.integer("eval_interval", 0), source.steps("train_iters")
    if total is None or every < 1 or not is_integer(batches):
        return ""
    return f": {(steps // every + 1) * batches * total} and {batches * total} sequences in NeoX"


_PRECISIONS = choice({"bfloat16": precision("mixed_bf16"), "fp16": precision("fp16"), "fp32": precision("fp32")})
RUN = {
    "train_iters": to("num_steps"),
    "train_epochs": KeyMapping(_epochs, ("num_epochs",), "with lr_decay_iters, or --num_steps"),
    **each("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps", BATCH),
    "gas": BATCH._replace(convert=_gas),
    **same_names(
        "checkpoint_scale keep_last_n_checkpoints tensorboard_dir log_dir log_param_norm log_grad_norm memory_profiling"
    ),
    "split": SPLIT,
    "data_path": KeyMapping(_corpus, ("data_path",), "and .idx"),
    **{f"{kind}_data_path{ending}": _paths(kind) for kind in KINDS for ending in ("", "s")},
    **{f"{kind}_data_weights": read_with(f"{kind}_data_paths") for kind in KINDS},
    "data_impl": choice(
        {
            "mmap": implied(".idx and .bin", file_type="megatron"),
            "infer": implied("recognised by the files", file_type="auto"),
            "cached": unsupported_value("an index that is no longer written"),
        }
    ),
    "num_workers": WORKERS,
    "fp16.enabled": KeyMapping(_half, ("precision", "mixed_precision"), "true: as type says; false: fp32"),
    "fp16.type": choice({"bfloat16": implied("with enabled"), "fp16": implied("with enabled")}),
    "precision": _PRECISIONS._replace(convert=_precision_of),
    "bf16.enabled": choice({True: precision("mixed_bf16"), False: unchanged("another key decides the precision")}),
    **each(
        "bf16 loss_scale loss_scale_window initial_scale_power hysteresis min_loss_scale",
        ignore("DeepSpeed reads enabled alone: bf16 needs no loss scale"),
        "bf16.",
    ),
    **{f"fp16.{name}": _scale(name) for name in ("loss_scale", "loss_scale_window", "initial_scale_power")},
    "fp16.hysteresis": _scale("loss_scale_hysteresis"),
    "fp16.min_loss_scale": _scale("min_loss_scale"),
    **each("fp16 auto_cast", ignore("enabled alone switches fp16 on"), "fp16."),
    "fp16.consecutive_hysteresis": must_be_off("overflows count until the scale grows, not until the next clean step"),
    **each("loss_scale loss_scale_window hysteresis min_scale", ignore("DeepSpeed reads those of fp16")),
    **each("fp32_allreduce communication_data_type", KeyMapping(_sums, ("reduce_dtype",), "fp32 in any case")),
    "data_types.grad_accum_dtype": choice(
        {
            "fp32": unchanged("as here"),
            **dict.fromkeys(("bf16", "fp16"), differs("gradients are accumulated in fp32")),
        }
    ),
    "save": KeyMapping(_save, ("ckpt_save_path",), "with a period"),
    "load": KeyMapping(_load, ("ckpt_load_path", "load_step"), "with finetune or no_load_optim from step 0"),
    **each("save_interval checkpoint_factor", to("checkpoint_interval")),
    "extra_save_iters": to("extra_checkpoint_steps"),
    **each("finetune no_load_optim", one_switch("load_weights_only", "finetune", "no_load_optim")),
    "no_save_optim": to_one_of("save_optimizer", {True: False, False: True}, "not"),
    "log_interval": to("report_interval"),
    "eval_interval": _validation("val_interval"),
    "eval_iters": KeyMapping(_eval_iters, ("val_steps", "test_steps"), "of a validation, and of the test"),
    "checkpoint_activations": to("fsdp_activation_checkpointing"),
    "checkpoint_num_layers": KeyMapping(_chunks, ("checkpoint_num_layers",)),
    "wall_clock_breakdown": to("log_step_timing"),
    "profile": to("use_profiler"),
    **profiled_steps("profile", "profile_step_start", "profile_step_stop", offset=0),
    "use_wandb": to_one_of("tracker", {True: "wandb", False: ""}),
    "wandb_project": to("tracker_project_name"),
}
