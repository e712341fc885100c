"""The recipe as an installed package: its wheel has everything, and its commands run in any folder."""

from __future__ import annotations

import os
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests import processes
from tests.end_to_end.checkout import copy_checkout

ROOT = Path(__file__).parents[2]
RUN = ["--use_dummy_dataset", "--model_variant=tiny", "--seq_length=64", "--batch_size=1", "--num_steps=2"]
RUN += ["--engine=torch", "--device=cpu", "--mixed_precision=False", "--report_interval=1", "--log_dir=run"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the commands of an environment with the wheel, which sees this environment's packages."""
    folder = tmp_path_factory.mktemp("package")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    checkout = copy_checkout(folder / "checkout")  # the build writes into the folder of the source
    processes.call([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", checkout])
    (wheel,) = folder.glob("*.whl")
    processes.call([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    processes.call([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel])
    return python.parent


def call(commands: Path, folder: Path, name: str, *arguments: str) -> str:
    """Run a command in a folder without a checkout; return what it prints."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return processes.call([commands / name, *arguments], folder=folder, env=variables).stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_commands_of_the_wheel_prepare_train_and_report_in_any_folder(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "some.md").write_text((ROOT / "README.md").read_text())
    call(commands, tmp_path, "pretrain-prepare", "--input=text", "--output=mine", "--vocab_size=512")
    assert (tmp_path / "mine" / "flags.txt").exists()
    assert "complete: 2 steps" in call(commands, tmp_path, "pretrain", *RUN)
    call(commands, tmp_path, "pretrain-report", "run")
    assert (tmp_path / "run" / "report.html").exists()
    settings = dict(word.removeprefix("--").split("=") for word in RUN[1:]) | {"use_dummy_dataset": True}
    code = f"import pretraining; run = pretraining.train({settings | {'log_dir': 'again'}}); print(sorted(run.losses))"
    assert call(commands, tmp_path, "python", "-c", code).endswith("[1, 2]\n")
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]:
        assert "--" in call(commands, tmp_path, name, "--help")
