"""As much of the flatbuffers format as the headers of Arrow's record batches need.

Source: https://flatbuffers.dev/internals and Arrow's `format/Message.fbs`, `format/File.fbs`. All integers are
little-endian. A damaged header raises ValueError (struct.error and IndexError are turned into it by the caller).
"""

from __future__ import annotations

import struct


def int32(raw: bytes, at: int) -> int:
    """The signed 32-bit integer at byte `at`."""
    if at < 0:
        raise ValueError("a header points before its beginning")
    return int(struct.unpack_from("<i", raw, at)[0])


def int64(raw: bytes, at: int) -> int:
    """The signed 64-bit integer at byte `at`."""
    if at < 0:
        raise ValueError("a header points before its beginning")
    return int(struct.unpack_from("<q", raw, at)[0])


def follow(raw: bytes, at: int) -> int:
    """Where the relative offset at byte `at` points to."""
    return at + int32(raw, at)


def field(raw: bytes, table: int, number: int) -> int | None:
    """Byte of field `number` of the table at byte `table`; None if the field has its default value."""
    vtable = table - int32(raw, table)
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", raw, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", raw, vtable + slot)[0]
    return table + offset if offset else None


def vector(raw: bytes, table: int, number: int) -> tuple[int, int]:
    """(byte of the first element, number of elements) of a vector field; (0, 0) if it is absent."""
    at = field(raw, table, number)
    if at is None:
        return 0, 0
    start = follow(raw, at)
    return start + 4, int32(raw, start)
