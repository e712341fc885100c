"""Converters that the tables of all three trainers use, because all three descend from Megatron-LM."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pretraining.config.grammar import parse_split
from pretraining.tools.importing.conversions import (
    Conversion,
    differs,
    ignored,
    implied,
    mapped,
    precision,
    unsupported_value,
)
from pretraining.tools.importing.foreign import ForeignConfig, is_integer
from pretraining.tools.importing.mappings import KeyMapping

# ---- parallelism


def planned_devices(source: ForeignConfig, devices: int | None) -> dict[str, Any]:
    """Return the devices of a plan that the command line asks for without naming any: those of the source, if known.

    devices: in the file; --source_world_size wins.
    """
    devices = source.integer_flag("source_world_size") or devices
    with suppress(KeyError, ValueError):  # no plan here, or a mistake in the flag, which is reported
        is_asked = source.settings["plan"].read(source.flags["plan"])
        if is_asked and devices and not source.has_flag("plan_devices", "plan_topology"):
            return {"plan_devices": devices}
    return {}


def pipeline(value: Any, source: ForeignConfig) -> Conversion:
    """Stages; with --import_pp=fold none: their devices take rows of their own, which changes no loss."""
    if source.flags.get("import_pp") == "fold" and value not in (0, 1):
        return differs(f"{value} stages are folded into data parallelism", pipeline_parallel_size=1)
    return mapped(pipeline_parallel_size=max(value, 1) if is_integer(value) else value)


def _of_stages(name: str) -> KeyMapping:
    """A setting of the stages, which is folded with them."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        setting = source.settings.get(name)  # of an extension
        if setting and source.flags.get("import_pp") == "fold" and value not in (setting.default, []):
            return differs("folded with the stages", **{name: setting.default})
        return mapped(**{name: value})

    return KeyMapping(convert, (name,))


VIRTUAL_PIPELINE = _of_stages("virtual_pipeline_size")  # interleaved pieces of a stage
PIPELINE_CUTS = _of_stages("pipeline_cuts")


