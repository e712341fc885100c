"""Measure the step of the torch engine on TPUs, which torch_tpu lowers, by the TPU's own compiler.

    .venv-torchtpu/bin/python -m benchmarks.torchtpu_compiler [--seq_length=8192] [--num_layers=2]
        [--plan_device_kind=tpu-v5e --plan_topology=8x8]

Nothing runs: the case, the columns and other flags are those of benchmarks/tpu_compiler.py. torch_tpu runs a step as
many programs: benchmarks/torchtpu_trace.py lowers them, and libtpu compiles each that differs. Bytes and operations are
summed over the programs that a step runs. Peak is the largest sum of what exists before a program and what it adds;
temporaries are the peak without what exists between steps. Programs of one chip run one after another, so that with
--one_program=never no collective overlaps with products.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# As pretraining/tools/plan/compiler.py
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jaxlib.mlir.ir
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client

from benchmarks.tpu_compiler import CASE, figures_of, print_figures, settings_of
from main_training import configure
from pretraining.tools.plan.checks import topology_devices
from pretraining.tools.plan.compiled import CompiledProgram, compiler_target, read_step, visible_share
from pretraining.tools.plan.compiler import record, slice_devices
from pretraining.tools.plan.plan import plan_of
from pretraining.tools.plan.settings import PlanConfig

ir: Any = jaxlib.mlir.ir  # its stubs are incomplete


def variables(config: PlanConfig) -> dict[str, str]:
    """Return the environment of process 0 of the slice's, as TorchTPU's launcher sets it."""
    axes, chips = config.plan_topology.split("x"), topology_devices(config)
    return {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(chips), "LOCAL_WORLD_SIZE": str(chips)},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},  # nobody listens there
        "TORCH_TPU_TOPOLOGY": ",".join((*axes, "1")[:3]),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"localhost:{8476 + index}" for index in range(chips)),
    }


def trace(folder: Path, config: PlanConfig) -> dict[str, Any]:
    """Lower the step to `folder`, and return what torchtpu_trace.py wrote about its runs."""
    traced = replace(config, device="tpu", plan=False, use_dummy_dataset=True, low_cpu_fsdp=True)
    command = [sys.executable, "-m", "benchmarks.torchtpu_trace", str(folder), json.dumps(asdict(traced))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **variables(config)})
    return json.loads((folder / "runs.json").read_text())


def compile_program(folder: Path, name: str, times: int, devices: tuple[Any, ...]) -> CompiledProgram:
    """Compile one program: of all devices if it has collectives, otherwise of one."""
    text = (folder / f"{name}.mlir").read_text()
    options = xla_client.CompileOptions.ParseFromString((folder / f"{name}.options").read_bytes())
    build = options.executable_build_options
    used = devices if "replica_groups" in text else devices[:1]
    options.num_replicas = build.num_replicas = 1
    options.num_partitions = build.num_partitions = len(used)
    build.use_spmd_partitioning = len(used) > 1
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in used]]))
    began = time.perf_counter()
    with mlir.make_ir_context():
        executable = used[0].client.compile(ir.Module.parse(text), _jax.DeviceList(used), options)
    return record(folder, name, times, executable, time.perf_counter() - began)


def compile_all(folder: Path, runs: list[tuple[str, int]], target: str) -> list[CompiledProgram]:
    """Compile every program of a step once for the slice `target`."""
    devices, counts = slice_devices(target), Counter(name for name, _ in runs)
    return [compile_program(folder, name, times, devices) for name, times in counts.items()]


def peak_of(runs: list[tuple[str, int]], programs: list[CompiledProgram]) -> int:
    """Return the largest number of bytes that exist while a program runs."""
    added = {program.name: program.results - program.updated + program.temporaries for program in programs}
    return max(live + added[name] for name, live in runs)


def main() -> None:
    """Lower, compile and print; see the module's docstring."""
    options = settings_of(__doc__)
    config = configure({**CASE, "engine": "torch", "plan_compile": False, **options})
    plan = plan_of(replace(config, plan_devices=topology_devices(config)))
    with TemporaryDirectory() as name:
        folder = Path(name)
        traced = trace(folder, config)
        target, began = compiler_target(config), time.process_time()
        programs = compile_all(folder, traced["runs"], target)
        seconds = time.process_time() - began
        step = read_step(folder, target, 0.0, programs, visible_share(config))
    peak = peak_of(traced["runs"], programs)
    figures = figures_of("TorchTPU", config.seq_length, step)
    print_figures([figures._replace(temporaries=peak - traced["state"], peak=peak)], plan, step)
    print(f"{len(traced['runs'])} runs of {len(programs)} programs; between steps {traced['state'] / 1e9:.2f} GB")
    print(f"compiled in {seconds:.0f} CPU s")


if __name__ == "__main__":
    main()
