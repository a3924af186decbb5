"""AMD's own binding `amdsmi` as this node has it, what it may raise, and the values by which it says «unknown».

It has to fit the node's ROCm, so the one that ROCm brought along is preferred and none is a dependency of ours.
"""

import io
import math
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from workers.gpus.base import DriverUnavailable

T = TypeVar("T")

MODULE = "amdsmi"
LOST = "gpu_lost"
NOT_SUPPORTED = "not_supported"

# AMDSMI_STATUS_*, by which the library answers.
INVALID, UNSUPPORTED, NOT_YET, TIMEOUT, NO_PERMISSION, IO_ERROR, NOT_FOUND, NO_DATA = 1, 2, 3, 8, 10, 12, 31, 40
LOAD_MODULE, LOAD_SYMBOL, DRM_ERROR, FILE_ERROR, NO_DIRECTORY = 4, 5, 6, 14, 20
NOT_INITIALIZED, DRIVER_NOT_LOADED, NO_DRIVER, NO_FILE = 32, 34, 51, 52

REASONS = {UNSUPPORTED: NOT_SUPPORTED, NOT_YET: NOT_SUPPORTED, NO_DATA: NOT_SUPPORTED, LOAD_SYMBOL: NOT_SUPPORTED,
           NO_PERMISSION: "no_permission", TIMEOUT: "timeout", NOT_FOUND: LOST}

GONE = frozenset({LOST, *(f"error:{code}" for code in (IO_ERROR, DRM_ERROR, FILE_ERROR, NO_DIRECTORY, NO_FILE))})
"""Each alone may be a file that this board lacks; from every call at once it is a GPU that has left the bus."""

NOT_LOADED = "The amdgpu driver is not loaded: run `modprobe amdgpu`, or install the driver and reboot the machine."
ADVICE = {
    DRIVER_NOT_LOADED: NOT_LOADED,
    NO_DRIVER: NOT_LOADED,
    NO_PERMISSION: "This account may not use the AMD driver: add it to the groups render and video.",
    LOAD_MODULE: "AMD's library cannot be loaded: install the package amd-smi-lib of this machine's ROCm.",
}
NOT_INSTALLED = "AMD's Python binding amdsmi is not installed: install the package amd-smi-lib of this machine's ROCm."
NO_LIBRARY = "AMD's library libamd_smi.so was not found: install the package amd-smi-lib of this machine's ROCm."
MISMATCH = ("AMD's Python binding does not fit its library ({}): remove the package amdsmi that pip installed, "
            "so that ROCm's own is used.")


def load() -> Any:
    """-> the module. Raises DriverUnavailable: without its library the binding prints and fails with a KeyError."""
    prefer_rocm()
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            return import_module(MODULE)
    except ModuleNotFoundError as error:
        raise DriverUnavailable(NOT_INSTALLED) from error
    except Exception as error:
        if isinstance(error, KeyError | OSError) or "libamd_smi" in printed.getvalue():
            raise DriverUnavailable(NO_LIBRARY) from error
        raise DriverUnavailable(MISMATCH.format(error)) from error


def prefer_rocm() -> None:
    root = os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or "/opt/rocm"
    folder = Path(root) / "share" / "amd_smi"
    if (folder / MODULE).is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@dataclass(slots=True)
class Probe:
    """Asks for one value after the other and keeps the reason for each that is missing."""

    missing: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str, *calls: Callable[[], T | None]) -> T | None:
        """The first of `calls` that knows the value decides; the later ones are for other boards and versions."""
        reason = NOT_SUPPORTED
        for call in calls:
            try:
                value = call()
            except Exception as error:  # of this binding, that may be anything
                reason = reason_of(error)
            else:
                if value is not None:
                    return value
            if reason != NOT_SUPPORTED:
                break
        self.missing[name] = reason
        return None


def reason_of(error: Exception) -> str:
    code = getattr(error, "err_code", None)
    if isinstance(code, int):
        return REASONS.get(code, f"error:{code}")
    if isinstance(error, AttributeError):  # a function that this version of the binding lacks
        return NOT_SUPPORTED
    return f"error:{type(error).__name__}"


def unavailable(error: Exception) -> DriverUnavailable:
    sentence = " ".join(str(error).split())
    other = f"AMD's driver refuses to work ({sentence}): look for amdgpu in `dmesg`."
    return DriverUnavailable(ADVICE.get(getattr(error, "err_code", None) or 0, other))


def number(value: Any, bits: int = 16) -> float | None:
    """A number that is one: no text such as N/A, no NaN, and not the all-ones by which a field of `bits` is empty."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return None if value in {2**width - 1 for width in (16, 32, 64) if width >= bits} else value


def whole(value: Any, bits: int = 16) -> int | None:
    found = number(value, bits)
    return None if found is None else round(found)


def numbers(value: Any, bits: int = 16) -> list[float]:
    values = value if isinstance(value, list | tuple) else [value]
    return [found for one in values if (found := number(one, bits)) is not None]


def largest(value: Any) -> float | None:
    """Of the parts of a GPU that report one by one, the one that counts."""
    return max(numbers(value), default=None)


def percent(value: Any) -> float | None:
    found = largest(value)
    return float(found) if found is not None and 0 <= found <= 100 else None


def words(value: Any) -> str | None:
    text = value.strip() if isinstance(value, str) else ""
    return text if text and text.upper() != "N/A" else None
