"""A simulated NVML that lies beneath the real `pynvml`: it takes the place of the loaded library.

`pynvml` looks every symbol up by `getattr` in one module global and calls it with ctypes arguments, so an object whose
attributes are plain functions that fill those arguments is a driver. Struct layouts, sizing calls, error classes and
decoding above it are the real ones. There is one such driver per process, as with the real library.
"""

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from workers.gpus import sim_events, sim_fields, sim_identity, sim_links, sim_mig, sim_values
from workers.gpus.arguments import Refusal, address, behind, plain, point
from workers.gpus.base import DriverUnavailable
from workers.gpus.boards import CATALOGUE, Topology, topology_named
from workers.gpus.fault_script import (
    SCRIPT_VARIABLE,
    STARTED_VARIABLE,
    STATE_VARIABLE,
    Item,
    ScriptError,
    check,
    parse,
)
from workers.gpus.faults import NONE, Faults, FaultSource, source_from_environment
from workers.gpus.machine import Machine
from workers.gpus.sim_handles import HANDLE_STEP, Handles, Symbol
from workers.gpus.sim_scenario import Places, Scenario

KERNEL_LOG_VARIABLE = "GPUYARD_KMSG"
KERNEL_LOG = Path("/dev/kmsg")
ALWAYS_ANSWERED = frozenset({"nvmlErrorString", "nvmlShutdown"})
"""They are the library's own, whatever has happened to the driver."""

_real_library: list[Any] = []


def install(topology: str | None, node: str, faults: FaultSource | None = None,
            machine: Machine | None = None, script: str | None = None) -> "SimulatedLibrary":
    """Puts a simulated node in the place of the NVIDIA library, until `uninstall`."""
    check_argument_access()
    environment = os.environ
    state = environment.get(STATE_VARIABLE)
    machine = machine or Machine(topology_named(topology), node, state=Path(state) if state else None)
    items = items_of(environment.get(SCRIPT_VARIABLE, "") if script is None else script, machine.topology)
    started = float(environment.get(STARTED_VARIABLE) or machine.clock())
    scenario = Scenario(machine, items, started, places(environment))
    library = SimulatedLibrary(machine, faults or source_from_environment(), scenario)
    if not _real_library:
        _real_library.append(pynvml.nvmlLib)
    replace(library)
    return library


def uninstall() -> None:
    if _real_library:
        replace(_real_library.pop())


def replace(library: Any) -> None:
    pynvml.nvmlLib = library
    # Symbols are remembered by name, those of the library before too.
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlLib_refcount = 0


def items_of(script: str, topology: Topology) -> list[Item]:
    """Raises DriverUnavailable."""
    board = CATALOGUE.boards[topology.board]
    try:
        items = parse(script)
        check(items, len(topology.numa), board.nvlinks, has_ecc=board.has_ecc)
    except ScriptError as error:
        raise DriverUnavailable(str(error)) from error
    return items


def places(environment: Mapping[str, str]) -> Places:
    """The kernel's own log is never written to."""
    log, state = environment.get(KERNEL_LOG_VARIABLE), environment.get(STATE_VARIABLE)
    return Places(
        kernel_log=Path(log) if log and Path(log) != KERNEL_LOG else None,
        told=Path(state).with_suffix(".told.json") if state else None,
    )


def check_argument_access() -> None:
    """The way to the object behind `byref(x)` is not documented: better one sentence at the start than zeros later."""
    number, handle = ctypes.c_uint(0), pynvml.c_nvmlDevice_t()
    try:
        behind(ctypes.byref(number)).value = 7
        point(ctypes.byref(handle), HANDLE_STEP)
        works = number.value == 7 and address(handle) == HANDLE_STEP
    except (AttributeError, TypeError, ValueError):
        works = False
    if not works:
        raise DriverUnavailable("This Python does not let the simulated driver fill ctypes arguments; use CPython.")


