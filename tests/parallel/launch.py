"""Starting scripts in one process or several."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.processes import call
from tests.warm import python

ROOT = Path(__file__).parents[2]
ALONE = 0  # without torchrun; 1 is a process group of one, which is how a single GPU trains
# Flags of XLA for toys, whose few steps do not earn the compiler's work back. Without LLVM's optimizations a program of
# the toy compiles in a third of the time; with the older emitter a case of xla_driver.py takes three quarters of it.
CHEAP_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


# jax is of requirements/tpu-aot.txt
HAS_SHARDING_REPORT = find_spec("pretraining.extensions.sharding_report") is not None
HAS_SPLASH = all(map(find_spec, ("jax", "pretraining.extensions.splash")))


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test where one of these packages is missing, of those that lower and compile for TPUs."""
    return pytest.mark.skipif(not all(map(find_spec, packages)), reason="needs requirements/tpu-aot.txt")


def launched(processes: int, *arguments: str, interpreter: Sequence[str] = ()) -> list[str]:
    """The command that runs a script with this many processes."""
    program = [*(interpreter or python()), *arguments]
    if processes == ALONE:
        return program
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--no-python"]
    return [*(interpreter or python()), *torchrun, *program]


def environment(**more: str) -> dict[str, str]:
    """Of a process started here: one thread each, so that four of them do not fight for two cores."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


@functools.cache
def dump_of(case: str) -> str:
    """The file that a case writes to dump_sharding."""
    return f"{tempfile.mkdtemp()}/sharding.json"


def run_on_torch(processes: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train every case on the torch engine in one start of this many processes; see torch_driver.py."""
    script = str(Path(__file__).with_name("torch_driver.py"))
    return run(launched(processes, script, json.dumps(cases)))[0]


def run_on_xla(devices: int, cases: dict[str, dict[str, Any]], **variables: str) -> tuple[dict[str, Any], str]:
    """Train every case on this many virtual devices in one process; see xla_driver.py. Returns also its stderr."""
    script = str(Path(__file__).with_name("xla_driver.py"))
    devices_variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    return run([*python(), script, json.dumps(cases)], **devices_variables, **variables)


def run(command: list[str], **variables: str) -> tuple[dict[str, Any], str]:
    """Run a command; return the JSON object that it prints, and its stderr."""
    done = call(command, env=environment(**variables), timeout=1500)  # of all cases of a table
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")), done.stderr


def assert_same(
    got: dict[str, Any], reference: dict[str, Any], absolute: float = 1e-5, relative: float | None = None
) -> None:
    """Assert that the losses of two cases are alike, and their gradient norms, which may also be `relative` apart."""
    assert got["loss"] == pytest.approx(reference["loss"], abs=absolute)
    assert got["grad_norm"] == pytest.approx(reference["grad_norm"], abs=absolute, rel=relative)
    if got["evaluation"] is not None:
        assert got["evaluation"] == pytest.approx(reference["evaluation"], abs=absolute)
        assert got["untrained"] == {"loss": 0, "tokens": 0}  # of a held-out batch without a label


def assert_resumed(got: dict[str, Any]) -> None:
    """Assert that a case with a stop has the figures of the run without it, bit for bit."""
    assert {figure: got[figure] for figure in got["uninterrupted"]} == got["uninterrupted"]
