"""A simulated `amdsmi` beneath our driver: it takes the place of the module that AMD ships.

Names, arguments, the shape of the answers, units and exceptions are those of the binding of ROCm 7, its habits too:
text where a number is missing, and the identity of a GPU that is remembered although it has left the bus.
"""

import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from workers.gpus.amd_boards import AMD_CATALOGUE, AmdTopology
from workers.gpus.amd_library import INVALID, IO_ERROR, MODULE, NOT_INITIALIZED, UNSUPPORTED
from workers.gpus.base import DriverUnavailable
from workers.gpus.fault_script import SCRIPT_VARIABLE, STARTED_VARIABLE, Item, ScriptError, check_on, parse
from workers.gpus.faults import FaultSource, source_from_environment
from workers.gpus.simulated_amd_answers import Answers
from workers.gpus.simulated_amd_machine import AmdGpu, AmdMachine
from workers.gpus.simulated_amd_names import NAMES, AmdSmiInitFlags, AmdSmiParameterException, library_exception
from workers.gpus.simulated_amd_scenario import AmdScenario

REMEMBERED = frozenset({
    "amdsmi_get_gpu_device_bdf", "amdsmi_get_gpu_device_uuid", "amdsmi_get_gpu_enumeration_info",
    "amdsmi_get_gpu_asic_info", "amdsmi_get_gpu_board_info", "amdsmi_topo_get_link_type",
    "amdsmi_topo_get_link_weight"})

_replaced: list[ModuleType | None] = []


def install(topology: str | None, node: str, faults: FaultSource | None = None,
            machine: AmdMachine | None = None, script: str | None = None) -> "SimulatedAmdSmi":
    """Puts a simulated node in the place of AMD's binding, until `uninstall`."""
    machine = machine or AmdMachine(topology_named(topology), node)
    items = items_of(os.environ.get(SCRIPT_VARIABLE, "") if script is None else script, topology)
    started = float(os.environ.get(STARTED_VARIABLE) or machine.clock())
    scenario = AmdScenario(machine, items, faults or source_from_environment(), machine.clock, started)
    module = SimulatedAmdSmi(machine, scenario)
    if not _replaced:
        _replaced.append(sys.modules.get(MODULE))
    sys.modules[MODULE] = module
    return module


def uninstall() -> None:
    if _replaced:
        sys.modules.pop(MODULE, None)
        if (before := _replaced.pop()) is not None:
            sys.modules[MODULE] = before


def items_of(script: str, topology: str | None) -> list[Item]:
    """Raises DriverUnavailable."""
    try:
        items = parse(script)
        check_on(items, topology)
    except ScriptError as error:
        raise DriverUnavailable(str(error)) from error
    return items


def topology_named(name: str | None) -> AmdTopology:
    if name not in AMD_CATALOGUE.topologies:
        raise DriverUnavailable(
            f"There is no simulated topology {name!r}; those of AMD are {', '.join(sorted(AMD_CATALOGUE.topologies))}.")
    return AMD_CATALOGUE.topologies[name]


class ProcessorHandle:
    """Opaque, and of no use after the library was closed."""

    def __init__(self, gpu: AmdGpu, opened: int) -> None:
        self.gpu, self.opened = gpu, opened


class SimulatedAmdSmi(ModuleType):
    def __init__(self, machine: AmdMachine, faults: FaultSource) -> None:
        super().__init__(MODULE)
        self.machine, self.faults = machine, faults
        self.opened = 0
        self.is_open = False
        self.__dict__.update(NAMES)
        self._about_all: dict[str, Callable[..., Any]] = {
            "amdsmi_init": self._init, "amdsmi_shut_down": self._shut_down,
            "amdsmi_get_processor_handles": self._handles,
            "amdsmi_get_rocm_version": lambda: (True, "7.0.2"),
            "amdsmi_get_lib_version": lambda: {"major": 26, "minor": 0, "release": 2, "build": "26.0.2"},
        }
        self._answers = Answers(machine)

    def __getattr__(self, name: str) -> Any:
        """Only what this version of the binding has; its functions are looked up at each call."""
        if name.startswith("_") or name in self.faults().missing:
            raise AttributeError(f"module {MODULE!r} has no attribute {name!r}")
        if (function := self._about_all.get(name)) is not None:
            return self._guarded(name, function)
        answer = getattr(self._answers, name.removeprefix("amdsmi_"), None)
        if answer is None or not name.startswith("amdsmi_"):
            raise AttributeError(f"module {MODULE!r} has no attribute {name!r}")
        return self._guarded(name, lambda *arguments: answer(*map(self._resolved, arguments)))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def symbol(*arguments: Any) -> Any:
            faults, names = self.faults(), called(arguments)
            if faults.everything is not None and name != "amdsmi_shut_down":
                raise library_exception(faults.everything)
            if delay_s := faults.delay_s(name, names):
                time.sleep(delay_s)
            if faults.is_lost(names) and name not in REMEMBERED:
                raise library_exception(IO_ERROR)
            if (code := faults.code(name, names)) is not None:
                raise library_exception(code)
            result = function(*arguments)
            text = faults.text(name, names)
            return result if text is None else with_text(result, text.decode("utf-8"))
        return symbol

    def _resolved(self, argument: Any) -> Any:
        if not isinstance(argument, ProcessorHandle):
            if isinstance(argument, int):
                return argument
            raise AmdSmiParameterException(argument, ProcessorHandle)
        if not self.is_open:
            raise library_exception(NOT_INITIALIZED)
        if argument.opened != self.opened:
            raise library_exception(INVALID)
        self.machine.refresh()
        return argument.gpu

    def _init(self, flag: Any = AmdSmiInitFlags.INIT_AMD_GPUS) -> None:
        if not isinstance(flag, AmdSmiInitFlags):
            raise AmdSmiParameterException(flag, AmdSmiInitFlags)
        if flag != AmdSmiInitFlags.INIT_AMD_GPUS:
            raise library_exception(UNSUPPORTED)
        self.is_open, self.opened = True, self.opened + 1

    def _shut_down(self) -> None:
        self.is_open = False

    def _handles(self) -> list[ProcessorHandle]:
        if not self.is_open:
            raise library_exception(NOT_INITIALIZED)
        return [ProcessorHandle(gpu, self.opened) for gpu in self.machine.gpus]


def called(arguments: tuple[Any, ...]) -> tuple[int | str, ...]:
    """What the GPU that a call is about may be called in a fault."""
    first = arguments[0] if arguments else None
    return (first.gpu.index, first.gpu.uuid) if isinstance(first, ProcessorHandle) else ()


def with_text(result: Any, text: str) -> Any:
    """The answer, its first text replaced."""
    if isinstance(result, str):
        return text
    key = next(key for key, value in result.items() if isinstance(value, str))
    return {**result, key: text}
