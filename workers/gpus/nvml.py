"""NVIDIA GPUs through NVML.

Every value is asked for by itself: one that fails is None with its reason, and hides no other.
Identity is the UUID; handles are only used between two enumerations.
"""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pynvml

from wire.reports import GpuInfo, GpuProcess, GpuReading, Link
from workers.gpus.base import DriverUnavailable, GpuList

T = TypeVar("T")

TROUBLE = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, UnicodeDecodeError, TypeError, ValueError,
           ctypes.ArgumentError)
"""What a call of the binding may raise: the mismatch is no NVMLError, and the last four are faults of the binding."""

REASONS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not_supported",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "not_supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
}
LOST = "gpu_lost"

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
SHADOWED = (
    "An old package named pynvml hides nvidia-ml-py: run `pip uninstall pynvml`, "
    "then `pip install --force-reinstall nvidia-ml-py`."
)

ARCHITECTURES = {2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper",
                 10: "blackwell", 13: "rubin"}
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
SWITCH = "switch"
NODE_WORDS = 4  # of 64 NUMA nodes each
MAX_PID = 1 << 22  # the kernel's own limit
ENERGY, POWER_NOW = pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, pynvml.NVML_FI_DEV_POWER_INSTANT


@dataclass(slots=True)
class Probe:
    """Asks for one value after the other and keeps the reason for each that is missing."""

    missing: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str, *calls: Callable[[], T | None]) -> T | None:
        """The first of `calls` that the driver knows decides; the later ones are for older drivers."""
        reason = "not_supported"
        for call in calls:
            try:
                value = call()
            except TROUBLE as error:
                reason = reason_of(error)
            else:
                if value is not None:
                    return value
            if reason != "not_supported":
                break
        self.missing[name] = reason
        return None


@dataclass(frozen=True, slots=True)
class Device:
    uuid: str
    index: int
    handle: Any
    info: GpuInfo
    silent: str = ""  # why it is not asked


class NvmlDriver:
    def __init__(self, skip: Collection[int] = (), clock: Callable[[], float] = time.time) -> None:
        self.at_work: int | None = None
        self._skip = frozenset(skip)
        self._clock = clock
        self._devices: list[Device] = []
        self._started = False

    def start(self) -> None:
        if Path(pynvml.__file__ or "").name == "__init__.py":
            raise DriverUnavailable(SHADOWED)
        try:
            pynvml.nvmlInit()
        except TROUBLE as error:
            raise unavailable(error) from error
        self._started = True

    def close(self) -> None:
        if self._started:
            self._started = False
            Probe()("shutdown", pynvml.nvmlShutdown)

    def enumerate(self) -> GpuList:
        try:
            count = pynvml.nvmlDeviceGetCount()
        except TROUBLE as error:
            raise unavailable(error) from error
        problems = [] if count else ["The NVIDIA driver is loaded but lists no GPU: look for Xid lines in `dmesg`."]
        before, self._devices = self._devices, []
        for index in range(count):
            self._devices += self._devices_at(index, before, problems)
        awake = [device for device in self._devices if not device.silent]
        whole = [device for device in awake if device.info.parent_uuid is None]
        ends = {device.uuid: self._link_ends(device) for device in whole}
        self.at_work = None
        probe = Probe()
        return GpuList(
            infos=[device.info for device in awake], links=links_between(whole, ends),
            nvswitch=any(SWITCH in peers for peers in ends.values()),
            driver=probe("driver", lambda: text(pynvml.nvmlSystemGetDriverVersion)),
            cuda=probe("cuda", cuda_version),
            problem=" ".join(problems) or None,
        )

    def read(self) -> list[GpuReading]:
        readings = []
        for device in self._devices:
            self.at_work = device.index
            readings.append(reading_of(device, self._clock()))
        self.at_work = None
        return readings

    def _link_ends(self, device: Device) -> Counter[str]:
        self.at_work = device.index
        return Counter(nvlink_ends(device.handle))

    def _devices_at(self, index: int, before: list[Device], problems: list[str]) -> list[Device]:
        """The GPU at an index, or its slices. Other GPUs keep their index whatever happens to this one."""
        self.at_work = index
        try:
            if index in self._skip:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = text(pynvml.nvmlDeviceGetUUID, handle)
        except TROUBLE as error:
            reason = reason_of(error)
            known = [device for device in before if device.index == index]
            called = f"GPU {index} ({', '.join(device.uuid for device in known)})" if known else f"GPU {index}"
            problems.append(f"{called} does not answer ({reason}): drain this node and reset the GPU, or reboot.")
            return [Device(device.uuid, index, None, device.info, reason) for device in known]
        info = info_of(handle, uuid, index)
        if not mig_is_on(handle):
            return [Device(uuid, index, handle, info)]
        slices = [found for piece in mig_handles(handle) if (found := slice_of(info, piece))]
        if not slices:
            problems.append(f"GPU {index} ({uuid}) has MIG on but no slice: create some, or switch MIG off.")
        return slices


