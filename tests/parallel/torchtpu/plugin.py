"""A PJRT plugin in Python, which gives torch_tpu one TPU per process: see programs.py for what runs on it.

torch_tpu traces, lowers and calls as it does on a TPU, down to PJRT's C interface. Every function here fills the
structure of arguments and results that the client passes (the layouts are those of pypjrt). Everything is finished when
a function returns, so that events are always ready. What torch_tpu 0.2.0 does not call is not there, and fails by name.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pypjrt._abi import pjrt_0_114 as abi

from tests.parallel.torchtpu.programs import ELEMENT_TYPES, RANK, WORLD, Buffer, Program, connect

Function = Callable[[Any], None]
KIND = "TPU v5 lite"
NUMPY_TYPES = {getattr(abi, f"PJRT_Buffer_Type_{name}"): np.dtype(row[1]) for name, row in ELEMENT_TYPES.items()}
PJRT_TYPES = {dtype: number for number, dtype in NUMPY_TYPES.items()}
INTERNAL_ERROR, UNIMPLEMENTED = 13, 12  # PJRT_Error_Code

# ---- What the client holds as pointers

_objects: dict[int, tuple[Any, Any]] = {}  # address -> the object, and the memory at the address
_constants: list[Any] = []  # memory and functions that are never freed


def _handle(value: Any) -> int:
    """Return an address that stands for `value`. The client reads a pointer there, hence the zeros."""
    memory = ctypes.create_string_buffer(64)
    _objects[ctypes.addressof(memory)] = (value, memory)
    return ctypes.addressof(memory)


def _object(handle: int) -> Any:
    return _objects[handle][0]


def _keep(memory: Any) -> int:
    _constants.append(memory)
    return ctypes.addressof(memory)


def _bytes(value: bytes) -> int:
    return _keep(ctypes.create_string_buffer(value, len(value) + 1))


def _pointers(values: list[int]) -> int:
    return _keep((ctypes.c_void_p * len(values))(*values))


def _integers(values: list[int] | tuple[int, ...]) -> int:
    return _keep((ctypes.c_int64 * max(1, len(values)))(*values))


def _attributes(values: dict[str, int | list[int]]) -> dict[str, int]:
    """Return the fields of a list of attributes."""
    rows = (abi.PJRT_NamedValue * len(values))()
    for row, (name, value) in zip(rows, values.items(), strict=True):
        row.struct_size, row.name, row.name_size = ctypes.sizeof(row), _bytes(name.encode()), len(name)
        if isinstance(value, int):
            row.type, row.int64_value, row.value_size = abi.PJRT_NamedValue_kInt64, value, 1
        else:
            row.type, row.value_size = abi.PJRT_NamedValue_kInt64List, len(value)
            row.int64_array_value = _integers(value)
    return {"attributes": _keep(rows), "num_attributes": len(values)}


CLIENT, TOPOLOGY, EVENT, MEMORY = (_handle(name) for name in ("client", "topology", "event", "memory"))
DEVICES = [_handle(number) for number in range(WORLD)]
OF_DEVICE = [  # chips of a slice that is two wide
    _attributes({"coords": [number % 2, number // 2, 0], "core_on_chip": 0, "slice_index": 0, "num_cores": 1})
    for number in range(WORLD)
]
MEMORY_KIND = _bytes(b"device")
LOCAL_DEVICE, MEMORIES = _pointers([DEVICES[RANK]]), _pointers([MEMORY])
_do_nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
NO_DELETER = ctypes.cast(_do_nothing, ctypes.c_void_p).value

# ---- Functions


def _sets(**fields: int | None) -> Function:
    """Return a function that sets these fields."""

    def fill(args: Any) -> None:
        for name, value in fields.items():
            setattr(args, name, value)

    return fill


def _text(field: str, value: str) -> Function:
    return _sets(**{field: _bytes(value.encode()), f"{field}_size": len(value)})


def _frees(field: str) -> Function:
    def free(args: Any) -> None:
        _objects.pop(getattr(args, field), None)

    return free


def _error_message(args: Any) -> None:
    message = _object(args.error)
    args.message, args.message_size = _bytes(message), len(message)


def _event_on_ready(args: Any) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(args.callback)(None, args.user_arg)


def _description_id(args: Any) -> None:
    args.id = _object(args.device_description)


def _description_process(args: Any) -> None:
    args.process_index = _object(args.device_description)


def _description(args: Any) -> None:
    args.device_description = args.device


def _description_attributes(args: Any) -> None:
    _sets(**OF_DEVICE[_object(args.device_description)])(args)


def _device_attributes(args: Any) -> None:
    _sets(**OF_DEVICE[_object(args.device)])(args)
    args.device_attributes, args.attributes_deleter = CLIENT, NO_DELETER


def _compile(args: Any) -> None:
    program = abi.PJRT_Program.from_address(args.program)
    code = ctypes.string_at(program.code, program.code_size)
    args.executable = _handle(Program(code, ctypes.string_at(args.compile_options, args.compile_options_size)))


def _serialize(args: Any) -> None:
    """Give what `_load` compiles again in another process."""
    program = _object(args.executable)
    data = len(program.options).to_bytes(8, "little") + program.options + program.code
    args.serialized_bytes, args.serialized_bytes_size = _bytes(data), len(data)
    args.serialized_executable, args.serialized_executable_deleter = CLIENT, NO_DELETER


def _load(args: Any) -> None:
    data = ctypes.string_at(args.serialized_executable, args.serialized_executable_size)
    code_at = 8 + int.from_bytes(data[:8], "little")
    args.loaded_executable = _handle(Program(data[code_at:], data[8:code_at]))


def _get_executable(args: Any) -> None:
    args.executable = _handle(_object(args.loaded_executable))


def _logical_ids(args: Any) -> None:
    partition = _object(args.executable).partitions.index(RANK)
    ids = (abi.PJRT_LogicalDeviceIds * 1)(abi.PJRT_LogicalDeviceIds(0, partition))
    args.addressable_device_logical_ids, args.num_addressable_device_logical_ids = _keep(ids), 1


def _device_assignment(args: Any) -> None:
    serialized = _object(args.executable).assignment()
    args.serialized_bytes, args.serialized_bytes_size = _bytes(serialized), len(serialized)
    args.serialized_device_assignment, args.serialized_device_assignment_deleter = CLIENT, NO_DELETER


def _output_count(args: Any) -> None:
    args.num_outputs = len(_object(args.executable).results)


def _output_types(args: Any) -> None:
    types = [PJRT_TYPES[dtype] for dtype, _ in _object(args.executable).results]
    args.output_types, args.num_output_types = _keep((ctypes.c_uint32 * max(1, len(types)))(*types)), len(types)


def _output_dimensions(args: Any) -> None:
    shapes = [shape for _, shape in _object(args.executable).results]
    args.num_outputs = len(shapes)
    args.dims, args.dim_sizes = _integers([n for shape in shapes for n in shape]), _integers([*map(len, shapes)])


def _output_memories(args: Any) -> None:
    args.num_outputs = count = len(_object(args.executable).results)
    args.memory_kinds, args.memory_kind_sizes = _pointers([MEMORY_KIND] * count), _integers([len("device")] * count)


def _optimized_program(args: Any) -> None:
    """Give what was compiled: the client reads the shapes of the results in it. The first call asks for the size."""
    program, code = abi.PJRT_Program.from_address(args.program), _object(args.executable).text.encode()
    program.code_size = len(code)
    program.format, program.format_size = MLIR, len("mlir")
    if program.code:
        ctypes.memmove(program.code, code, len(code))


MLIR = _bytes(b"mlir")


def _execute(args: Any) -> None:
    """Run a program; the lists have an entry for each of this process's devices, which is one."""
    arguments = ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)).from_buffer(ctypes.c_void_p(args.argument_lists))[0]
    outputs = ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)).from_buffer(ctypes.c_void_p(args.output_lists))[0]
    results = _object(args.executable).run([_object(arguments[index]) for index in range(args.num_args)])
    for index, result in enumerate(results):
        outputs[index] = _handle(result)
    if args.device_complete_events:
        ctypes.c_void_p.from_address(args.device_complete_events).value = EVENT


