"""Filling the ctypes arguments that a vendor's binding passes to its library."""

import ctypes
from typing import Any

INSUFFICIENT_SIZE = 7
"""NVML's answer to a buffer that is too small."""


def behind(argument: Any) -> Any:
    """The ctypes object that an argument stands for: `byref(x)` -> x, an array or a struct is itself."""
    return getattr(argument, "_obj", argument)


def plain(argument: Any) -> Any:
    return argument.value if isinstance(argument, ctypes._SimpleCData) else argument


def put(argument: Any, value: int) -> None:
    behind(argument).value = value


def fill(argument: Any, **fields: Any) -> None:
    struct = behind(argument)
    for name, value in fields.items():
        setattr(struct, name, value)


def write_text(buffer: Any, size: Any, value: bytes) -> int:
    if len(value) + 1 > plain(size):
        return INSUFFICIENT_SIZE
    buffer.value = value
    return 0


def point(argument: Any, value: int) -> None:
    """Writes an opaque handle."""
    ctypes.c_void_p.from_buffer(behind(argument)).value = value


def address(handle: Any) -> int | None:
    return ctypes.c_void_p.from_buffer(handle).value