def info_of(handle: Any, uuid: str, index: int) -> GpuInfo:
    probe = Probe()
    major_minor = probe("compute_capability", lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    memory = probe("memory_total_bytes", *memory_calls(handle))
    return GpuInfo(
        uuid=uuid, index=index, vendor="nvidia",
        name=probe("name", lambda: text(pynvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
        pci_bus_id=probe("pci_bus_id", lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId),
        memory_total_bytes=memory.total if memory else None,
        power_limit_mw=probe("power_limit_mw", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle),
                             lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle)),
        compute_capability="{}.{}".format(*major_minor) if major_minor else None,
        architecture=probe("architecture", lambda: ARCHITECTURES.get(pynvml.nvmlDeviceGetArchitecture(handle))),
        serial=probe("serial", lambda: text(pynvml.nvmlDeviceGetSerial, handle)),
        numa_node=probe("numa_node", lambda: numa_node(handle)),
        missing=probe.missing,
    )


def slice_of(parent: GpuInfo, handle: Any) -> Device | None:
    """A MIG slice; None if it was destroyed meanwhile. Where it sits and what it is made of is its GPU's."""
    probe = Probe()
    uuid = probe("uuid", lambda: text(pynvml.nvmlDeviceGetUUID, handle))
    if uuid is None:
        return None
    memory = probe("memory_total_bytes", *memory_calls(handle))
    name = probe("name", lambda: text(pynvml.nvmlDeviceGetName, handle)) or parent.name
    info = msgspec.structs.replace(
        parent, uuid=uuid, name=name, parent_uuid=parent.uuid,
        # The driver names a slice after its GPU and profile: "NVIDIA A100-SXM4-80GB MIG 3g.40gb".
        mig_profile=name.rpartition(" MIG ")[2] if " MIG " in name else None,
        memory_total_bytes=memory.total if memory else None,
        power_limit_mw=None, missing={**parent.missing, **probe.missing, "power_limit_mw": "not_supported"},
    )
    return Device(uuid, parent.index, handle, info)


def reading_of(device: Device, at: float) -> GpuReading:
    if device.silent:
        return GpuReading(uuid=device.uuid, at=at, missing={"gpu": device.silent})
    handle, probe = device.handle, Probe()
    memory = probe("memory_used_bytes", *memory_calls(handle))
    fields = field_values(handle)
    reading = GpuReading(
        uuid=device.uuid, at=at,
        utilization_percent=probe("utilization_percent",
                                  lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else device.info.memory_total_bytes,
        power_mw=probe("power_mw", lambda: pynvml.nvmlDeviceGetPowerUsage(handle), lambda: fields.get(POWER_NOW)),
        temperature_c=probe("temperature_c", *temperature_calls(handle)),
        sm_clock_mhz=probe("sm_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        memory_clock_mhz=probe("memory_clock_mhz",
                               lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        energy_mj=probe("energy_mj", lambda: fields.get(ENERGY),
                        lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
        throttle_reasons=probe("throttle_reasons", lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                               lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        processes=processes_on(handle, probe),
        missing=probe.missing,
    )
    if LOST in probe.missing.values():
        reading.missing["gpu"] = LOST
    return reading


def memory_calls(handle: Any) -> tuple[Callable[[], Any], ...]:
    """The first version counts the driver's own reserve as used; only old drivers need it."""
    return (lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
            lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))


def temperature_calls(handle: Any) -> tuple[Callable[[], float], ...]:
    return (lambda: float(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)),
            lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)))


def field_values(handle: Any) -> dict[int, int]:
    """The fields that this GPU has, in one call. It succeeds if any of them does."""
    values = Probe()("fields", lambda: pynvml.nvmlDeviceGetFieldValues(handle, [ENERGY, POWER_NOW])) or ()
    return {value.fieldId: field_value(value) for value in values if value.nvmlReturn == pynvml.NVML_SUCCESS}


def field_value(value: Any) -> int:
    if value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return int(value.value.uiVal)
    return int(value.value.ullVal)


def processes_on(handle: Any, probe: Probe) -> list[GpuProcess] | None:
    """Who computes or draws on it. The pids are the host's, also when this runs in a container."""
    computing = probe("processes", *listings(handle, "Compute"))
    if computing is None:
        return None
    aside = Probe()
    found = [*computing]
    for kind in ("MPSCompute", "Graphics"):
        found += aside(kind, *listings(handle, kind)) or []
    sound = {one.pid: one.usedGpuMemory for one in found if 0 < one.pid <= MAX_PID}
    if any(one.pid not in sound for one in found):
        # Some drivers of release 535 write the list in another layout than they announce.
        probe.missing["processes"] = "error:impossible_pids"
    return [GpuProcess(pid=pid, memory_used_bytes=used) for pid, used in sorted(sound.items())]


def listings(handle: Any, kind: str) -> tuple[Callable[[], list[Any]], ...]:
    newest = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses")
    older = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v2", newest)
    return (lambda: newest(handle), lambda: older(handle))


def links_between(devices: list[Device], ends: dict[str, Counter[str]]) -> list[Link]:
    """How each pair is joined. A pair that cannot be asked is left out."""
    return [
        Link(a=a.uuid, b=b.uuid, kind=kind)
        for a, b in combinations(devices, 2)
        if (kind := nvlink_kind(a, b, ends) or pcie_kind(a.handle, b.handle))
    ]


def nvlink_ends(handle: Any) -> Iterator[str]:
    """The PCI bus id at the other end of every active link, or SWITCH."""
    for number in range(pynvml.NVML_NVLINK_MAX_LINKS):
        probe = Probe()
        active = probe("state", partial(pynvml.nvmlDeviceGetNvLinkState, handle, number))
        if active is None:
            return
        if not active:
            continue
        kind = probe("kind", partial(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number))
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            yield SWITCH
        elif peer := probe("peer", partial(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)):
            yield peer.busId


def nvlink_kind(a: Device, b: Device, ends: dict[str, Counter[str]]) -> str | None:
    """Links of the pair itself, or what both have to a switch."""
    direct = ends[a.uuid][b.info.pci_bus_id] if b.info.pci_bus_id else 0
    count = direct or min(ends[a.uuid][SWITCH], ends[b.uuid][SWITCH])
    return f"NV{count}" if count else None


def pcie_kind(a: Any, b: Any) -> str | None:
    return Probe()("level", lambda: LEVELS.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)))