def _buffer_from_host(args: Any) -> None:
    dtype, count = NUMPY_TYPES[args.type], args.num_dims
    shape = tuple((ctypes.c_int64 * count).from_address(args.dims)) if count else ()
    array = np.empty(shape, dtype)
    if args.num_byte_strides and array.size:
        strides = tuple((ctypes.c_int64 * count).from_address(args.byte_strides))
        size = dtype.itemsize + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        array = np.ndarray(shape, dtype, ctypes.string_at(args.data, size), 0, strides).copy()
    elif array.size:
        ctypes.memmove(array.ctypes.data, args.data, array.nbytes)
    args.buffer, args.done_with_host_buffer = _handle(Buffer(array)), EVENT


def _buffer_to_host(args: Any) -> None:
    """Copy to `dst`; without one, say its size."""
    array = np.ascontiguousarray(_object(args.src).array)
    if args.dst:
        ctypes.memmove(args.dst, array.ctypes.data, array.nbytes)
    args.dst_size, args.event = array.nbytes, EVENT


def _buffer_delete(args: Any) -> None:
    _object(args.buffer).is_deleted = True


def _buffer_is_deleted(args: Any) -> None:
    args.is_deleted = _object(args.buffer).is_deleted


def _buffer_type(args: Any) -> None:
    args.type = PJRT_TYPES[np.dtype(_object(args.buffer).array.dtype)]


