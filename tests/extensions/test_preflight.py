"""What would end a start later is reported with the mistakes in the settings, before torch is imported."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
import torch

from main_training import CONFIGURATION, configure, train
from pretraining.config.errors import ConfigError, UserError
from pretraining.extensions.preflight import EXTENSION, defaults
from pretraining.extensions.preflight.file_system import check_file_system
from tests.parallel.launch import ROOT, environment
from tests.ports import free_port
from tests.processes import call
from tests.selection import complete, needs
from tests.warm import python

CHECK = ("--check", "--use_dummy_dataset", "--model_variant=tiny")
DUMMY: dict[str, Any] = {"use_dummy_dataset": True, "model_variant": "tiny", "checkpoint_interval": 1}


def check(*flags: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the main script in `folder`, where an import of torch fails."""
    (folder / "torch.py").write_text("raise AssertionError('torch is imported')")
    command = [sys.executable, "-c", f"import sys, runpy; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; "
               f"runpy.run_path({str(ROOT / 'main_training.py')!r}, run_name='__main__')", *flags]  # fmt: skip
    return call(command, code=None, folder=folder, env=environment(HOME=str(folder), **variables))


def test_mistakes_about_files_are_reported_with_those_in_settings_without_torch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = ["--data_path=nowhere", "--tokenizer_path=no.model", "--log_dir=file/run", "--ckpt_load_path=none"]
    done = check(*flags, "--tensorboard_dir=file/x", "--seq_length=two", "--batch_sise=4", folder=tmp_path)
    assert done.returncode == 2 and "7 problems" in done.stderr, done.stderr
    for text in (f"{tmp_path}/nowhere", f"{tmp_path}/no.model", f"{tmp_path}/file is not a folder", f"{tmp_path}/none"):
        assert text in done.stderr, done.stderr
    assert "--seq_length=two" in done.stderr and "--batch_size" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="compiles disk.c")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (f"sync:1:full:{errno.EINVAL}", "cannot write a file in any order and flush it there (Invalid argument)"),
        (f"rename:1:full:{errno.ENOSYS}", "cannot rename a folder there (Function not implemented)"),
    ],
)
def test_a_file_system_that_cannot_do_what_a_run_does_is_refused(tmp_path: Path, fault: str, words: str) -> None:
    shim, folder = tmp_path / "disk.so", tmp_path / "mounted"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, ROOT / "tests/faults/disk.c", "-ldl"], check=True)
    folder.mkdir()
    flags = [*(f"--{name}={value}" for name, value in DUMMY.items()), f"--log_dir={folder}/run", "--check"]
    assert check(*flags, folder=tmp_path).returncode == 0
    done = check(*flags, folder=tmp_path, LD_PRELOAD=str(shim), FAULT=f"{fault}:{folder}")
    assert done.returncode == 2 and f"--log_dir={folder}/run" in done.stderr and words in done.stderr, done.stderr
    assert not list(folder.iterdir())
    full = f"{fault.rpartition(':')[0]}:{errno.ENOSPC}"  # a start may make room
    assert check(*flags, folder=tmp_path, LD_PRELOAD=str(shim), FAULT=f"{full}:{folder}").returncode == 0


def test_what_a_check_left_that_was_killed_is_removed(tmp_path: Path) -> None:
    left, new = tmp_path / ".probe-left", tmp_path / ".probe-new"
    for folder in (left, new):  # the new one is of another run that starts now
        (folder / "step_0.partial").mkdir(parents=True)
    os.utime(left, (0, 0))
    check_file_system("--log_dir", tmp_path)
    assert list(tmp_path.iterdir()) == [new]


@pytest.mark.slow
def test_a_default_that_was_edited_to_something_else_is_named_with_its_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pretraining", tmp_path / "pretraining", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "main_training.py", tmp_path)
    declaration = tmp_path / "pretraining/config/settings.py"
    lines = declaration.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.startswith("    num_steps:"))
    lines[number - 1] += ","  # makes a tuple of it
    declaration.write_text("\n".join(lines))
    command = [sys.executable, "main_training.py", "--use_dummy_dataset"]
    done = call(command, code=2, folder=tmp_path)
    assert f"{declaration}:{number}  the default of num_steps: expected a whole number, not the tuple" in done.stderr
    call([*command, "--num_steps=5", "--check"], folder=tmp_path)


@complete
def test_the_published_defaults_are_those_of_the_code() -> None:
    published = defaults.published_defaults(CONFIGURATION)
    assert defaults.PUBLISHED.read_text() == published, "run python -m pretraining.tools.document --write"


