"""Checkpoints by the paths that a user gives, in any format or the newest of a run, and their unsharded tensors."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import torch
from torch import Tensor

from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.folder import CHECKPOINTS, find_checkpoints
from pretraining.checkpoint.manifest import DTYPES, Checkpoint, Facts, is_committed, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import load
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data.datasets import NO_SEPARATOR
from pretraining.data.layouts import FLAGS, PLAN
from pretraining.extensions.files import read_json
from pretraining.storage import CHECKPOINT_FORMATS, Location, is_remote, location

RUN_CONFIG = "config.json"  # of a run: its effective configuration
ALLOW_REMOTE = "contact the object storage that the run's configuration names"  # help of the flag


def refuse_remote(name: str, value: str, owner: Location) -> None:
    """Raise UserError if a configuration in `owner`, which may be anyone's, names a path in object storage."""
    if is_remote(value) and not is_remote(owner):
        raise UserError(f"{owner}: its configuration has {name}={value}; --allow_remote contacts that storage")


def newest_checkpoint(path: Location, allow_remote: bool = True) -> Location:
    """Return the checkpoint at `path`: a step_N folder itself, or the newest of a run or of a folder of checkpoints.

    A run has its checkpoints where its config.json says, or in `checkpoints`. allow_remote: whether that may be object
    storage, if `path` is not. Raises UserError if there is none.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such folder")
    if is_committed(path):
        return path
    folders = [path / CHECKPOINTS, path]
    config = read_json(path / RUN_CONFIG) if (path / RUN_CONFIG).is_file() else {}
    if named := config.get("ckpt_save_path"):
        if not isinstance(named, str):
            raise UserError(f"{path / RUN_CONFIG}: ckpt_save_path={named} is no path")
        if not allow_remote:
            refuse_remote("ckpt_save_path", named, path)
        folders.insert(0, location(named))
    for folder in folders:
        if committed := find_checkpoints(folder).committed:
            return committed[0]
    places = ", ".join(map(str, folders))
    more = ""
    if local := config.get("ckpt_local_path"):
        more = f"; --ckpt_local_path={local} of its hosts may have one"
    elif any(form.recognizes(path) for form in CHECKPOINT_FORMATS):
        more = f"; python -m pretraining.tools.convert {shlex.quote(str(path))} TARGET makes one of the weights in it"
    elif (path / "adapter_config.json").is_file():
        more = "; it has an adapter of PEFT's: give it as --lora_load_path, and the model as --ckpt_load_path"
    elif "ckpt_save_path" not in config:  # not a run
        more = "; Hugging Face's folders need safetensors; python -m pretraining.tools.convert reads other trainers'"
    raise UserError(f"{path}: holds no committed checkpoint (a step_N folder with its marker); searched {places}{more}")


def open_any_checkpoint(path: Location, allow_remote: bool = True) -> Checkpoint:
    """Open a folder in a format that an extension reads, a step_N folder, or the newest checkpoint of a run."""
    for form in CHECKPOINT_FORMATS:
        if form.recognizes(path):
            checkpoint: Checkpoint = form.open(path)
            return checkpoint
    return open_newest(path, allow_remote)


def open_newest(path: Location, allow_remote: bool = True) -> Checkpoint:
    """Open a step_N folder, or the newest checkpoint of a run, which may save and remove others meanwhile."""
    while True:
        newest = newest_checkpoint(path, allow_remote)
        try:
            return open_checkpoint(newest)
        except (UnreadableError, FileNotFoundError) as error:
            if newest.exists():
                others = [other for other in find_checkpoints(newest.parent).committed if other != newest]
                remedy = f"give {others[0]}, or move this folder away" if others else "give another checkpoint"
                raise UnreadableError(f"{error}: {remedy}") from error


def separator_of(facts: Facts, config: TrainConfig, tokenizer_path: str) -> int | None:
    """Return the id after every document of a run's data, which meta.json may have named: the flags' where the
    checkpoint does not say, and of rows of examples, what `prepare --sft --separator` wrote next to the tokenizer.

    None: rows had no separator, or it is not known.
    """
    flag = config.eos_token if config.sep_token is None else config.sep_token
    separator: int | None = (facts.data or {}).get("order", {}).get("eos_token", flag)
    return _separator_of_examples(tokenizer_path) if separator in (None, NO_SEPARATOR) else separator


def _separator_of_examples(tokenizer_path: str) -> int | None:
    folder = location(tokenizer_path).parent
    if not tokenizer_path or is_remote(folder) or not all((folder / name).is_file() for name in (PLAN, FLAGS)):
        return None  # a plan.json alone is another program's
    settings = read_json(folder / PLAN).get("settings")
    separator = settings.get("separator") if isinstance(settings, dict) and settings.get("sft") else None
    return None if separator == NO_SEPARATOR else separator  # NO_SEPARATOR: the tokenizer's


def read_tensors(
    source: Checkpoint | Location, is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Return the unsharded tensors of a checkpoint whose names are wanted, in the dtype they were saved in.

    In one process, without a process group and whatever mesh saved it. Raises UnreadableError if it cannot be trusted,
    or its run removes it meanwhile.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    entries = checkpoint.manifest.tensors.items()
    state = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries if is_wanted(name)}
    try:
        load(checkpoint, state, Peers(together=False))
    except UnreadableError as error:
        if checkpoint.path.exists():
            raise
        remedy = "its run keeps newer ones: give the same command again, or a copy of the checkpoint"
        raise UnreadableError(f"{checkpoint.path}: removed while it was being read; {remedy}") from error
    return state
