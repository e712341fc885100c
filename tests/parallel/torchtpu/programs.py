"""Buffers and programs of the emulated TPU: NumPy, and XLA's CPU client by jaxlib.

Process k is device k. A program with collectives is one program over the CPU devices of all processes, which gloo
connects; any other program is local. Layouts are not modelled: every buffer is row-major.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# PJRT's element types -> as MLIR and as NumPy names them
ELEMENT_TYPES: dict[str, tuple[str, Any]] = {
    "PRED": ("i1", np.bool_),
    "S8": ("i8", np.int8),
    "S16": ("i16", np.int16),
    "S32": ("i32", np.int32),
    "S64": ("i64", np.int64),
    "U8": ("ui8", np.uint8),
    "U16": ("ui16", np.uint16),
    "U32": ("ui32", np.uint32),
    "U64": ("ui64", np.uint64),
    "F16": ("f16", np.float16),
    "F32": ("f32", np.float32),
    "F64": ("f64", np.float64),
    "BF16": ("bf16", ml_dtypes.bfloat16),
}
DTYPES = {name: np.dtype(dtype) for name, dtype in ELEMENT_TYPES.values()}  # by MLIR's name
COLLECTIVE = re.compile(r"stablehlo\.(all_|reduce_scatter|collective_|partition_id)")
LAYOUT = re.compile(r', mhlo\.layout_mode = "[^"]*"|mhlo\.layout_mode = "[^"]*"(, )?')
jax.config.update("jax_platforms", "cpu")  # otherwise jax, too, finds the emulated TPU
jax.config.update("jax_enable_x64", True)


@functools.cache
def connect() -> tuple[list[Any], Any]:
    """Return the CPU devices of all processes, and this process's. The processes meet in the first call."""
    if WORLD > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], WORLD, RANK)
    return jax.devices("cpu"), jax.local_devices(backend="cpu")[0]


class Buffer:
    """A tensor of the emulated device: a NumPy array until a program reads it, then jax's."""

    def __init__(self, array: Any) -> None:
        self.array, self.is_deleted = array, False
        self.dimensions = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)

    def on_cpu_device(self) -> Any:
        """Return the array as an argument of a program."""
        if isinstance(self.array, np.ndarray):
            self.array = jax.device_put(self.array, jax.sharding.SingleDeviceSharding(connect()[1]))
        return self.array


class Program:
    """A compiled program. `options` are the client's CompileOptionsProto, `code` is its StableHLO."""

    count = 0  # programs that this process compiled

    def __init__(self, code: bytes, options: bytes) -> None:
        Program.count += 1
        self.code, self.options = code, options
        given = xla_client.CompileOptions.ParseFromString(options).executable_build_options.device_assignment
        numbers = re.findall(r"Computation\d+\{(\d+)\}", str(given)) if given else range(WORLD)
        self.partitions = [int(number) for number in numbers]  # the device of each
        with mlir.make_ir_context():
            module = stablehlo.deserialize_portable_artifact(ir.Context.current, code)
            self.text, self.results = str(module), _result_types(module)
        self.has_collectives = WORLD > 1 and COLLECTIVE.search(self.text) is not None
        self._compile()

    def _compile(self) -> None:
        devices, local = connect()
        self.devices = [devices[number] for number in self.partitions] if self.has_collectives else [local]
        used, options = _jax.DeviceList(tuple(self.devices)), self._compile_options()
        with mlir.make_ir_context():
            compiled = ir.Module.parse(LAYOUT.sub("", self.text))
            self.executable = local.client.compile_and_load(compiled, used, options)

    def _compile_options(self) -> Any:
        options, count = xla_client.CompileOptions(), len(self.devices)
        build = options.executable_build_options
        options.num_replicas = build.num_replicas = 1
        options.num_partitions = build.num_partitions = count
        build.use_spmd_partitioning = count > 1
        build.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in self.devices]]))
        return options

    def assignment(self) -> bytes:
        """Return the devices of the partitions as a DeviceAssignmentProto."""
        return xla_client.DeviceAssignment.create(np.array([self.partitions])).serialize()

    def run(self, buffers: list[Buffer]) -> list[Buffer]:
        """Return the results; in a program with collectives, this process's."""
        arrays = [buffer.on_cpu_device() for buffer in buffers]
        if len(self.devices) > 1:
            arrays = [self._as_shard(array) for array in arrays]
        results = self.executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return [Buffer(result[0]) for result in results]

    def _as_shard(self, array: Any) -> Any:
        """Return the global array whose shard on this process is `array`, because jaxlib takes global arrays only."""
        mesh = jax.sharding.Mesh(np.array(self.devices), ("process",))
        spec = jax.sharding.PartitionSpec("process") if array.ndim else jax.sharding.PartitionSpec()
        shape = (array.shape[0] * WORLD, *array.shape[1:]) if array.ndim else ()
        return jax.make_array_from_single_device_arrays(shape, jax.sharding.NamedSharding(mesh, spec), [array])


def _result_types(module: Any) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    main = next(function for function in module.body.operations if function.name.value == "main")
    results = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results
    tensors = [ir.RankedTensorType(result) for result in results]
    return [(DTYPES[str(tensor.element_type)], tuple(tensor.shape)) for tensor in tensors]
