"""A TPU's compiler without a TPU: libtpu compiles programs ahead of time for a slice that is only named.

    python -m pretraining.plan.compiler FOLDER v6e:4x4

reads what pretraining.parallel.xla_export wrote to FOLDER and leaves FOLDER/<program>.txt, the compiled program, and
FOLDER/compiled.json. In a process of its own: jax and libtpu claim the devices of the process they are in. The
versions of requirements-tpu-aot.txt alone: later ones of libtpu do not give the text.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# No look for a TPU, none for a cloud's metadata, and no lock, for nothing here uses a device.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jaxlib.mlir.ir
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jax.experimental import topologies

from pretraining.plan.compiled import Compiled

ir: Any = jaxlib.mlir.ir  # its stubs lack half of what it has


class Slice(NamedTuple):
    """The devices that are compiled for."""

    devices: tuple[Any, ...]

    @property
    def options(self) -> Any:
        """Of one program over all devices, its arguments and results sharded as its annotations have it."""
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = 1, len(self.devices)
        build = options.executable_build_options
        build.num_replicas, build.num_partitions, build.use_spmd_partitioning = 1, len(self.devices), True
        build.allow_spmd_sharding_propagation_to_parameters = [True]
        build.allow_spmd_sharding_propagation_to_output = [True]
        build.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in self.devices]]))
        return options


def main(folder: Path, topology: str) -> None:
    """Compile every program of `folder`; the first that is refused is the last."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **_chips(topology))
    devices = Slice(tuple(found.devices))
    results: list[Compiled] = []
    for program in json.loads((folder / "programs.json").read_text()):
        results.append(_compiled(folder, program, devices))
        if results[-1].refused:
            break
    (folder / "compiled.json").write_text(json.dumps([result._asdict() for result in results]))


def _chips(topology: str) -> dict[str, Any]:
    """What libtpu has to be told of a slice: that a host has 2 x 2 chips or fewer, and of a v4 that a chip is one
    device, as torch-xla and jax count them, and not its two cores."""
    generation, _, axes = topology.partition(":")
    rows, columns = map(int, axes.split("x")[:2])
    told = {"chips_per_host_bounds": (math.gcd(2, rows), math.gcd(2, columns), 1)}
    return {**told, "chip_config_name": "megacore"} if generation == "v4" else told


def _compiled(folder: Path, program: dict[str, Any], devices: Slice) -> Compiled:
    module = _module((folder / f"{program['name']}.pb").read_bytes(), program["aliases"])
    began = time.perf_counter()
    try:
        executable = devices.devices[0].client.compile(module, _jax.DeviceList(devices.devices), devices.options)
    except _jax.XlaRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(program["name"], program["times"], refused=_reason(str(error)))
    seconds = time.perf_counter() - began
    (folder / f"{program['name']}.txt").write_text(executable.hlo_modules()[0].to_string())
    memory = executable.get_compiled_memory_stats()
    return Compiled(
        program["name"],
        program["times"],
        arguments=memory.argument_size_in_bytes,
        updated=memory.alias_size_in_bytes,
        results=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        seconds=seconds,
    )


def _module(proto: bytes, aliases: list[tuple[int, int]]) -> bytes:
    """The program in the compiler's language, with the results named that take an argument's place."""
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(proto))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        program = next(one for one in module.body.operations if one.name.value == "main")
        given = [{a.name: a.attr for a in ir.DictAttr(entry)} for entry in program.attributes["arg_attrs"]]
        for argument, result in aliases:
            given[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
        program.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in given])
        written = io.BytesIO()
        module.operation.write_bytecode(written)
    return written.getvalue()


def _reason(error: str) -> str:
    """What the compiler says of memory, in a line."""
    lines = [line.strip() for line in error.splitlines() if "hbm" in line]
    return lines[0] if lines else error.splitlines()[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