def test_an_edited_default_is_listed_with_its_line_and_the_published_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    published = json.loads(defaults.PUBLISHED.read_text()) | {"num_steps": "7", "no_such_setting": "1"}
    monkeypatch.setattr(defaults, "PUBLISHED", tmp_path / "defaults.json")
    defaults.PUBLISHED.write_text(json.dumps(published))
    assert EXTENSION.instead and EXTENSION.instead(CONFIGURATION()) is None
    path, line = defaults.place_of_default(CONFIGURATION, "num_steps")
    assert capfd.readouterr().out == f"--num_steps=1000000  {path.name}:{line}, edited from 7\n"
    assert path.read_text().splitlines()[line - 1].startswith("    num_steps: ")
    EXTENSION.instead(CONFIGURATION(num_steps=8))
    assert not capfd.readouterr().out


def test_own_data_need_no_stored_ones(tmp_path: Path) -> None:
    flags = {"model_variant": "tiny", "data_path": str(tmp_path / "nowhere"), "check": True}
    with pytest.raises(ConfigError, match=r"^1 problem(.|\n)*no such folder"):
        configure(flags)
    assert configure(flags, own_data=True)


def test_check_stops_with_code_0_where_nothing_is_wrong_and_writes_nothing(tmp_path: Path) -> None:
    done = check(*CHECK, "--log_dir=run", folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("checked: no mistakes"), done.stderr
    assert len(done.stdout.splitlines()) == 1  # settings are listed where a run begins
    assert not (tmp_path / "run").exists()


def test_check_finds_out_that_a_host_has_no_address(tmp_path: Path) -> None:
    processes = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables = {**processes, "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"}
    done = check(*CHECK, "--engine=torch", folder=tmp_path, **variables)
    assert done.returncode == 2 and "MASTER_ADDR=no.such.host.invalid" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} +is a folder, where this run writes a file"):
        configure({**DUMMY, "log_dir": str(tmp_path)})


OF_EXTENSIONS = {"tensorboard_dir": "trackers", "dump_sharding": "sharding_report"}
FOLDERS = [pytest.param(name, marks=needs(extension)) for name, extension in OF_EXTENSIONS.items()]


@pytest.mark.parametrize("name", ["log_dir", "ckpt_save_path", *FOLDERS])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    fields: dict[str, Any] = {**DUMMY, "log_dir": str(tmp_path / "run")}
    wrong = str(tmp_path / "file" / "deep" / "name")
    with pytest.raises(ConfigError, match=f"--{name}={wrong} +{tmp_path / 'file'} is not a folder"):
        configure({**fields, name: wrong})
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "folder")  # root may write everywhere
    new = str(tmp_path / "folder" / "new" / "name")
    with pytest.raises(ConfigError, match=f"--{name}={new} +{tmp_path / 'folder'} cannot be written"):
        configure({**fields, name: new})


@pytest.mark.slow
@needs("trackers")
def test_a_tracker_without_a_key_or_that_cannot_be_reached_is_a_mistake(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the optional wandb package is not installed")

    def refusal(**variables: str) -> str:
        done = check(*CHECK, "--tracker=wandb", folder=tmp_path, **variables)
        assert done.returncode == (2 if done.stderr else 0), done.stderr
        return done.stderr

    assert not refusal(WANDB_MODE="offline")
    variables = {"WANDB_MODE": "online", "http_proxy": "", "https_proxy": "", "all_proxy": ""}  # of the machine
    assert "no API key: `wandb login`" in refusal(**variables)
    variables |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    refused = refusal(**variables)
    assert "127.0.0.1" in refused and "cannot be reached" in refused
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not refusal(**variables)


def test_a_device_without_a_driver_is_a_mistake(tmp_path: Path) -> None:
    built, has_driver = torch.version.cuda, find_library("cuda")
    if not built or has_driver:
        pytest.skip("this torch is not for NVIDIA's devices, or there is a driver")
    with pytest.raises(ConfigError, match=r"--device=cuda +no NVIDIA driver .*; use --device=auto"):
        configure({**DUMMY, "log_dir": str(tmp_path), "engine": "torch", "device": "cuda"})


@needs("trackers")
def test_aim_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretraining.extensions.trackers.settings.find_spec", lambda name: object())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert configure({**DUMMY, "log_dir": str(tmp_path), "tracker": "aim"})


def test_a_run_in_a_thread_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    settings = {"model_variant": "tiny", "use_dummy_dataset": True, "engine": "torch", "log_dir": tmp_path / "runs"}
    with ThreadPoolExecutor(1, "worker") as threads:
        error = threads.submit(train, settings).exception()
    assert isinstance(error, UserError) and "worker_0: call train in the main thread" in str(error)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_xla_engine_is_refused_in_a_process_that_has_trained_without_it(tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
    program = "import pretraining, torch; torch.ones(1, requires_grad=True).backward(); " + (
        f"pretraining.train({DUMMY | {'engine': 'xla', 'log_dir': str(tmp_path / 'run')}})"
    )
    done = call([*python(), "-c", program], code=None, env=environment(PJRT_DEVICE="CPU"))
    assert "UserError: --engine=xla: this process ran a backward pass before" in done.stderr, done.stderr
