"""Paths, tokenizer, data and packages, without torch. A start looks at local paths; --check reads what they hold, and
waits for storage and for the name of the first process.
"""

from __future__ import annotations

import runpy
import socket
import sys
from collections.abc import Callable
from ctypes import CDLL
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.flags import first_rank
from pretraining.config.grammar import OBJECT_STORAGE
from pretraining.config.training import TrainConfig
from pretraining.data.origin import check_tokenizer
from pretraining.extensions.checks import check_folder
from pretraining.extensions.preflight.file_system import check_file_system
from pretraining.extensions.preflight.settings import PreflightConfig
from pretraining.monitor.metrics import refuse_unusable
from pretraining.parallel.processes import read_processes
from pretraining.run.configure import check_input
from pretraining.storage import is_remote, location

DRIVER = "libcuda.so.1"  # which torch loads, too
PATIENCE = 2.5  # seconds that --check waits for another host
STORED = ("data_path", "valid_data_path", "test_data_path", "ckpt_load_path", "ckpt_save_path")


def check_tokenizer_file(config: TrainConfig) -> None:
    """Raise UserError if there is no file where tokenizer_path is."""
    if config.tokenizer_path and not (config.use_dummy_dataset or is_remote(config.tokenizer_path)):
        check_tokenizer(config.tokenizer_path)


def check_folder_of(config: TrainConfig, split: str) -> None:
    """Raise UserError if a local folder of `split` does not exist or is empty.

    Held-out data without a folder of their own are in data_path, and reported with the training data.
    """
    flag = "data_path" if split == "train" else f"{split}_data_path"
    is_read = {"train": True, "valid": config.val_interval, "test": config.test_steps}[split]
    if config.use_dummy_dataset or not (config.data_path and getattr(config, flag) and is_read):
        return
    from pretraining.data.datasets import split_source  # numpy takes 0.2 s
    from pretraining.data.stores.find import find_datasets

    try:
        source = split_source(config, split)
        names = [] if is_remote(str(source.folder)) else find_datasets(source.folder, source.datasets)
    except UserError as error:
        raise UserError(f"--{flag}={getattr(config, flag)}: {error}") from error
    for folder in (source.folder / name for name in names):
        if folder.is_dir() and not any(folder.iterdir()):
            given = f"--{flag}={getattr(config, flag)}: {folder.resolve()}"
            raise UserError(f"{given} is empty; give a folder of token shards")


FOLDERS: tuple[Callable[[TrainConfig], None], ...] = tuple(
    partial(check_folder_of, split=split) for split in ("train", "valid", "test")
)


def check_checkpoint_folder(config: TrainConfig) -> None:
    """Raise UserError if there is nothing where ckpt_load_path is; a run of the same folder may create it."""
    path = config.ckpt_load_path
    own = config.ckpt_save_path or str(config.run_folder / "checkpoints")
    if path and not is_remote(path) and not Path(path).exists() and Path(path).resolve() != Path(own).resolve():
        raise UserError(f"--ckpt_load_path={path}: there is no such folder ({Path(path).resolve()}); give another one")


def check_packages(config: TrainConfig) -> None:
    """Raise UserError if the engine is not installed, torch was built without the device, or there is no driver."""
    if config.engine == "xla" and not find_spec("torch_xla"):
        made_for = "Linux on x86-64 and Python 3.11 to 3.13"
        remedy = f"the package torch_xla is not installed: it is made for {made_for}; use --engine=torch"
        raise UserError(f"--engine=xla: {remedy}")
    torch = find_spec("torch")
    if torch and torch.origin and (version := Path(torch.origin).with_name("version.py")).is_file():
        built = runpy.run_path(str(version))
        if built.get(config.device, "") is None and not built.get("hip"):
            has = f"torch {built['__version__']} was built without {config.device}"
            raise UserError(f"--device={config.device}: {has}; install another build, or --device=auto")
        try:
            if built.get(config.device) and sys.platform == "linux":  # only builds for NVIDIA's devices have a version
                CDLL(DRIVER)
        except OSError as error:
            raise UserError(f"--device={config.device}: no NVIDIA driver ({error}); use --device=auto") from error


def check_content(config: PreflightConfig) -> None:
    """Open all data, as a start does after torch is imported, where only the checks are asked for."""
    if not config.check or config.use_dummy_dataset or not config.data_path or is_remote(config.data_path):
        return
    try:
        for check in (*FOLDERS, check_tokenizer_file):
            check(config)
    except UserError:
        return  # reported already
    from pretraining.data.opening import check_data
    from pretraining.extensions.shared_shards import check_shared_shards

    check_shared_shards(config, check_data(config))


def check_storage(config: PreflightConfig) -> None:
    """Raise UserError if object storage does not answer."""
    paths = [path for name in STORED if (path := getattr(config, name)).startswith(OBJECT_STORAGE)]
    if config.check:
        for path in paths:
            within_patience(path, location(path).exists)


def check_first_process(config: PreflightConfig) -> None:
    """Raise UserError if the host of process 0 has no address."""
    address = read_processes().address
    if config.check and address:
        within_patience(f"MASTER_ADDR={address}", lambda: socket.getaddrinfo(address, None))


def within_patience(subject: str, ask: Callable[[], object]) -> None:
    """Raise UserError if `ask` raises an error, or does not return in time."""
    failures: list[str] = [f"no answer within {PATIENCE} s; check the name and the network"]

    def answer() -> None:
        try:
            ask()
            failures.clear()
        except OSError as error:
            failures[:] = [f"cannot be reached ({error.strerror or error}); check the name and the network"]

    thread = Thread(target=answer, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if failures:
        raise UserError(f"{subject}: {failures[0]}")


def check_run_folder(config: TrainConfig) -> None:
    """Raise UserError if process 0 cannot write the run's folder and files."""
    if first_rank():
        folder = config.run_folder
        subject = f"--log_dir={config.log_dir or folder}"
        check_file_system(subject, check_folder(subject, folder))
        for name in ("metrics.jsonl", "config.json"):
            refuse_unusable(folder / name)


def check_output_folders(config: TrainConfig) -> None:
    """Raise ConfigError with the folders that process 0 cannot write."""
    problems: list[Problem] = []
    for name in config.output_folders() if first_rank() else ():
        is_used = config.checkpoint_interval or name != "ckpt_save_path"  # which a run may only read
        if is_used and (path := getattr(config, name)) and not is_remote(path):
            problems += check_input(config, partial(_check_written, name))
    if problems:
        raise ConfigError(problems)


def _check_written(name: str, config: TrainConfig) -> None:
    path = getattr(config, name)
    check_file_system(f"--{name}={path}", check_folder(f"--{name}={path}", Path(path)))


INPUTS = (
    check_run_folder,
    check_output_folders,
    check_tokenizer_file,
    check_checkpoint_folder,
    check_packages,
    check_storage,
    check_first_process,
)
STORED_DATA = (*FOLDERS, check_content)
