"""Asking NVML for one value at a time: what a call may raise, what that means, and what need not be asked again."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pynvml

from workers.gpus.base import DriverUnavailable

T = TypeVar("T")

TROUBLE = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, UnicodeDecodeError, TypeError, ValueError,
           ctypes.ArgumentError)
"""What a call of the binding may raise: the mismatch is no NVMLError, and the last four are faults of the binding."""

NOT_SUPPORTED, LOST = "not_supported", "gpu_lost"
RESET_REQUIRED, UNKNOWN_ERROR = "reset_required", f"error:{pynvml.NVML_ERROR_UNKNOWN}"
INVALID = f"error:{pynvml.NVML_ERROR_INVALID_ARGUMENT}"
REASONS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_GPU_IS_LOST: LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: RESET_REQUIRED,
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
}

ADVICE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        "There is no NVIDIA driver library (libnvidia-ml.so.1) on this machine: it takes part without GPUs; "
        "if it has some, install the NVIDIA driver.",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        "The NVIDIA kernel module is not loaded: run `modprobe nvidia` or reboot the machine.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        "The NVIDIA driver was upgraded under the running kernel module (driver and library versions differ): "
        "reboot the machine or reload the module.",
    pynvml.NVML_ERROR_NO_PERMISSION:
        "This account may not use the NVIDIA driver: give it access to /dev/nvidia*.",
    pynvml.NVML_ERROR_UNKNOWN:
        "NVML answers 'unknown error': in a container the device rules were lost, restart the container; "
        "elsewhere reboot the machine.",
}


@dataclass(slots=True)
class Probe:
    """Asks for one value after the other and keeps the reason for each that is missing.

    `refused` counts by name how many of the calls the driver does not know; kept between two readings, it spares them.
    """

    missing: dict[str, str] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, *calls: Callable[[], T | None]) -> T | None:
        """The first of `calls` that the driver knows decides; the later ones are for older drivers."""
        reason = NOT_SUPPORTED
        for place in range(self.refused.get(name, 0), len(calls)):
            try:
                value = calls[place]()
            except TROUBLE as error:
                reason = reason_of(error)
                if reason != NOT_SUPPORTED:
                    break
                if self.refused.get(name, 0) == place:
                    self.refused[name] = place + 1
            else:
                if value is not None:
                    return value
        self.missing[name] = reason
        return None


FieldKey = tuple[int, int]
"""A field and its scope: the number of an NVLink, or ALL_LINKS."""

ALL_LINKS = 0xFFFFFFFF


class FieldValue(NamedTuple):
    value: float | None
    at_us: int = 0  # by the driver's clock; 0 if it does not say
    reason: str = ""


class Fields:
    """Many values of one GPU in one call. Those that it does not have are asked for once."""

    def __init__(self, wanted: Sequence[FieldKey]) -> None:
        self._wanted = list(wanted)
        self._absent: dict[FieldKey, FieldValue] = {}

    def read(self, handle: Any) -> dict[FieldKey, FieldValue]:
        if not self._wanted:
            return dict(self._absent)
        try:
            found = ask_fields(handle, self._wanted)
        except TROUBLE as error:
            if reason_of(error) != INVALID or len(self._wanted) == 1:
                return self._without(reason_of(error))
            found = {key: ask_alone(handle, key) for key in self._wanted}
        for key, one in found.items():
            if one.reason == NOT_SUPPORTED:
                self._absent[key] = one
                self._wanted.remove(key)
        return found | self._absent

    def _without(self, reason: str) -> dict[FieldKey, FieldValue]:
        missing = {key: FieldValue(None, reason=reason) for key in self._wanted}
        if reason == NOT_SUPPORTED:
            self._absent |= missing
            self._wanted = []
        return missing | self._absent


def ask_fields(handle: Any, keys: list[FieldKey]) -> dict[FieldKey, FieldValue]:
    return dict(zip(keys, field_values(pynvml.nvmlDeviceGetFieldValues(handle, keys)), strict=True))


def ask_alone(handle: Any, key: FieldKey) -> FieldValue:
    """Some drivers refuse a whole call for one field that is new to them."""
    try:
        return ask_fields(handle, [key])[key]
    except TROUBLE as error:
        reason = reason_of(error)
        return FieldValue(None, reason=NOT_SUPPORTED if reason == INVALID else reason)


RECORD = struct.Struct("@IIqqII8s")  # field, scope, timestamp, latency, type, code, value
FORMATS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: struct.Struct("@d"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: struct.Struct("@I"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: struct.Struct("@L"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: struct.Struct("@Q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: struct.Struct("@q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: struct.Struct("@i"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: struct.Struct("@H"),
}


def field_values(raw: Any) -> list[FieldValue]:
    """The structs of the binding look every member up in Python: for a dozen of each GPU in each second, too slow."""
    return [field_value(code, kind, value, at_us)
            for _, _, at_us, _, kind, code, value in RECORD.iter_unpack(bytes(raw))]


def field_value(code: int, kind: int, value: bytes, at_us: int) -> FieldValue:
    if code != pynvml.NVML_SUCCESS:
        # A field that this driver has never heard of is an invalid argument.
        known = code != pynvml.NVML_ERROR_INVALID_ARGUMENT
        return FieldValue(None, reason=reason_of_code(code) if known else NOT_SUPPORTED)
    if kind not in FORMATS:
        return FieldValue(None, reason="nonsense")
    return FieldValue(FORMATS[kind].unpack_from(value)[0], at_us)


def text(function: Callable[..., Any], *arguments: Any) -> str:
    """Past the binding's strict decoding: one odd byte in a name must not cost the GPU."""
    raw = getattr(function, "__wrapped__", function)(*arguments)
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


def reason_of(error: Exception) -> str:
    if isinstance(error, pynvml.NVMLLibraryMismatchError):
        return NOT_SUPPORTED
    if isinstance(error, pynvml.NVMLError):
        return reason_of_code(error.value)
    return f"error:{type(error).__name__}"


def reason_of_code(code: int) -> str:
    return REASONS.get(code, f"error:{code}")


def unavailable(error: Exception) -> DriverUnavailable:
    code = error.value if isinstance(error, pynvml.NVMLError) else None
    return DriverUnavailable(ADVICE.get(code, f"The NVIDIA driver refuses to work ({error}): look at `dmesg`."))


def memory_calls(handle: Any) -> tuple[Callable[[], Any], ...]:
    """The first version counts the driver's own reserve as used; only old drivers need it."""
    return (lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
            lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