def numa_node(handle: Any) -> int | None:
    words = pynvml.nvmlDeviceGetMemoryAffinity(handle, NODE_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE)
    nodes = [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    # Several mean that the board does not belong to one.
    return nodes[0] if len(nodes) == 1 else None


def mig_is_on(handle: Any) -> bool:
    return bool((Probe()("mig", lambda: pynvml.nvmlDeviceGetMigMode(handle)) or [0])[0])


def mig_handles(handle: Any) -> list[Any]:
    probe = Probe()
    count = probe("count", lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    found = [probe("slice", partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place))
             for place in range(count)]
    return [one for one in found if one is not None]


def cuda_version() -> str:
    number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{number // 1000}.{number % 1000 // 10}"


def text(function: Callable[..., Any], *arguments: Any) -> str:
    """Past the binding's strict decoding: one odd byte in a name must not cost the GPU."""
    raw = getattr(function, "__wrapped__", function)(*arguments)
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


def reason_of(error: Exception) -> str:
    if isinstance(error, pynvml.NVMLLibraryMismatchError):
        return "not_supported"
    if isinstance(error, pynvml.NVMLError):
        return REASONS.get(error.value, f"error:{error.value}")
    return f"error:{type(error).__name__}"


def unavailable(error: Exception) -> DriverUnavailable:
    code = error.value if isinstance(error, pynvml.NVMLError) else None
    return DriverUnavailable(ADVICE.get(code, f"The NVIDIA driver refuses to work ({error}): look at `dmesg`."))
