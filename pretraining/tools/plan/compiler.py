"""Compile programs ahead of time for a TPU slice that is only named, with libtpu.

    python -m pretraining.tools.plan.compiler FOLDER v6e:4x4

reads what pretraining.tools.plan.export wrote to FOLDER, and writes FOLDER/<program>.txt, the compiled program, and
FOLDER/compiled.json. Runs in a process of its own: jax and libtpu claim the devices of their process. Works with the
versions of requirements/tpu-aot.txt: later ones of libtpu do not return the text.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

# Nothing here uses a device: no search for a TPU or for a cloud's metadata, and no lock.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jaxlib.mlir.ir
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jax.experimental import topologies

from pretraining.tools.plan.compiled import CompiledProgram

ir: Any = jaxlib.mlir.ir  # its stubs are incomplete


def main(folder: Path, topology: str) -> None:
    """Compile every program of `folder`, up to the first that does not fit."""
    devices = slice_devices(topology)
    programs: list[CompiledProgram] = []
    for program in json.loads((folder / "programs.json").read_text()):
        programs.append(_compile(folder, program, devices))
        if programs[-1].refused:
            break
    (folder / "compiled.json").write_text(json.dumps([program._asdict() for program in programs]))


def slice_devices(topology: str) -> tuple[Any, ...]:
    """Return the devices of a slice, such as v6e:4x4."""
    options = _chip_options(topology)
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)


def _chip_options(topology: str) -> dict[str, Any]:
    """Return libtpu's options of a slice: a host has at most 2 x 2 chips, and the two cores of a v4 are one device."""
    generation, _, axes = topology.partition(":")
    rows, columns = map(int, axes.split("x")[:2])
    bounds = {"chips_per_host_bounds": (math.gcd(2, rows), math.gcd(2, columns), 1)}
    return {**bounds, "chip_config_name": "megacore"} if generation == "v4" else bounds


def _compile_options(devices: tuple[Any, ...]) -> Any:
    """Return the options of one program over all devices, sharded as the annotations of the program say."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions, build.use_spmd_partitioning = 1, len(devices), True
    build.allow_spmd_sharding_propagation_to_parameters = [True]
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return options


def _compile(folder: Path, program: dict[str, Any], devices: tuple[Any, ...]) -> CompiledProgram:
    module = _module((folder / f"{program['name']}.pb").read_bytes(), program["aliases"])
    began = time.perf_counter()
    try:
        executable = devices[0].client.compile(module, _jax.DeviceList(devices), _compile_options(devices))
    except _jax.XlaRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return CompiledProgram(program["name"], program["times"], refused=_reason(str(error)))
    return record(folder, program["name"], program["times"], executable, time.perf_counter() - began)


def record(folder: Path, name: str, times: int, executable: Any, seconds: float) -> CompiledProgram:
    """Write a compiled program's text to `folder`, and return its figures. seconds: that it took to compile."""
    (folder / f"{name}.txt").write_text(executable.hlo_modules()[0].to_string())
    memory = executable.get_compiled_memory_stats()
    return CompiledProgram(
        name,
        times,
        arguments=memory.argument_size_in_bytes,
        updated=memory.alias_size_in_bytes,
        results=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        seconds=seconds,
    )


def _module(proto: bytes, aliases: list[tuple[int, int]]) -> bytes:
    """Return the program as MLIR bytecode, with the arguments marked that a result overwrites."""
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(proto))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        program = next(operation for operation in module.body.operations if operation.name.value == "main")
        arguments = [{a.name: a.attr for a in ir.DictAttr(entry)} for entry in program.attributes["arg_attrs"]]
        for argument, result in aliases:
            arguments[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
        program.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in arguments])
        bytecode = io.BytesIO()
        module.operation.write_bytecode(bytecode)
    return bytecode.getvalue()


def _reason(error: str) -> str:
    """Return the line of the compiler's error that describes memory."""
    lines = [line.strip() for line in error.splitlines() if "hbm" in line]
    return lines[0] if lines else error.splitlines()[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
