"""`--data_path=data/mine` alone: the folder that prepare wrote implies tokenizer, vocabulary and validation.

What it implies stands in its flags.txt, and is below flags and files in priority, but above the settings of
scripts/train.sh. The folder may have moved. One in object storage implies nothing, because no request is made before
the configuration is known to be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pretraining.config.extension import FileFlags
from pretraining.config.flags import is_script_setting
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check
from pretraining.data.layouts import FLAGS, PLAN
from pretraining.storage import location

# What the folder may imply -> settings of which each keeps it from doing so.
IMPLIED = {
    "tokenizer_path": (),
    "vocab_size": ("ckpt_load_path",),  # whose model has one
    **dict.fromkeys(("seq_length", "reset_attention_mask", "reset_position_ids"), ()),  # of instruction data
    **dict.fromkeys(("val_interval", "val_steps", "drop_last_val"), ("valid_data_path", "valid_datasets", "split")),
}


def implied_settings(
    flags: Mapping[str, object], configuration: type[TrainConfig], checks: Iterable[Check], report: bool
) -> FileFlags:
    """Return `flags` and the settings that a prepared folder at data_path implies."""
    folder = location(str(flags.get("data_path") or ""))
    file = folder / FLAGS
    if not flags.get("data_path") or flags.get("datasets") or not isinstance(file, Path):
        return FileFlags(dict(flags), {}, [])
    if not file.is_file() or not (folder / PLAN).is_file():
        return FileFlags(dict(flags), {}, [])
    words = (line.removeprefix("--").partition("=") for line in file.read_text(errors="replace").splitlines())
    values: dict[str, object] = {
        name: str(folder / Path(value).name) if name == "tokenizer_path" else value
        for name, _, value in words
        if name in IMPLIED and not any(flags.get(other) for other in IMPLIED[name])
        if name not in flags or is_script_setting(name, flags[name])
    }
    return FileFlags({**flags, **values}, {name: f"{name} of {folder}" for name in values}, [])