def _buffer_dimensions(args: Any) -> None:
    buffer = _object(args.buffer)
    args.dims, args.num_dims = ctypes.addressof(buffer.dimensions), buffer.array.ndim


NOTHING_TO_DO = ("Event_Destroy", "Event_Error", "Event_Await", "Plugin_Initialize", "Client_Destroy")
FUNCTIONS: dict[str, Function] = {
    **dict.fromkeys((*NOTHING_TO_DO, "Error_ForEachPayload"), _sets()),
    "Error_Destroy": _frees("error"),
    "Error_Message": _error_message,
    "Error_GetCode": _sets(code=INTERNAL_ERROR),
    "Event_IsReady": _sets(is_ready=True),
    "Event_OnReady": _event_on_ready,
    "Plugin_Attributes": _sets(
        **_attributes(
            {"xla_version": 2, "stablehlo_current_version": [1, 13, 0], "stablehlo_minimum_version": [0, 9, 0]}
        )
    ),
    "Client_Create": _sets(client=CLIENT),
    "Client_PlatformName": _text("platform_name", "tpu"),
    "Client_PlatformVersion": _text("platform_version", "emulated"),
    "Client_ProcessIndex": _sets(process_index=RANK),
    "Client_Devices": _sets(devices=_pointers(DEVICES), num_devices=WORLD),
    "Client_AddressableDevices": _sets(addressable_devices=LOCAL_DEVICE, num_addressable_devices=1),
    "Client_AddressableMemories": _sets(addressable_memories=MEMORIES, num_addressable_memories=1),
    "Client_TopologyDescription": _sets(topology=TOPOLOGY),
    "TopologyDescription_PlatformName": _text("platform_name", "tpu"),
    "TopologyDescription_PlatformVersion": _text("platform_version", "emulated"),
    "TopologyDescription_Attributes": _sets(**_attributes({})),
    "Device_GetDescription": _description,
    "Device_GetAttributes": _device_attributes,
    "Device_AddressableMemories": _sets(memories=MEMORIES, num_memories=1),
    "Device_DefaultMemory": _sets(memory=MEMORY),
    "DeviceDescription_Id": _description_id,
    "DeviceDescription_ProcessIndex": _description_process,
    "DeviceDescription_Attributes": _description_attributes,
    "DeviceDescription_Kind": _text("device_kind", KIND),
    "Memory_Kind": _sets(kind=MEMORY_KIND, kind_size=len("device")),
    "Memory_AddressableByDevices": _sets(devices=LOCAL_DEVICE, num_devices=1),
    "Client_Compile": _compile,
    "LoadedExecutable_GetExecutable": _get_executable,
    "LoadedExecutable_AddressableDevices": _sets(addressable_devices=LOCAL_DEVICE, num_addressable_devices=1),
    "LoadedExecutable_AddressableDeviceLogicalIds": _logical_ids,
    "LoadedExecutable_GetDeviceAssignment": _device_assignment,
    "LoadedExecutable_Execute": _execute,
    "LoadedExecutable_Destroy": _frees("executable"),
    "Executable_Serialize": _serialize,
    "Executable_DeserializeAndLoad": _load,
    "Executable_Destroy": _frees("executable"),
    "Executable_NumOutputs": _output_count,
    "Executable_OutputElementTypes": _output_types,
    "Executable_OutputDimensions": _output_dimensions,
    "Executable_OutputMemoryKinds": _output_memories,
    "Executable_OptimizedProgram": _optimized_program,
    "Client_BufferFromHostBuffer": _buffer_from_host,
    "Buffer_ToHostBuffer": _buffer_to_host,
    "Buffer_Destroy": _frees("buffer"),
    "Buffer_Delete": _buffer_delete,
    "Buffer_IsDeleted": _buffer_is_deleted,
    "Buffer_ElementType": _buffer_type,
    "Buffer_Dimensions": _buffer_dimensions,
    "Buffer_DynamicDimensionIndices": _sets(dynamic_dim_indices=None, num_dynamic_dims=0),
    "Buffer_Memory": _sets(memory=MEMORY),
    "Buffer_ReadyEvent": _sets(event=EVENT),
}

