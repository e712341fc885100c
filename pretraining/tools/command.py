"""The commands of an installed package: `pretrain` is main_training, `pretrain-report` is pretraining.tools.report."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_module


def main() -> None:
    """Run the module that the name of the command names, as `python -m` does."""
    tool = Path(sys.argv[0]).stem.removeprefix("pretrain").removeprefix("-").replace("-", "_")
    run_module(f"pretraining.tools.{tool}" if tool else "main_training", run_name="__main__", alter_sys=True)
