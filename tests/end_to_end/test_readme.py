"""The README's commands do what it says. Its second one, scripts/test.sh, is what runs this."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.small import ROOT, figures

pytestmark = pytest.mark.slow
ITSELF = "bash scripts/test.sh"
LEFT_BEHIND = {"runs", "data", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def commands() -> list[str]:
    """Every line of the README's shell blocks, without its comment."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, set up already with this interpreter and its packages."""
    folder = tmp_path_factory.mktemp("readme") / "checkout"
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in LEFT_BEHIND or path.name.startswith(".venv"):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    stamp = "source scripts/setup.sh; installation_state requirements.txt > .venv/installed-requirements.txt"
    subprocess.run(["bash", "-c", stamp], cwd=folder, check=True)
    return folder


def run(command: str, folder: Path) -> str:
    """A line of shell in a shell without our own settings; what it printed."""
    hidden = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "NPROC", "NPROC_PER_NODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_every_command_of_the_readme_succeeds_and_the_quickstart_learns(checkout: Path) -> None:
    pytest.importorskip("torch_xla", reason="the settings of scripts/train.sh are for the xla engine")
    listed = commands()
    assert ITSELF in listed
    said = {command: run(command, checkout) for command in listed if command != ITSELF}
    quickstart = said["bash scripts/train.sh"]
    lines = figures(checkout / "runs" / "quickstart")
    last = max(step for step, _ in lines)
    reached = statistics.mean(
        lines[step, "loss"]["loss"] for step in range(last - 9, last + 1)
    )  # batches differ by 0.3
    assert reached < lines[1, "loss"]["loss"] - 4.0  # nats
    assert lines[last, "val_loss"]["val_loss"] == pytest.approx(reached, abs=1.0)
    for what in ("metrics.jsonl", "checkpoints", "pretraining.monitor.report", "def main("):  # the last is the sample
        assert what in quickstart.partition("complete:")[2]
    assert "complete:" in run("bash scripts/train.sh", checkout)
    assert any("Benchmark summary" in text and "tokens/s" in text for text in said.values())
