"""The step of a plan as the TPU's own compiler makes it. Needs no TPU.

Runs two processes, because torch-xla and libtpu each claim the devices of their process: the engine traces its step on
placeholders (plan/export.py), libtpu compiles it for the slice (plan/compiler.py). Their files are read here.
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
from pretraining.monitor.progress import heartbeat
from pretraining.tools.plan.hbm import hbm_bytes
from pretraining.tools.plan.program import estimated_cycles, kernel_flops, product_flops, program_collectives
from pretraining.tools.plan.settings import PlanConfig

ROOT = Path(__file__).parents[3]


class CompiledProgram(NamedTuple):
    """The compiler's figures of one program; bytes of one device."""

    name: str
    times: int  # that it runs in a step
    arguments: int = 0
    updated: int = 0  # of the arguments, those that results overwrite: the state that lives from step to step
    results: int = 0
    temporaries: int = 0
    peak: int = 0  # of all memory at any time, as the compiler counts it
    seconds: float = 0.0  # of compilation
    refused: str = ""  # the compiler's reason where the program does not fit; nothing else is known then


class CompiledStep(NamedTuple):
    """The programs of a step on one device."""

    target: str
    traced_seconds: float
    programs: list[CompiledProgram]
    sent: dict[str, int]  # operation -> bytes that leave the device in a step
    sent_by_dtype: dict[str, int]  # the same by operation and dtype
    overlapped: int  # of those bytes, the ones of collectives that run while products do
    hbm: int  # bytes that are read from and written to HBM in a step
    flops: int  # of the matrix products of a step
    kernel_flops: int  # of those inside attention kernels
    cycles: int  # of a step, as the compiler expects; without those of attention kernels, which it does not know

    @property
    def refused(self) -> str:
        """The compiler's reason where the step does not fit, otherwise empty."""
        return self.programs[-1].refused

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, optimizer state and accumulated gradients."""
        return max(program.updated for program in self.programs)

    @property
    def transient_bytes(self) -> int:
        """Peak bytes of what lives within a step."""
        return max(p.arguments + p.results - p.updated + p.temporaries for p in self.programs) - self.state_bytes


def compile_step(config: PlanConfig, shard: int) -> CompiledStep:
    """Trace and compile the step of `config` for its plan_topology, on a mesh with so many `shard` ranks."""
    _refuse_without_packages()
    target = compiler_target(config)
    group = shard if config.sharding_strategy == "hsdp" else 0
    traced = replace(config, engine="xla", device="auto", plan=False, sharding_group_size=group, use_dummy_dataset=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(config.plan_devices)}
        with heartbeat("tracing the step"):
            _run("pretraining.tools.plan.export", name, stdin=json.dumps(asdict(traced)), variables=devices)
        seconds = time.perf_counter() - began
        with heartbeat(f"compiling the step for {target}"):
            _run("pretraining.tools.plan.compiler", name, target)
        programs = [CompiledProgram(**fields) for fields in json.loads((folder / "compiled.json").read_text())]
        return read_step(folder, target, seconds, programs, visible_share(config))


def compiler_target(config: PlanConfig) -> str:
    """Return the slice of `config` as libtpu names it, such as v6e:4x4."""
    return f"{config.plan_device_kind.removeprefix('tpu-')}:{config.plan_topology}"


def visible_share(config: PlanConfig) -> float:
    """Return the share of all pairs of a query and a key that causality and the sliding window leave."""
    length = config.seq_length
    window = min(config.sliding_window or length, length)
    return (window * length - window * (window - 1) / 2) / length**2


def read_step(
    folder: Path, target: str, traced_seconds: float, programs: list[CompiledProgram], visible: float
) -> CompiledStep:
    """Return the figures of a step from its programs and their texts in `folder`. visible: as visible_share returns."""
    sent: Counter[str] = Counter()
    by_dtype: Counter[str] = Counter()
    flops = in_kernels = cycles = overlapped = hbm = 0
    for program in programs if not programs[-1].refused else []:
        text = (folder / f"{program.name}.txt").read_text()
        flops += program.times * product_flops(text)
        in_kernels += program.times * kernel_flops(text, visible)
        cycles += program.times * estimated_cycles(text)
        hbm += program.times * hbm_bytes(text)
        for collective in program_collectives(text):
            count = program.times * collective.bytes
            sent[collective.purpose] += count
            by_dtype[f"{collective.purpose} {collective.dtype}"] += count
            overlapped += count * collective.overlaps
    flops += in_kernels
    return CompiledStep(
        target, traced_seconds, programs, dict(sent), dict(by_dtype), overlapped, hbm, flops, in_kernels, cycles
    )


def _refuse_without_packages() -> None:
    missing = [name for name in ("torch_xla", "jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        remedy = f"needs {', '.join(missing)}: pip install -r requirements.txt -r requirements/tpu-aot.txt"
        raise ConfigError([Problem("--plan_compile=True", remedy)])


def _run(module: str, *arguments: str, stdin: str = "", variables: dict[str, str] | None = None) -> None:
    """Run a module as a process. Raises UserError with its last line if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, input=stdin, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"--plan_compile=True: {module} failed: {last}")
