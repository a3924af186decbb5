"""AMD GPUs through `amdsmi`.

Every value is asked for by itself: one that fails is None with its reason, and hides no other. A card with two dies is
two GPUs, and so is each part of one that is cut into parts: the library lists them so.
"""

import time
from collections.abc import Callable, Collection
from itertools import combinations
from typing import Any

from wire.hardware import GpuHardware, HealthEvent, MigOrder
from wire.reports import GpuReading, Link
from workers.gpus import amd_library
from workers.gpus.amd_details import hardware_of, info_of, memory_calls, uuid_of
from workers.gpus.amd_library import LOST, Probe, unavailable, whole, words
from workers.gpus.amd_readings import Device, is_gone, reading_of
from workers.gpus.base import GpuList, OrderFailed

SAME_HOST_HOPS = 2
NOT_OPENED = f"error:{amd_library.NOT_INITIALIZED}"
NO_GPU = "The AMD driver is loaded but lists no GPU: look for amdgpu in `dmesg`."


class AmdSmiDriver:
    def __init__(self, skip: Collection[int] = (), clock: Callable[[], float] = time.time) -> None:
        self.at_work: int | None = None
        self.first_index = 0
        """Of its GPUs, on a machine that also has those of another maker."""
        self._skip, self._clock = frozenset(skip), clock
        self._smi: Any = None
        self._devices: list[Device] = []
        self._stale = False

    def start(self) -> None:
        smi = amd_library.load()
        try:
            smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
        except Exception as error:
            raise unavailable(error) from error
        self._smi = smi

    def close(self) -> None:
        if self._smi is not None:
            Probe()("shutdown", self._smi.amdsmi_shut_down)
            self._smi = None

    def release(self) -> None:
        """Handles of a library that was let go are worthless: until `enumerate` nothing is asked."""
        self.close()
        for device in self._devices:
            device.silent = device.silent or "released"

    def renew(self) -> bool:
        """Needed when the library says that nobody opened it: its daemon or its driver began anew."""
        if not self._stale:
            return False
        self._stale = False
        self.close()
        self.start()
        return True

    def enumerate(self) -> GpuList:
        smi = self._smi
        try:
            handles = list(smi.amdsmi_get_processor_handles())
        except Exception as error:
            raise unavailable(error) from error
        problems = [] if handles else [NO_GPU]
        before, self._devices = self._devices, []
        for index, handle in enumerate(handles, start=self.first_index):
            self._devices += self._device_at(index, handle, before, problems)
        awake = [device for device in self._devices if not device.silent]
        links = self._links(awake)
        self.at_work = None
        return GpuList(
            infos=[device.info for device in awake], links=links,
            driver=driver_version(smi, awake[0].handle) if awake else None, problem=" ".join(problems) or None,
        )

    def read(self) -> list[GpuReading]:
        readings = []
        for device in self._devices:
            self.at_work = device.index
            readings.append(reading_of(self._smi, device, self._clock()))
        self.at_work = None
        self._stale = any(NOT_OPENED in reading.missing.values() for reading in readings)
        return readings

    def hardware(self) -> list[GpuHardware]:
        details = []
        for device in self._devices:
            if device.silent:
                continue
            self.at_work = device.index
            details.append(hardware_of(self._smi, device.handle, device.uuid))
        self.at_work = None
        return details

    def events(self) -> list[HealthEvent]:
        """None of its own: what the library tells by events blocks. What goes wrong is seen in the readings."""
        return []

    def set_mig(self, order: MigOrder) -> None:
        raise OrderFailed(f"GPU {order.gpu_uuid} is made by AMD and has no MIG: an administrator cuts it with "
                          "`amd-smi set --compute-partition`.")

    def _device_at(self, index: int, handle: Any, before: list[Device], problems: list[str]) -> list[Device]:
        """Other GPUs keep their index whatever happens to this one."""
        self.at_work = index
        reason = "timeout"
        if index not in self._skip:
            uuid = uuid_of(self._smi, handle)
            reason = self._vital_sign(handle) if uuid else LOST
            if uuid and not reason:
                return [self._made(index, handle, uuid, before)]
        known = next((device for device in before if device.index == index), None)
        called = f"GPU {index} ({known.uuid})" if known else f"GPU {index}"
        problems.append(f"{called} does not answer ({reason}): drain this node and reset the GPU, or reboot.")
        return [Device(known.uuid, index, None, known.info, reason, known.meter)] if known else []

    def _made(self, index: int, handle: Any, uuid: str, before: list[Device]) -> Device:
        twins = sum(device.uuid.partition("/")[0] == uuid for device in self._devices)
        if twins:  # the parts of a chip share its serial number
            uuid = f"{uuid}/{twins}"
        known = next((device for device in before if device.uuid == uuid), None)
        device = Device(uuid, index, handle, info_of(self._smi, handle, uuid, index))
        if known:
            device.meter = known.meter
        return device

    def _vital_sign(self, handle: Any) -> str:
        """Why it does not answer; empty if it does. Who it is, the library remembers of one that has left, too."""
        batch, probe = Probe(), Probe()
        batch("metrics", lambda: self._smi.amdsmi_get_gpu_metrics_info(handle))
        probe("memory_used_bytes", *memory_calls(self._smi, handle, "used"))
        return LOST if is_gone(batch, probe) else ""

    def _links(self, devices: list[Device]) -> list[Link]:
        """How each pair is joined. A pair that cannot be asked is left out."""
        found = []
        for a, b in combinations(devices, 2):
            self.at_work = a.index
            if kind := link_kind(self._smi, a.handle, b.handle):
                found.append(Link(a=a.uuid, b=b.uuid, kind=kind))
        return found


def link_kind(smi: Any, a: Any, b: Any) -> str | None:
    told = Probe()("kind", lambda: smi.amdsmi_topo_get_link_type(a, b)) or {}
    match told.get("type"):
        case smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI:
            return "XGMI"
        case smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_PCIE:
            # It counts GPU to processor, processor to processor, processor to GPU.
            hops = whole(told.get("hops"))
            return None if hops is None else "PHB" if hops <= SAME_HOST_HOPS else "SYS"
        case smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_INTERNAL:
            return "PIX"
    return None


def driver_version(smi: Any, handle: Any) -> str | None:
    probe = Probe()
    version = probe("driver", lambda: words(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"]))
    rocm = probe("rocm", lambda: rocm_version(smi))
    if version is None:
        return None
    return f"{version} (ROCm {rocm})" if rocm else version


def rocm_version(smi: Any) -> str | None:
    found, text = smi.amdsmi_get_rocm_version()
    return words(text) if found else None
