"""Filling the ctypes arguments that a vendor's binding passes to its library."""

import ctypes
from typing import Any

INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 2, 3, 6, 7
IN_USE, INSUFFICIENT_RESOURCES, VERSION_MISMATCH = 19, 23, 25
"""Answers of NVML."""


class Refusal(Exception):
    """A call that is answered with a code other than success."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


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


def point_member(struct: Any, name: str, value: int) -> None:
    """Writes an opaque handle into a member of a struct."""
    ctypes.c_void_p.from_buffer(struct, getattr(type(struct), name).offset).value = value


def point_at(array: Any, place: int, value: int) -> None:
    """Writes an opaque handle into an array of them."""
    ctypes.c_void_p.from_buffer(behind(array), place * ctypes.sizeof(ctypes.c_void_p)).value = value


def address(handle: Any) -> int | None:
    return ctypes.c_void_p.from_buffer(handle).value


def list_out(count: Any, out: Any, found: int) -> bool:
    """The sizing call of a list: writes how many there are, and says whether they have room. Refuses when not."""
    room = plain(behind(count))
    behind(count).value = found
    if found and out is None:
        return False
    if room < found:
        raise Refusal(INSUFFICIENT_SIZE)
    return True
