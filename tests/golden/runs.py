"""Tiny fp32 runs of both engines whose figures are recorded: `python -m tests.golden.runs --record`.

The figures are compared bit for bit where torch, the processor and the number of cores are those of the record, and to
1e-5 elsewhere, because another kernel or another split of a sum over threads rounds differently. Record them
again only with a reason that belongs into the commit message.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end import small
from tests.parallel.launch import CHEAP_TO_COMPILE
from tests.processes import call, words
from tests.warm import python

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("losses.json")
CHECKPOINT = Path(__file__).with_name("checkpoint")
RUN = Path("runs/golden")  # relative, so that the checkpoint names no path of the machine that wrote it
STEPS = 10
FLAGS: dict[str, Any] = {
    **small.FLAGS,
    "num_layers": 4,
    "vocab_size": 128,
    "use_dummy_dataset": True,
    "num_steps": STEPS,
    "checkpoint_interval": None,
    "run_name": "golden",
}
# The checkpoint's model is small enough to be kept in the repository.
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 64,
    "num_steps": 6,
    "checkpoint_interval": 4,
}
ENGINES: dict[str, dict[str, Any]] = {"xla": {"engine": "xla"}, "torch": {"engine": "torch", "device": "cpu"}}


def environment(xla_flags: str | None) -> dict[str, str]:
    """Eight virtual devices for the xla engine, two threads for the torch engine, and XLA_FLAGS (None: not set)."""
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    flags = {} if xla_flags is None else {"XLA_FLAGS": xla_flags}
    return {**inherited, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "OMP_NUM_THREADS": "2", **flags}


def train(folder: Path, xla_flags: str | None = CHEAP_TO_COMPILE, **fields: Any) -> list[dict[str, float]]:
    """Run the script in `folder`, and return loss, gradient norm and learning rate of each step. What it printed is in
    output.txt."""
    folder.mkdir(exist_ok=True)
    command = [*python(), str(ROOT / "main_training.py"), *words({**FLAGS, **fields})]
    (folder / "output.txt").write_text(call(command, folder=folder, env=environment(xla_flags)).stdout)
    lines = small.reports(folder / RUN).values()
    return [{name: line[name] for name in ("loss", "grad_norm", "learning_rate")} for line in lines]


def continue_checkpoint(folder: Path, **fields: Any) -> list[dict[str, float]]:
    """Run the steps that follow the kept checkpoint."""
    shutil.copytree(CHECKPOINT, folder / RUN / "checkpoints")
    return train(folder, **SMALL, **fields)


def machine() -> dict[str, Any]:
    """Return what the last bit of a sum depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model")  # MKL asks for the vendor
    processor = " ".join(known.get(name, "") for name in names)
    instructions = torch.backends.cpu.get_cpu_capability()
    version = torch.__version__.partition("+")[0]
    return {"torch": version, "processor": processor, "instructions": instructions, "cores": os.cpu_count()}


def record() -> None:
    """Write the figures of this machine, and where there is none yet the checkpoint that must load forever."""
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: train(Path(folder, name), xla_flags="", **engine) for name, engine in ENGINES.items()}
        if not CHECKPOINT.exists():
            train(Path(folder, "small"), **SMALL, **ENGINES["torch"])
            shutil.copytree(Path(folder, "small") / RUN / "checkpoints" / "step_4", CHECKPOINT / "step_4")
        losses["continued"] = continue_checkpoint(Path(folder, "continued"), **ENGINES["torch"])
    RECORD.write_text(json.dumps({"machine": machine(), **losses}, indent=1) + "\n")


if __name__ == "__main__":
    assert sys.argv[1:] == ["--record"], __doc__
    record()
