"""GPT-NeoX's keys of the batch, the data, precision, validation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.importing.conversions import Conversion, ignored, implied, mapped, unchanged, unsupported
from pretraining.importing.foreign import ForeignConfig, is_integer
from pretraining.importing.mappings import KeyMapping, choice, ignore, read_with, to
from pretraining.importing.megatron import mixture

# ---- batch


def _batch(source: ForeignConfig) -> tuple[int | None, int | None, int | None]:
    """(global batch, micro-batch, passes) by NeoX's rule; None where only the number of devices would tell.

    NeoX takes 1 for absent passes even where total and micro-batch are given and then fails; here they follow.
    """
    total, micro = _size("train_batch_size", source), _size("train_micro_batch_size_per_gpu", source)
    passes = _size("gradient_accumulation_steps", source) or _size("gas", source)
    ranks = data_ranks(source)
    if ranks is None:
        return total, micro, passes if total is None else None
    if total is None and micro is not None:
        return micro * (passes or 1) * ranks, micro, passes or 1
    if total is not None and micro is None:
        micro = total // ranks // (passes or 1)
    if total is not None and passes is None and micro:
        passes = total // micro // ranks
    return total, micro, passes


def data_ranks(source: ForeignConfig) -> int | None:
    """Data-parallel ranks of the source: --source_world_size, or what the file says, by the model's ranks."""
    given = source.flags.get("source_world_size")
    devices = int(str(given)) if given else _size("global_num_gpus", source)
    nodes, each = _size("num_nodes", source), _size("num_gpus", source)
    if devices is None and nodes and each:
        devices = nodes * each
    if devices is None:
        return None
    model = max(source.integer("pipe_parallel_size"), 1) * max(source.integer("model_parallel_size"), 1)
    return max(devices // model, 1)


def _size(key: str, source: ForeignConfig) -> int | None:
    """A whole number from 1; None where the key is absent or holds none, which its own record says."""
    value = source.integer(key, 0)
    return value if value >= 1 else None


def _batch_key(value: Any, source: ForeignConfig) -> Conversion:
    if not is_integer(value) or value < 1:
        return unsupported("expected a whole number, at least 1")
    total, micro, passes = _batch(source)
    known = {"global_batch_size": total, "batch_size": micro}
    values = {name: size for name, size in known.items() if size is not None}
    if total is None:
        if passes is not None:
            values["gradient_accumulation_steps"] = passes
        return implied("times the devices of the run: give --source_world_size to keep the global batch", **values)
    return implied("train_batch_size = micro batch x accumulation x data-parallel ranks", **values)


def batch_agrees(source: ForeignConfig) -> Iterator[Problem]:
    """The three sizes of a batch are one arithmetic; refused with the micro-batches that divide."""
    total, micro, passes = _batch(source)
    ranks = data_ranks(source)
    if total is None or micro is None or passes is None or ranks is None:
        return
    if total != micro * passes * ranks:
        words = f"is not micro batch {micro} x accumulation {passes} x {ranks} data-parallel ranks"
        down, up = total // ranks * ranks, (total // ranks + 1) * ranks
        works = [size for size in range(1, total // ranks + 1) if total % (size * ranks) == 0]
        words += (
            f"; micro batches that divide: {', '.join(map(str, works))}" if works else f"; use {down or up} or {up}"
        )
        yield Problem(f"train_batch_size={total}", words)


BATCH = KeyMapping(
    _batch_key,
    ("global_batch_size", "batch_size", "gradient_accumulation_steps"),
    "batch = micro batch x accumulation x ranks",
)

# ---- data, precision, checkpoints


def _corpus(value: Any, source: ForeignConfig) -> Conversion:
    if any(f"{part}_data_path{ending}" in source.values for part in ("train", "valid", "test") for ending in ("", "s")):
        return unsupported("excludes train, valid and test paths; leave one out")
    return implied("Megatron's index beside its .bin", data_path=f"{value}.idx")


def _paths(prefix: str) -> Callable[[Any, ForeignConfig], Conversion]:
    """A corpus or a list of them, for training ("") or validation ("valid_"): all three kinds of paths or none."""

    def read(value: Any, source: ForeignConfig) -> Conversion:
        kinds = ("train", "valid", "test")
        given = [kind for kind in kinds if source.get(f"{kind}_data_paths") or source.get(f"{kind}_data_path")]
        if len(given) != 3:
            return unsupported("train, valid and test paths are given together, or data_path alone")
        paths = [f"{path}.idx" for path in (value if isinstance(value, list) else [value])]
        weights = source.get(f"{prefix.rstrip('_') or 'train'}_data_weights") or []
        found = mixture(paths, [str(weight) for weight in weights] or ["1.0"] * len(paths))
        values = {f"{prefix}{name}": setting for name, setting in found.values.items()}
        if prefix == "test_" and values.keys() - {"test_data_path"}:
            return unsupported("a mixture to test on; name one path")
        return found._replace(values=values)

    return read


def _half(value: Any, source: ForeignConfig) -> Conversion:
    named = str(source.get("precision", "")).lower()
    kind = str(source.get("fp16.type", "")).lower()
    if value and named == "fp32":
        return unsupported("contradicts precision=fp32")
    if value and (kind == "bfloat16" or named == "bfloat16"):
        return mapped(precision="mixed_bf16", mixed_precision=True)
    if value:
        return implied("bf16 in place of fp16: it needs no loss scale", precision="mixed_bf16", mixed_precision=True)
    if named in ("fp16", "bfloat16") or source.get("bf16.enabled"):
        return implied("another key says which precision")
    return mapped(precision="fp32", mixed_precision=False)


def _save(value: Any, source: ForeignConfig) -> Conversion:
    if not source.get("save_interval") and not source.get("checkpoint_factor"):
        return unsupported("save without save_interval or checkpoint_factor, which NeoX refuses too")
    return mapped(ckpt_save_path=value)


def _steps_text(value: Any, _: ForeignConfig) -> Conversion:
    steps = value if isinstance(value, list) else [value]
    return mapped(extra_checkpoint_steps=",".join(map(str, steps)))


def _validation(field: str) -> Callable[[Any, ForeignConfig], Conversion]:
    """NeoX validates where the file has data for it; eval_interval beyond the last step is none."""

    def read(value: Any, source: ForeignConfig) -> Conversion:
        held = source.get("split") or any(source.get(f"valid_data_path{ending}") for ending in ("", "s"))
        if not held and not source.has_flag("split", "valid_data_path", "use_dummy_dataset"):
            return implied("the file names no data to validate on: none", **{field: 0})
        if field == "val_interval" and source.integer("train_iters", 0) < source.integer("eval_interval", 0):
            return implied("never reached within train_iters: none", val_interval=0)
        return mapped(**{field: value})

    return read


def _eval_iters(value: Any, source: ForeignConfig) -> Conversion:
    values = _validation("val_steps")(value, source).values
    shares = str(source.get("split", "")).replace("/", ",").split(",")
    tested = (len(shares) > 2 and shares[2].strip() not in ("", "0")) or source.get("test_data_paths")
    note = "batches of a validation, and of the test at the end" + _budget(value, source)
    return implied(note, **values, test_steps=value if tested else 0)


def _budget(batches: Any, source: ForeignConfig) -> str:
    """Sequences that NeoX sets aside: (train_iters // eval_interval + 1) x eval_iters x batch, and for the test."""
    total, every, steps = _batch(source)[0], source.integer("eval_interval", 0), source.integer("train_iters", 0)
    if total is None or every < 1 or not is_integer(batches):
        return ""
    return f": {(steps // every + 1) * batches * total} and {batches * total} sequences in NeoX"


def _profile_stop(value: Any, source: ForeignConfig) -> Conversion:
    start = source.get("profile_step_start")
    if not source.get("profile"):
        return ignored("profiling is off")
    if not is_integer(value) or not is_integer(start) or value <= start:
        return unsupported("expected a step after profile_step_start")
    return implied("profile_step_stop - profile_step_start", profile_num_steps=value - start)


def _profile_start(value: Any, source: ForeignConfig) -> Conversion:
    if not source.get("profile"):
        return ignored("profiling is off")
    return mapped(profile_start_step=value)


_BF16 = mapped(precision="mixed_bf16", mixed_precision=True)
RUN = {
    "train_iters": to("num_steps"),
    "train_epochs": to("num_epochs"),
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": BATCH,
    "gas": BATCH,
    "data_path": KeyMapping(_corpus, ("data_path",), "and .idx"),
    **{
        f"{kind}_data_path{ending}": KeyMapping(_paths(prefix), fields, "all three or none")
        for kind, prefix, fields in (
            ("train", "", ("data_path", "datasets", "weights")),
            ("valid", "valid_", ("valid_data_path", "valid_datasets", "valid_weights")),
            ("test", "test_", ("test_data_path",)),
        )
        for ending in ("", "s")
    },
    **{f"{kind}_data_weights": read_with(f"{kind}_data_paths") for kind in ("train", "valid", "test")},
    "split": to("split"),
    "data_impl": choice(
        {
            "mmap": implied(".idx and .bin", file_type="megatron"),
            "infer": implied("told by the files", file_type="auto"),
            "cached": unsupported("an index that is no longer written"),
        }
    ),
    "num_workers": KeyMapping(
        lambda value, _: (
            implied("at least one", num_workers=max(value, 1)) if is_integer(value) else mapped(num_workers=value)
        ),
        ("num_workers",),
        "at least 1",
    ),
    "fp16.enabled": KeyMapping(_half, ("precision", "mixed_precision"), "true: mixed_bf16; false: fp32"),
    "fp16.type": choice({"bfloat16": implied("with enabled"), "fp16": implied("bf16 in its place")}),
    "precision": choice(
        {
            "bfloat16": _BF16,
            "fp16": implied("bf16 in place of fp16: it needs no loss scale", **_BF16.values),
            "fp32": mapped(precision="fp32", mixed_precision=False),
        }
    ),
    "bf16.enabled": choice({True: _BF16, False: unchanged("another key says which precision")}),
    **{
        f"fp16.{name}": ignore("bf16 needs no loss scale")
        for name in (
            *("loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale", "initial_scale_power", "fp16"),
            *("auto_cast", "consecutive_hysteresis"),
        )
    },
    "fp32_allreduce": choice({True: mapped(reduce_dtype="fp32"), False: unchanged("gradients are reduced in fp32")}),
    "data_types.grad_accum_dtype": choice(
        {"fp32": implied("gradients add up in fp32"), "bf16": implied("gradients add up in fp32 all the same")}
    ),
    "save": KeyMapping(_save, ("ckpt_save_path",), "with a period"),
    "load": to("ckpt_load_path"),
    "save_interval": to("checkpoint_interval"),
    "checkpoint_factor": to("checkpoint_interval"),
    "checkpoint_scale": to("checkpoint_scale"),
    "extra_save_iters": KeyMapping(_steps_text, ("extra_checkpoint_steps",), "comma-separated"),
    "keep_last_n_checkpoints": to("keep_last_n_checkpoints"),
    "finetune": to("load_weights_only"),
    "no_load_optim": to("load_weights_only"),
    "no_save_optim": choice({True: mapped(save_optimizer=False), False: mapped(save_optimizer=True)}, "not"),
    "tensorboard_dir": to("tensorboard_dir"),
    "log_dir": to("log_dir"),
    "log_interval": to("report_interval"),
    "eval_interval": KeyMapping(_validation("val_interval"), ("val_interval",), "where the file names validation data"),
    "eval_iters": KeyMapping(_eval_iters, ("val_steps", "test_steps"), "of a validation, and of the test"),
    "checkpoint_activations": KeyMapping(
        lambda value, _: mapped(fsdp_activation_checkpointing=value), ("fsdp_activation_checkpointing",)
    ),
    "checkpoint_num_layers": KeyMapping(
        lambda value, source: (
            mapped(checkpoint_num_layers=value)
            if source.get("checkpoint_activations")
            else ignored("nothing is recomputed")
        ),
        ("checkpoint_num_layers",),
    ),
    "wall_clock_breakdown": to("log_step_timing"),
    "log_param_norm": to("log_param_norm"),
    "log_grad_norm": to("log_grad_norm"),
    "profile": to("use_profiler"),
    "memory_profiling": to("memory_profiling"),
    "profile_step_start": KeyMapping(_profile_start, ("profile_start_step",)),
    "profile_step_stop": KeyMapping(_profile_stop, ("profile_num_steps",), "minus profile_step_start"),
    "use_wandb": choice({True: mapped(tracker="wandb"), False: mapped(tracker="")}),
    "wandb_project": to("tracker_project_name"),
}