def sequence_parallel(tensor_key: str) -> KeyMapping:
    """Sequence parallelism, which needs more than one tensor rank."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        if value and source.integer(tensor_key) == 1:
            return implied("off without tensor parallelism, as in the source", sequence_parallel=False)
        return mapped(sequence_parallel=value)

    return KeyMapping(convert, ("sequence_parallel",), "off with one tensor rank")


def vocabulary_multiple(tensor_key: str) -> KeyMapping:
    """Megatron pads to a multiple of this times the tensor ranks; so does our field, with our tensor ranks."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        theirs = max(source.integer(tensor_key), 1)
        ours = source.integer_flag("tensor_parallel_size") or theirs
        if not is_integer(value) or value < 1:
            return unsupported_value("expected a whole number, at least 1")
        rows = f"rows are padded to a multiple of {value * theirs} = {value} x {theirs} tensor ranks, as in the source"
        rows += ", which learns that padding never comes; here it has no probability"
        if (value * theirs) % ours:
            remedy = f"--tensor_parallel_size={ours} does not divide that: give --make_vocab_size_divisible_by"
            return unsupported_value(f"{rows}; {remedy}", make_vocab_size_divisible_by=value)
        return implied(rows, make_vocab_size_divisible_by=value * theirs // ours)

    return KeyMapping(convert, ("make_vocab_size_divisible_by",), "times the tensor ranks, in both")


# Tokenizers of a fixed size: kind -> a part of its file's name, and its tokens. A file of another name is another one.
TOKENIZERS = {"gpt2bpetokenizer": ("gpt2", 50257), "hftokenizer": ("20B_tokenizer", 50277)}


def tokenizer_kind(file_key: str) -> KeyMapping:
    """The kind of a tokenizer, from which the number of its tokens follows if it is a published one."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        part, tokens = TOKENIZERS.get(str(value).lower(), ("", 0))
        file = source.get(file_key, "gpt2" if part == "gpt2" else "")
        if not tokens or part not in str(file):
            return ignored("tokens are prepared before; give --vocab_size")
        return implied(f"the tokens of {'GPT-2' if part == 'gpt2' else 'GPT-NeoX-20B'}", vocab_size=tokens)

    return KeyMapping(convert, ("vocab_size",), "GPT-2's and GPT-NeoX-20B's; of others, give --vocab_size")


# ---- batch and data


def micro_batch_sizes(total: int, ranks: int) -> str:
    """Return the micro-batch sizes that divide a global batch over the data-parallel ranks, comma-separated."""
    return ", ".join(str(size) for size in range(1, total // ranks + 1) if total % (size * ranks) == 0)


def corpora(paths: list[str], weights: list[str], part: str = "") -> Conversion:
    """Megatron's corpora, as a folder and names in it. weights: one for each path, or none; of the same path, added.

    part: prefix of our fields, "" for training, "valid_" or "test_".
    """
    if not paths or not all(isinstance(path, str) and "," not in path for path in paths):
        return unsupported_value("expected a path, or weights and paths in turn")
    note = "the folder that holds them all, and each of them"
    if weights and len(set(paths)) < len(paths):
        note += "; the weights of the same one are added"
        shares = dict.fromkeys(paths, 0.0)
        for path, weight in zip(paths, weights, strict=True):
            shares[path] += float(weight)
        paths, weights = list(shares), [str(share) for share in shares.values()]
    indexes = [f"{path}.idx" for path in paths]
    if len(indexes) == 1:
        return implied("Megatron's index, with its .bin next to it", **{f"{part}data_path": indexes[0]})
    if part == "test_":
        note = "a mixture to test on; give --test_data_path, one of them"
        return unsupported_value(note, test_data_path=indexes[0])
    root = os.path.commonpath([Path(index).parent for index in indexes])
    values = {f"{part}data_path": root, f"{part}datasets": ",".join(os.path.relpath(path, root) for path in indexes)}
    if weights:
        values[f"{part}weights"] = ",".join(weights)
    return implied(note, **values)


def names_parts(source: ForeignConfig) -> bool:
    """Return whether the file names the data of training, validation and test apart: no trainer reads shares then."""
    keys = ("data.train_dir", "data.data_prefix.train", "model.data.data_prefix.train", "train_data_path")
    return any(source.values.get(key) for key in (*keys, "train_data_paths"))


def has_share(text: Any, part: int) -> bool:
    """Return whether shares of the documents, such as "969, 30, 1", give any to part 0, 1 or 2."""
    with suppress(ValueError):  # no shares, which is a mistake of the setting
        shares = parse_split(str(text or ""))
        return bool(shares and shares[part])
    return True


def _shares(value: Any, source: ForeignConfig) -> Conversion:
    return ignored("the data of each part are named") if names_parts(source) else mapped(split=value)


SPLIT = KeyMapping(_shares, ("split",), "not where each part has data of its own")


def _mask_eod(value: Any, _: ForeignConfig) -> Conversion:
    """Micro-batches then differ in their trained tokens, which the trainers' loss, a mean of means, does not weigh."""
    if not value:
        return mapped(eod_mask_loss=value)
    return differs("the loss is a mean over all trained tokens, not of the micro-batches' means", eod_mask_loss=value)


MASK_EOD = KeyMapping(_mask_eod, ("eod_mask_loss",))


def not_read(name: str, reason: str) -> KeyMapping:
    """A switch that is followed as documented, and that the trainer's code does not read."""

    def convert(value: Any, _: ForeignConfig) -> Conversion:
        return differs(f"as documented; {reason}", **{name: value}) if value else mapped(**{name: value})

    return KeyMapping(convert, (name,))


def _workers(value: Any, _: ForeignConfig) -> Conversion:
    """Threads of the data loader."""
    return differs("at least one thread reads ahead", num_workers=1) if value == 0 else mapped(num_workers=value)


WORKERS = KeyMapping(_workers, ("num_workers",), "0: 1")

# ---- precision


def half(source: ForeignConfig) -> Conversion:
    """fp16 with a loss scale, which the xla engine does not have."""
    if source.flags.get("engine") == "xla":
        note = "the xla engine has bf16 in place of fp16, which needs no loss scale"
        return precision("mixed_bf16", note)._replace(status="different")
    return precision("fp16")


def is_replaced(source: ForeignConfig) -> bool:
    """Return whether a flag names another precision than fp16, without the loss scale of the file."""
    return source.has_flag("precision", "mixed_precision") and source.flags.get("precision") != "fp16"


# ---- optimizer


def betas(optimizer_of: Callable[[ForeignConfig], str]) -> KeyMapping:
    """The two decays of Adam and its relatives. optimizer_of: returns our optimizer."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        if not isinstance(value, list) or len(value) != 2:
            return unsupported_value("expected two numbers")
        ours = source.optimizers.get(optimizer_of(source))
        if ours and "beta2" not in ours.arguments:
            return unsupported_value(f"optimizer={optimizer_of(source)} has no betas")
        return mapped(adam_beta1=value[0], adam_beta2=value[1])

    return KeyMapping(convert, ("adam_beta1", "adam_beta2"), "two numbers; absent: the class's")


def optimizer_arguments(arguments: dict[str, Any]) -> Conversion:
    """The optimizer's own arguments in one text: momentum=0.9,nesterov=True."""
    items = ((name, tuple(value) if isinstance(value, list) else value) for name, value in arguments.items())
    text = ",".join(f"{name}={value}" for name, value in items)
    return implied("all of the optimizer's own arguments", optimizer_args=text)


# ---- profiling


def profiled_steps(enabled: str, start: str, stop: str, offset: int) -> dict[str, KeyMapping]:
    """The keys `start` and `stop`. offset: 1 where steps count from 0 and `stop` is profiled too, otherwise 0."""

    def convert_start(value: Any, source: ForeignConfig) -> Conversion:
        if not source.get(enabled):
            return ignored("profiling is off")
        if not is_integer(value):
            return unsupported_value("expected a whole number")
        return implied("the first step is 1 here", profile_start_step=value + offset)

    def convert_stop(value: Any, source: ForeignConfig) -> Conversion:
        first = source.get(start)
        if not source.get(enabled):
            return ignored("profiling is off")
        if not is_integer(value) or not is_integer(first) or value - first + offset < 1:
            return unsupported_value(f"expected a step after {start}")
        return implied(f"from {start} on", profile_num_steps=value - first + offset)

    return {
        start: KeyMapping(convert_start, ("profile_start_step",), "plus 1" if offset else ""),
        stop: KeyMapping(convert_stop, ("profile_num_steps",), "from the first step to this"),
    }
