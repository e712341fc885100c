"""What the monitor may not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "torch_xla", "numpy", "tensorboard", "wandb"}


def test_the_monitor_loads_nothing_heavy_until_a_run_opens_its_sinks() -> None:
    names = {path.stem for path in (ROOT / "pretraining/monitor").glob("[!_]*.py")}
    modules = [f"pretraining.monitor.{name}" for name in names]
    script = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(modules) >= 8
    assert not HEAVY & set(loaded.stdout.split())