# ---- The table of functions


def _exported(name: str) -> int:
    """Return the address of a C function: a null pointer is success, otherwise the result is an error."""
    function, structure = FUNCTIONS.get(name.removeprefix("PJRT_")), getattr(abi, f"{name}_Args", None)

    def call(args: int) -> int | None:
        try:
            if function is None or structure is None:
                raise NotImplementedError("the emulated TPU has no such function")
            function(structure.from_address(args))
            return None
        except Exception as error:
            return _handle(f"{name}: {type(error).__name__}: {error}".encode())

    exported = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(call)
    _constants.append(exported)
    return ctypes.cast(exported, ctypes.c_void_p).value or 0


def _function_table() -> int:
    """Return the address of a PJRT_Api: its size, extensions (none), version, and functions."""
    first = abi.VTABLE_OFFSET // 8
    table = (ctypes.c_uint64 * (first + len(abi.SLOT)))()
    table[0] = ctypes.sizeof(table)
    version = abi.PJRT_Api_Version.from_address(ctypes.addressof(table) + 16)
    version.struct_size = ctypes.sizeof(version)
    version.major_version, version.minor_version = abi.PJRT_API_MAJOR, abi.PJRT_API_MINOR
    for name, slot in abi.SLOT.items():
        table[first + slot] = _exported(name)
    return _keep(table)


def start(folder: Path) -> None:
    """Import torch with the device "tpu"; the shim is compiled in `folder`. Before anything else imports torch."""
    shim = folder / f"shim_{RANK}.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source)], check=True)
    os.environ |= {
        "EMULATED_PJRT_API": hex(_function_table()),
        "TPU_LIBRARY_PATH": str(shim),
        "TPU_SKIP_MDS_QUERY": "1",  # otherwise minutes pass with questions to a cloud
    }
    # torch_tpu's threads call the functions above; a collection there would free tensors, which calls torch_tpu.
    gc.disable()
    connect()
    import torch_tpu._loader
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hardware.get_tpu_device_name = lambda: "TPU v5e"
    torch_tpu._loader._init_device("tpu")
