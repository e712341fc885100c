"""The shell scripts: they set themselves up once, say what is missing, and return the training's own exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"])
TOY = [
    *("--use_dummy_dataset", "--model_variant=custom", "--num_layers=2", "--hidden_size=32", "--intermediate_size=64"),
    *("--num_attention_heads=2", "--vocab_size=128", "--seq_length=16", "--global_batch_size=8", "--batch_size=1"),
    "--num_steps=2",
]


def bash(folder: Path, command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in `folder`."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", **extra}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the scripts with requirements that install in no time."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    return tmp_path


@pytest.fixture
def installed(checkout: Path) -> Path:
    """The same, set up already with this interpreter and its packages, and with the recipe in it."""
    for name in ("pretraining", "main_training.py"):
        (checkout / name).symlink_to(ROOT / name)
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    stamp = "source scripts/setup.sh; requirements_state requirements.txt > .venv/installed-requirements.txt"
    assert bash(checkout, stamp).returncode == 0
    return checkout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_every_script(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    subprocess.run(["shellcheck", "-x", script], cwd=ROOT, check=True)


def test_setting_up_installs_once_and_again_when_the_requirements_change(checkout: Path) -> None:
    first = bash(
        checkout, "source scripts/setup.sh; set_up requirements.txt; $python -c 'import sys; print(sys.prefix)'"
    )
    assert (first.returncode, first.stdout.strip()) == (0, str(checkout / ".venv"))
    assert "setting up" in first.stderr
    again = bash(checkout, "source scripts/setup.sh; set_up requirements.txt")
    assert (again.returncode, again.stderr) == (0, "")
    (checkout / "requirements.txt").write_text("# something else\n")
    changed = bash(checkout, "source scripts/setup.sh; set_up requirements.txt")
    assert (changed.returncode, "setting up" in changed.stderr) == (0, True)


def test_an_installation_that_failed_is_tried_again(checkout: Path) -> None:
    (checkout / "requirements.txt").write_text("./no-such-package\n")
    for _ in range(2):
        failed = bash(checkout, "source scripts/setup.sh; set_up requirements.txt; echo went on")
        assert (failed.returncode, failed.stdout) == (1, "")
        assert "set-up failed" in failed.stderr
    (checkout / "requirements.txt").write_text("# nothing\n")
    assert bash(checkout, "source scripts/setup.sh; set_up requirements.txt").returncode == 0


def test_a_machine_without_a_suitable_python_is_told_what_to_install(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "mkdir", "find", "flock"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    failed = bash(checkout, "source scripts/setup.sh; set_up requirements.txt", PATH=str(tools))
    assert failed.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13" in failed.stderr
    assert "PYTHON=/path/to/python3.12" in failed.stderr


def test_mistakes_in_the_flags_are_told_once_before_anything_starts(installed: Path) -> None:
    ended = bash(
        installed, "bash scripts/train.sh --use_dummy_dataset --batch_sise=4 --seq_length=two", NPROC_PER_NODE="2"
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("2 problems with the configuration:") == 1
    assert "note:" not in ended.stderr.partition("2 problems")[2]


def test_a_configuration_file_takes_the_place_of_the_settings(installed: Path) -> None:
    (installed / "run.toml").write_text('model_variant = "mini"\nuse_dummy_dataset = true\nseq_length = 512\n')
    ended = bash(installed, "bash scripts/train.sh --config_file=run.toml --import_only")
    said = {"--model_variant=mini", "--seq_length=512", "--use_dummy_dataset=True", "--checkpoint_interval=0"}
    assert (ended.returncode, {line.strip() for line in ended.stdout.splitlines()}) == (0, said), ended.stderr


def test_help_is_the_table_of_flags(installed: Path) -> None:
    ended = bash(installed, "bash scripts/train.sh --help")
    assert (ended.returncode, "--batch_size=2" in ended.stdout) == (0, True)


def test_a_host_whose_nvidia_driver_is_missing_counts_as_one_without_gpus(installed: Path) -> None:
    """nvidia-smi then writes two lines to stdout, which are not two GPUs."""
    tools = installed / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\necho Make sure\nexit 9\n")
    (tools / "nvidia-smi").chmod(0o755)
    (installed / "main_training.py").unlink()
    (installed / "main_training.py").write_text("import os; print(os.environ['PJRT_DEVICE'], 'RANK' in os.environ)\n")
    path = f"{tools}:{os.environ['PATH']}"
    ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset", PATH=path, PJRT_DEVICE="")
    assert (ended.returncode, ended.stdout) == (0, "CPU False\n"), ended.stderr


@pytest.mark.parametrize("name", ["NPROC", "NPROC_PER_NODE"])
def test_the_codes_of_processes_under_torchrun_are_told_apart(installed: Path, name: str) -> None:
    """torchrun itself would return 1."""
    program = "import os, sys, pathlib; rank = os.environ['RANK']\n"
    program += "pathlib.Path(os.environ['EXIT_CODES'], rank).write_text('3'); sys.exit(3)\n"
    (installed / "main_training.py").unlink()
    (installed / "main_training.py").write_text(program)
    ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset --engine=torch", **{name: "2"}, PJRT_DEVICE="")
    assert ended.returncode == 3


@pytest.mark.slow
def test_a_training_started_by_the_script_finishes_with_0_and_keeps_the_settings_at_its_top(installed: Path) -> None:
    pytest.importorskip("torch_xla", reason="the settings of the script are for the xla engine")
    ended = bash(installed, f"bash scripts/train.sh {' '.join(TOY)} --log_dir=run")
    assert ended.returncode == 0, ended.stderr
    assert len((installed / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "--num_steps=140 is overridden by the later --num_steps=2" in ended.stderr


@pytest.mark.slow
def test_a_sigterm_to_the_script_reaches_the_training(installed: Path) -> None:
    pytest.importorskip("torch_xla", reason="the settings of the script are for the xla engine")
    command = ["bash", "scripts/train.sh", *TOY, "--num_steps=1000000", "--log_dir=run"]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    with subprocess.Popen(command, cwd=installed, env=environment, stdout=subprocess.PIPE, text=True) as script:
        metrics = installed / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline and script.poll() is None, "training did not start"
            time.sleep(0.2)
        script.send_signal(signal.SIGTERM)
        script.communicate(timeout=60)
    assert script.returncode == 128 + signal.SIGTERM


def test_a_newest_torch_that_cannot_be_installed_is_an_error_unless_it_is_left_out_on_purpose(checkout: Path) -> None:
    bin_ = checkout / ".venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "python").write_text("#!/bin/sh\nexit 0\n")  # whose checks and tests all pass
    (bin_ / "python").chmod(0o755)
    (checkout / "requirements-dev.txt").write_text("# nothing\n")
    (checkout / "requirements-newest.txt").write_text("torch==0.0.1\n")
    stamp = "source scripts/setup.sh; requirements_state requirements-dev.txt > .venv/installed-requirements-dev.txt"
    assert bash(checkout, stamp).returncode == 0
    failed = bash(checkout, "bash scripts/test.sh", PIP_NO_INDEX="1")
    assert failed.returncode == 1
    assert "torch==0.0.1 could not be installed" in failed.stderr
    assert "NEWEST_TORCH=no bash scripts/test.sh leaves it out" in failed.stderr
    without = bash(checkout, "bash scripts/test.sh", NEWEST_TORCH="no")
    assert without.returncode == 0
    assert "not tested with the newest torch" in without.stderr


def pins(name: str) -> dict[str, str]:
    lines = [line.partition("#")[0].partition(";")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_newest_torch_is_tested_with_the_other_packages_as_they_are_pinned() -> None:
    usual, newest = {**pins("requirements-dev.txt"), **pins("requirements.txt")}, pins("requirements-newest.txt")
    assert "torch-xla" not in newest
    assert {name for name, version in newest.items() if usual[name] != version} == {"torch"}