class SimulatedLibrary:
    def __init__(self, machine: Machine, faults: FaultSource, scenario: Scenario) -> None:
        self.machine, self.faults, self.scenario = machine, faults, scenario
        self._handles = Handles(machine)
        self._symbols = symbols(self._handles, scenario)

    def __getattr__(self, name: str) -> Symbol:
        implementation = self.__dict__["_symbols"].get(name)
        if name in self.faults().missing or (implementation is None and not hasattr(pynvml, exported(name))):
            raise AttributeError(name)

        # A plain function: pynvml sets attributes on some of them.
        def symbol(*arguments: Any) -> Any:
            return self.call(name, implementation or not_modelled, arguments)

        return symbol

    def call(self, name: str, implementation: Symbol, arguments: tuple[Any, ...]) -> Any:
        self.scenario.advance()
        faults, played = self.faults(), self.scenario.faults
        names = () if faults is NONE and played is NONE and not self.scenario.hangs else self.names(name, arguments)
        if hang_s := self.scenario.hang_s(names):
            time.sleep(hang_s)
        for one in (faults, played):
            if one is not NONE and (code := answer(one, name, names)) is not None:
                return code
        try:
            result = implementation(*arguments)
        except Refusal as refusal:
            return refusal.code
        if names and (text := faults.text(name, names) or played.text(name, names)) is not None:
            ctypes.memmove(arguments[1], text + b"\0", len(text) + 1)
        return 0 if result is None else result

    def names(self, symbol: str, arguments: tuple[Any, ...]) -> tuple[int | str, ...]:
        """What the GPU that a call is about may be called in a fault."""
        if not arguments:
            return ()
        if symbol == "nvmlDeviceGetHandleByIndex_v2":
            index = plain(arguments[0])
            return (index, self.machine.gpus[index].uuid) if 0 <= index < len(self.machine.gpus) else ()
        return self._handles.names(arguments[0]) if isinstance(arguments[0], HANDLE_TYPES) else ()


HANDLE_TYPES = (type(pynvml.c_nvmlDevice_t()), type(pynvml.c_nvmlGpuInstance_t()),
                type(pynvml.c_nvmlComputeInstance_t()))


GUESTS_MISS = frozenset(f"nvmlDeviceGet{name}" for name in (
    "UtilizationRates", "EncoderUtilization", "DecoderUtilization", "ProcessUtilization", "PowerUsage", "Temperature",
    "TemperatureV", "TotalEnergyConsumption", "SupportedEventTypes", "CurrPcieLinkGeneration", "CurrPcieLinkWidth"))
"""Symbols that a guest with a virtual GPU finds, and that answer it nothing."""


def symbols(handles: Handles, scenario: Scenario) -> dict[str, Symbol]:
    found = sim_events.symbols(handles, scenario)
    for module in (sim_identity, sim_values, sim_fields, sim_links, sim_mig):
        found |= module.symbols(handles)
    if handles.machine.topology.virtual:
        return {name: symbol for name, symbol in found.items() if name not in GUESTS_MISS}
    return found


def exported(name: str) -> str:
    """The function of the binding that calls a symbol: `nvmlDeviceGetCount_v2` -> `nvmlDeviceGetCount`."""
    return name if hasattr(pynvml, name) else name.rpartition("_v")[0] or name


def not_modelled(*_arguments: Any) -> int:
    """A symbol that a driver of this release has, and this board does not support."""
    return int(pynvml.NVML_ERROR_NOT_SUPPORTED)


def answer(faults: Faults, name: str, names: tuple[int | str, ...]) -> int | None:
    """The code that a fault gives instead of a value, after the time that another one takes."""
    if delay_s := faults.delay_s(name, names):
        time.sleep(delay_s)
    if name in faults.missing:
        return int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    if faults.everything is not None and name not in ALWAYS_ANSWERED:
        return faults.everything
    if faults.is_lost(names):
        return int(pynvml.NVML_ERROR_GPU_IS_LOST)
    return faults.code(name, names)
