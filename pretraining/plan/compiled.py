"""The step of a plan as the real TPU compiler makes it, beside what the plan says of it. Needs no TPU.

Two processes, for torch-xla and libtpu each claim the devices of their own: the engine traces its step on placeholders
(parallel/xla_export.py), libtpu compiles it for the slice (plan/compiler.py). What they leave is read here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.training import TrainConfig

ROOT = Path(__file__).parents[2]


class Compiled(NamedTuple):
    """What the compiler says of one program; bytes of one device."""

    name: str
    times: int  # that it runs in a step
    arguments: int = 0
    updated: int = 0  # of the arguments, those whose place results take: what lives on from step to step
    results: int = 0
    temporaries: int = 0
    seconds: float = 0.0  # that compiling took
    refused: str = ""  # why it does not fit, in the compiler's words; nothing else is known then


class Truth(NamedTuple):
    """A step as it was compiled, on one device."""

    target: str
    traced_seconds: float
    programs: list[Compiled]
    sent: dict[str, int]  # kind of collective -> bytes that leave the device in a step
    flops: int  # of the matrix products of a step

    @property
    def refused(self) -> str:
        """The compiler's own words, where it did not fit."""
        return self.programs[-1].refused

    @property
    def held(self) -> int:
        """Bytes of parameters, optimizer state and sums of gradients."""
        return max(program.updated for program in self.programs)

    @property
    def rest(self) -> int:
        """Bytes that come and go within a step, at their most."""
        return max(p.arguments + p.results - p.updated + p.temporaries for p in self.programs) - self.held


def compile_step(config: TrainConfig, shard: int) -> Truth:
    """Trace and compile the step of `config`, whose mesh has so many `shard` ranks, for its plan_topology."""
    _refuse_without_packages()
    generation = config.plan_device_kind.removeprefix("tpu-")
    target = f"{generation}:{config.plan_topology}"
    traced = replace(config, engine="xla", device="auto", plan=False, sharding_group_size=0, use_dummy_dataset=True)
    if config.sharding_strategy == "hsdp":
        traced.sharding_group_size = shard
    with TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(config.plan_devices)}
        _run("pretraining.parallel.xla_export", name, given=json.dumps(asdict(traced)), variables=devices)
        seconds = time.perf_counter() - began
        _run("pretraining.plan.compiler", name, target)
        programs = [Compiled(**one) for one in json.loads((folder / "compiled.json").read_text())]
        return _read(folder, target, seconds, programs)


def _read(folder: Path, target: str, seconds: float, programs: list[Compiled]) -> Truth:
    from pretraining.plan.program import collectives, product_flops, totals

    sent: Counter[str] = Counter()
    flops = 0
    for program in programs if not programs[-1].refused else []:
        text = (folder / f"{program.name}.txt").read_text()
        flops += program.times * product_flops(text)
        sent.update({purpose: program.times * count for purpose, count in totals(collectives(text)).items()})
    return Truth(target, seconds, programs, dict(sent), flops)


def _refuse_without_packages() -> None:
    missing = [name for name in ("torch_xla", "jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        remedy = f"needs {', '.join(missing)}: pip install -r requirements.txt -r requirements-tpu-aot.txt"
        raise ConfigError([Problem("--plan_compile=True", remedy)])


def _run(module: str, *arguments: str, given: str = "", variables: dict[str, str] | None = None) -> None:
    """Run a module of ours to its end. UserError with its last line where it fails."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, input=given, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"--plan_compile=True: {module} failed: {last}")
