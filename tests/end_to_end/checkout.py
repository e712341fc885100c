"""A copy of the tree in which commands run as a user types them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.end_to_end.small import ROOT
from tests.processes import call

LEFT_BEHIND = {"runs", "data", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def copy_checkout(folder: Path) -> Path:
    """Copy the tree to `folder`; its environment is this interpreter with its packages."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in LEFT_BEHIND or path.name.startswith(".venv"):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    environment = folder / ".venv"  # with its own name in sys.executable, which a run prints
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", environment)
    (environment / "lib").symlink_to(Path(sys.prefix) / "lib")
    stamp = "source scripts/setup.sh; installation_state requirements.txt > .venv/installed-requirements.txt"
    call(["bash", "-c", stamp], folder=folder)
    return folder


def run(command: str, folder: Path) -> str:
    """Run a line of shell without the settings of the tests, and return what it printed."""
    hidden = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "NPROC", "NPROC_PER_NODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return call(["bash", "-c", f"exec 2>&1; {command}"], folder=folder, env=environment, timeout=1800).stdout
