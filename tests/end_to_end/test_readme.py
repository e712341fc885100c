"""The commands of the README do what it says. Its second one, scripts/test.sh, runs this test."""

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
    """Return every line of the shell blocks of the README, without its comment."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def shown_lines() -> list[str]:
    """Return the lines that the README shows of the quickstart, up to the sample of the model."""
    (block,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for line in block.partition("\n\n")[0].splitlines() if line != "..."]


def without_numbers(line: str) -> str:
    """Return the words of a line: numbers, their units and the spaces differ from run to run."""
    return re.sub(r"(\d[\d.,e+-]*|nan)(ms|m|s|h)?(\d+s)?", "#", " ".join(line.split()))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree whose environment is this interpreter with its packages."""
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
    """Run a line of shell without the settings of the tests, and return what it printed."""
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
    outputs = {command: run(command, checkout) for command in listed if command != ITSELF}
    quickstart = outputs["bash scripts/train.sh"]
    if "engine: xla on CPU" in quickstart:  # the README shows a host without accelerator
        printed = {without_numbers(line) for line in quickstart.splitlines()}
        assert {without_numbers(line) for line in shown_lines()} <= printed
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
    (sample,) = (text for command, text in outputs.items() if "generate runs/mine" in command)
    assert "The " in sample
    assert any("Benchmark summary" in text and "tokens/s" in text for text in outputs.values())
