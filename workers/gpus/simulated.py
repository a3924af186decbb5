"""A simulated NVML that lies beneath the real `pynvml`: it takes the place of the loaded library.

`pynvml` looks every symbol up by `getattr` in one module global and calls it with ctypes arguments, so an object whose
attributes are plain functions that fill those arguments is a driver. Struct layouts, sizing calls, error classes and
decoding above it are the real ones. There is one such driver per process, as with the real library.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pynvml

from workers.gpus.arguments import address, behind, fill, plain, point, put, write_text
from workers.gpus.base import DriverUnavailable
from workers.gpus.boards import topology_named
from workers.gpus.faults import FaultSource, source_from_environment
from workers.gpus.machine import Gpu, Machine, Slice

DRIVER_VERSION = b"570.158.01"
NVML_VERSION = b"12." + DRIVER_VERSION
CUDA_VERSION = 12080
PCIE_LEVELS = {"X": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
SWITCH_BUS_ID = b"00000000:C0:00.0"
THROTTLE_IDLE, THROTTLE_POWER_CAP = 0x1, 0x4
HANDLE_STEP = 0x1000
NOT_IN_MIG = 0xFFFFFFFF
MAX_SLICES = 7

Symbol = Callable[..., Any]
"""Returns a code, or None for success."""

Device = Gpu | Slice

_real_library: list[Any] = []


def install(topology: str | None, node: str, faults: FaultSource | None = None,
            machine: Machine | None = None) -> "SimulatedLibrary":
    """Puts a simulated node in the place of the NVIDIA library, until `uninstall`."""
    check_argument_access()
    library = SimulatedLibrary(machine or Machine(topology_named(topology), node), faults or source_from_environment())
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


class Refusal(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class SimulatedLibrary:
    def __init__(self, machine: Machine, faults: FaultSource) -> None:
        self.machine = machine
        self.faults = faults
        self._devices: dict[int, Device] = {}
        for gpu in machine.gpus:
            base = HANDLE_STEP * (gpu.index + 1)
            self._devices[base] = gpu
            self._devices.update({base + place + 1: piece for place, piece in enumerate(gpu.slices)})
        self._handles = {device.uuid: handle for handle, device in self._devices.items()}
        self._symbols = symbols(self)

    def __getattr__(self, name: str) -> Symbol:
        implementation = self.__dict__["_symbols"].get(name)
        if implementation is None or name in self.faults().missing:
            raise AttributeError(name)

        # A plain function: pynvml sets attributes on some of them.
        def symbol(*arguments: Any) -> Any:
            return self.call(name, implementation, arguments)

        return symbol

    def call(self, name: str, implementation: Symbol, arguments: tuple[Any, ...]) -> Any:
        faults, names = self.faults(), self.names(name, arguments)
        if delay_s := faults.delay_s(name, names):
            time.sleep(delay_s)
        if name in faults.missing:
            return pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        if faults.is_lost(names):
            return pynvml.NVML_ERROR_GPU_IS_LOST
        if (code := faults.code(name, names)) is not None:
            return code
        try:
            result = implementation(*arguments)
        except Refusal as refusal:
            return refusal.code
        if (text := faults.text(name, names)) is not None:
            ctypes.memmove(arguments[1], text + b"\0", len(text) + 1)
        return 0 if result is None else result

    def names(self, symbol: str, arguments: tuple[Any, ...]) -> tuple[int | str, ...]:
        """What the GPU that a call is about may be called in a fault."""
        if not arguments:
            return ()
        if symbol == "nvmlDeviceGetHandleByIndex_v2":
            index = plain(arguments[0])
            return (index, self.machine.gpus[index].uuid) if 0 <= index < len(self.machine.gpus) else ()
        device = self._devices.get(address(arguments[0]) or 0) if isinstance(arguments[0], HANDLE_TYPE) else None
        if isinstance(device, Slice):
            return (device.uuid, device.gpu.index, device.gpu.uuid)
        return (device.index, device.uuid) if device else ()

    def device(self, handle: Any) -> Device:
        device = self._devices.get(address(handle) or 0)
        if device is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.machine.refresh()
        return device

    def gpu(self, handle: Any) -> Gpu:
        """A whole GPU: most of NVML does not answer for slices."""
        device = self.device(handle)
        if isinstance(device, Slice):
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return device

    def give_handle(self, argument: Any, device: Device) -> None:
        point(argument, self._handles[device.uuid])

    def handle_by_index(self, index: Any, out: Any) -> None:
        if not 0 <= plain(index) < len(self.machine.gpus):
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.give_handle(out, self.machine.gpus[plain(index)])

    def slice_by_index(self, handle: Any, index: Any, out: Any) -> None:
        pieces = self.gpu(handle).slices
        if plain(index) >= len(pieces):
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        self.give_handle(out, pieces[plain(index)])

    # Numbers and structs of one device.

    def number(self, getter: Callable[[Gpu], int]) -> Symbol:
        def symbol(handle: Any, out: Any) -> None:
            behind(out).value = getter(self.gpu(handle))
        return symbol

    def text(self, getter: Callable[[Device], str | None]) -> Symbol:
        def symbol(handle: Any, buffer: Any, size: Any) -> int | None:
            value = getter(self.device(handle))
            return pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else write_text(buffer, size, value.encode())
        return symbol

    def compute_capability(self, handle: Any, major: Any, minor: Any) -> None:
        device = self.device(handle)
        board = device.board if isinstance(device, Gpu) else device.gpu.board
        high, low = board.compute_capability.split(".")
        behind(major).value, behind(minor).value = int(high), int(low)

    def pci_info(self, handle: Any, out: Any) -> None:
        gpu = self.gpu(handle)
        fill(out, domain=0, bus=gpu.bus, device=0, pciDeviceId=int(gpu.board.pci_device_id, 16) << 16 | 0x10DE,
             busId=gpu.bus_id.encode(), busIdLegacy=gpu.bus_id[4:].encode())

    def memory_affinity(self, handle: Any, _size: Any, out: Any, _scope: Any) -> None:
        numa = self.gpu(handle).numa
        behind(out)[numa // 64] = 1 << numa % 64

    def memory_v1(self, handle: Any, out: Any) -> None:
        total, used, reserved = memory_of(self.device(handle))
        # The first version counts the driver's own reserve as used.
        fill(out, total=total, used=used + reserved, free=total - used - reserved)

    def memory_v2(self, handle: Any, out: Any) -> None:
        if behind(out).version != pynvml.nvmlMemory_v2:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        total, used, reserved = memory_of(self.device(handle))
        fill(out, total=total, used=used, reserved=reserved, free=total - used - reserved)

    def utilization(self, handle: Any, out: Any) -> None:
        gpu = self.gpu(handle)
        if gpu.slices:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        percent = round(100 * gpu.load.utilization)
        fill(out, gpu=percent, memory=percent // 2)

    def temperature(self, handle: Any, _sensor: Any, out: Any) -> None:
        behind(out).value = round(self.gpu(handle).temperature_c)

    def temperature_struct(self, handle: Any, out: Any) -> None:
        fill(out, temperature=round(self.gpu(handle).temperature_c))

    def clock(self, handle: Any, kind: Any, out: Any) -> None:
        gpu = self.gpu(handle)
        is_memory = plain(kind) == pynvml.NVML_CLOCK_MEM
        behind(out).value = gpu.board.memory_clock_mhz if is_memory else gpu.sm_clock_mhz

    def field_values(self, handle: Any, count: Any, out: Any) -> None:
        gpu = self.gpu(handle)
        known = {pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: round(gpu.energy_mj),
                 pynvml.NVML_FI_DEV_POWER_INSTANT: gpu.power_mw}
        values = behind(out)
        for place in range(plain(count)):
            value = values[place]
            value.timestamp = time.time_ns() // 1000
            if value.fieldId in known:
                value.nvmlReturn, value.valueType = 0, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                value.value.ullVal = known[value.fieldId]
            else:
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED

    def compute_processes(self, handle: Any, count: Any, out: Any) -> int | None:
        device = self.device(handle)
        found = device.load.processes
        room = behind(count).value
        behind(count).value = len(found)
        if found and (out is None or room < len(found)):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        instance = device.gpu.slices.index(device) if isinstance(device, Slice) else NOT_IN_MIG
        for place, (pid, size) in enumerate(found):
            fill(out[place], pid=pid, usedGpuMemory=size, gpuInstanceId=instance, computeInstanceId=instance)
        return None

    def no_processes(self, handle: Any, count: Any, _out: Any) -> None:
        self.device(handle)
        behind(count).value = 0

    # How the devices are joined.

    def common_ancestor(self, first: Any, second: Any, out: Any) -> None:
        level = self.machine.topology.pcie_level(self.gpu(first).index, self.gpu(second).index)
        behind(out).value = PCIE_LEVELS[level]

    def nvlink_peer(self, handle: Any, link: Any) -> Gpu | None:
        """The GPU at the other end, None for a switch; refuses a link that is not there."""
        gpu, number = self.gpu(handle), plain(link)
        if not gpu.board.nvlinks:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not 0 <= number < gpu.board.nvlinks:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if self.machine.topology.nvswitch:
            return None
        for peer in self.machine.gpus:
            kind = self.machine.topology.joined(gpu.index, peer.index)
            if kind.startswith("NV"):
                number -= int(kind[2:])
                if number < 0:
                    return peer
        raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def nvlink_state(self, handle: Any, link: Any, out: Any) -> None:
        self.nvlink_peer(handle, link)
        behind(out).value = 1

    def nvlink_remote_type(self, handle: Any, link: Any, out: Any) -> None:
        peer = self.nvlink_peer(handle, link)
        behind(out).value = pynvml.NVML_NVLINK_DEVICE_TYPE_GPU if peer else pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH

    def nvlink_remote_pci(self, handle: Any, link: Any, out: Any) -> None:
        peer = self.nvlink_peer(handle, link)
        fill(out, busId=peer.bus_id.encode() if peer else SWITCH_BUS_ID)

    def mig_mode(self, handle: Any, current: Any, pending: Any) -> None:
        gpu = self.gpu(handle)
        if not gpu.board.mig_memory_mib:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        behind(current).value = behind(pending).value = int(bool(gpu.slices))


HANDLE_TYPE = type(pynvml.c_nvmlDevice_t())


def symbols(library: SimulatedLibrary) -> dict[str, Symbol]:
    return system_symbols(library) | device_symbols(library) | link_symbols(library)


def system_symbols(library: SimulatedLibrary) -> dict[str, Symbol]:
    return {
        "nvmlInitWithFlags": lambda _flags: None,
        "nvmlInit_v2": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlErrorString": lambda code: b"simulated error %d" % plain(code),
        "nvmlSystemGetDriverVersion": lambda buffer, size: write_text(buffer, size, DRIVER_VERSION),
        "nvmlSystemGetNVMLVersion": lambda buffer, size: write_text(buffer, size, NVML_VERSION),
        "nvmlSystemGetCudaDriverVersion_v2": lambda out: put(out, CUDA_VERSION),
        "nvmlDeviceGetCount_v2": lambda out: put(out, len(library.machine.gpus)),
        "nvmlDeviceGetHandleByIndex_v2": library.handle_by_index,
    }


def device_symbols(library: SimulatedLibrary) -> dict[str, Symbol]:
    return {
        "nvmlDeviceGetUUID": library.text(lambda device: device.uuid),
        "nvmlDeviceGetName": library.text(name_of),
        "nvmlDeviceGetSerial": library.text(serial_of),
        "nvmlDeviceGetArchitecture": library.number(lambda gpu: gpu.board.architecture),
        "nvmlDeviceGetCudaComputeCapability": library.compute_capability,
        "nvmlDeviceGetPciInfo_v3": library.pci_info,
        "nvmlDeviceGetMemoryAffinity": library.memory_affinity,
        "nvmlDeviceGetMemoryInfo": library.memory_v1,
        "nvmlDeviceGetMemoryInfo_v2": library.memory_v2,
        "nvmlDeviceGetUtilizationRates": library.utilization,
        "nvmlDeviceGetEnforcedPowerLimit": library.number(lambda gpu: gpu.board.power_limit_w * 1000),
        "nvmlDeviceGetPowerUsage": library.number(lambda gpu: gpu.power_mw),
        "nvmlDeviceGetTemperature": library.temperature,
        "nvmlDeviceGetTemperatureV": library.temperature_struct,
        "nvmlDeviceGetClockInfo": library.clock,
        "nvmlDeviceGetCurrentClocksEventReasons": library.number(throttle_reasons),
        "nvmlDeviceGetCurrentClocksThrottleReasons": library.number(throttle_reasons),
        "nvmlDeviceGetTotalEnergyConsumption": library.number(lambda gpu: round(gpu.energy_mj)),
        "nvmlDeviceGetFieldValues": library.field_values,
        "nvmlDeviceGetComputeRunningProcesses_v2": library.compute_processes,
        "nvmlDeviceGetComputeRunningProcesses_v3": library.compute_processes,
        "nvmlDeviceGetMPSComputeRunningProcesses_v3": library.no_processes,
        "nvmlDeviceGetGraphicsRunningProcesses_v3": library.no_processes,
        "nvmlDeviceGetMigMode": library.mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": library.number(lambda gpu: MAX_SLICES if gpu.slices else 0),
        "nvmlDeviceGetMigDeviceHandleByIndex": library.slice_by_index,
    }


def link_symbols(library: SimulatedLibrary) -> dict[str, Symbol]:
    return {
        "nvmlDeviceGetTopologyCommonAncestor": library.common_ancestor,
        "nvmlDeviceGetNvLinkState": library.nvlink_state,
        "nvmlDeviceGetNvLinkRemoteDeviceType": library.nvlink_remote_type,
        "nvmlDeviceGetNvLinkRemotePciInfo_v2": library.nvlink_remote_pci,
    }


def name_of(device: Device) -> str:
    return device.board.name if isinstance(device, Gpu) else f"{device.gpu.board.name} MIG {device.profile}"


def serial_of(device: Device) -> str | None:
    return device.serial if isinstance(device, Gpu) and device.board.has_serial else None


def memory_of(device: Device) -> tuple[int, int, int]:
    """-> total, used, reserved."""
    reserved = device.reserved_bytes if isinstance(device, Gpu) else 0
    return device.memory_bytes, device.load.used_bytes, reserved


def throttle_reasons(gpu: Gpu) -> int:
    if not gpu.load.processes:
        return THROTTLE_IDLE
    return THROTTLE_POWER_CAP if gpu.load.utilization > 0.97 else 0
