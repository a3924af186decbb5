"""NVIDIA GPUs through NVML.

Every value is asked for by itself: one that fails is None with its reason, and hides no other.
Identity is the UUID; handles are only used between two enumerations.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pynvml

from wire.hardware import GpuHardware, HealthEvent, MigOrder
from wire.reports import GpuReading
from workers.gpus import nvml_cut
from workers.gpus.base import DriverUnavailable, GpuList, OrderFailed
from workers.gpus.nvml_events import EventFeed
from workers.gpus.nvml_hardware import Details
from workers.gpus.nvml_identity import (
    SWITCH,
    Device,
    cuda_version,
    info_of,
    links_between,
    mig_handles,
    nvlinks_of,
    slice_of,
    with_links,
)
from workers.gpus.nvml_meter import Meter
from workers.gpus.nvml_processes import Pids, ProcessList, pids_of_host
from workers.gpus.nvml_values import (
    LOST,
    RESET_REQUIRED,
    TROUBLE,
    UNKNOWN_ERROR,
    Probe,
    reason_of,
    text,
    unavailable,
)

SHADOWED = (
    "An old package named pynvml hides nvidia-ml-py: run `pip uninstall pynvml`, "
    "then `pip install --force-reinstall nvidia-ml-py`."
)
WORN = {LOST, RESET_REQUIRED, UNKNOWN_ERROR}
"""After these a GPU comes back, if it does, only in a library that was opened anew."""

RENEW_AFTER_S, RENEW_AFTER_MOST_S = 5.0, 300.0
INIT_COUNT_MOST = 16


class NvmlDriver:
    def __init__(self, skip: Collection[int] = (), clock: Callable[[], float] = time.time,
                 pids: Pids | None = None) -> None:
        self.at_work: int | None = None
        self._skip = frozenset(skip)
        self._clock = clock
        self._pids = pids or pids_of_host()
        self._devices: list[Device] = []
        self._meters: dict[str, Meter] = {}
        self._details: dict[str, Details] = {}
        self._feed = EventFeed(clock)
        self._started = False
        self._silences = set[str]()  # why GPUs did not answer, as of the last reading
        self._patience = RenewPatience()

    def start(self) -> None:
        if Path(pynvml.__file__ or "").name == "__init__.py":
            raise DriverUnavailable(SHADOWED)
        try:
            pynvml.nvmlInit()
        except TROUBLE as error:
            raise unavailable(error) from error
        self._started = True

    def close(self) -> None:
        """Down to the last reference: only then does the library let go of the devices."""
        self._feed.forget()
        self._devices = [replace(device, handle=None, silent=device.silent or "released") for device in self._devices]
        self._details = {}
        if self._started:
            self._started = False
            shut_down()

    def release(self) -> None:
        self.close()

    def renew(self) -> bool:
        if not self._patience.is_over(bool(self._silences & WORN), time.monotonic()):
            return False
        known = self._devices
        self.close()
        self.start()
        self._devices = known
        return True

    def enumerate(self) -> GpuList:
        try:
            count = pynvml.nvmlDeviceGetCount()
        except TROUBLE as error:
            raise unavailable(error) from error
        problems = [] if count else ["The NVIDIA driver is loaded but lists no GPU: look for Xid lines in `dmesg`."]
        before, self._devices, reasons = self._devices, [], dict[int, str]()
        for index in range(count):
            try:
                self._devices += self._devices_at(index, problems)
            except TROUBLE as error:
                reasons[index] = reason_of(error)
        self._devices = sorted(self._devices + silent_ones(before, self._devices, reasons, problems), key=place_of)
        self.at_work = None
        self._take_up()
        awake = [device for device in self._devices if not device.silent]
        whole = [device for device in awake if not device.is_slice]
        probe = Probe()
        return GpuList(
            infos=[device.info for device in awake], links=links_between(whole),
            nvswitch=any(link.active and link.remote_kind == SWITCH for device in whole for link in device.nvlinks),
            driver=probe("driver", lambda: text(pynvml.nvmlSystemGetDriverVersion)),
            cuda=probe("cuda", cuda_version),
            problem=" ".join(problems) or None,
        )

    def read(self) -> list[GpuReading]:
        readings = []
        for device in self._devices:
            self.at_work = device.index
            readings.append(self._meters[device.uuid].read())
        self.at_work = None
        self._silences = {reading.missing["gpu"] for reading in readings if "gpu" in reading.missing}
        return readings

    def hardware(self) -> list[GpuHardware]:
        found = []
        for device in self._devices:
            if device.uuid in self._details:
                self.at_work = device.index
                found.append(self._details[device.uuid].read())
        self.at_work = None
        return found

    def events(self) -> list[HealthEvent]:
        return self._feed.poll()

    def set_mig(self, order: MigOrder) -> None:
        device = next((one for one in self._devices if one.uuid == order.gpu_uuid and not one.is_slice), None)
        if device is None or device.silent:
            raise OrderFailed(f"GPU {order.gpu_uuid} does not answer on this node: MIG stays as it is.")
        self.at_work = device.index
        self._feed.forget()  # a set of events keeps the GPU in use
        try:
            nvml_cut.carry_out(device, order)
        finally:
            self.at_work = None

    def _take_up(self) -> None:
        """What is remembered of a GPU outlives its handle; what it refused is asked again."""
        meters = {}
        for device in self._devices:
            meter = self._meters.get(device.uuid)
            if meter is None:
                meter = Meter(device, ProcessList(self._pids), self._clock)
            else:
                meter.renew(device)
            meters[device.uuid] = meter
        self._meters = meters
        self._details = {device.uuid: Details(device) for device in self._devices
                         if not device.silent and not device.is_slice}
        self._feed.register(self._devices)

    def _devices_at(self, index: int, problems: list[str]) -> list[Device]:
        """The GPU at an index, and its slices. Raises for one that does not answer."""
        self.at_work = index
        if index in self._skip:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text(pynvml.nvmlDeviceGetUUID, handle)
        links = nvlinks_of(handle)
        info = with_links(info_of(handle, uuid, index), links)
        whole = Device(uuid, index, handle, info, nvlinks=links)
        if not info.mig_enabled:
            return [whole]
        slices = [found for piece in mig_handles(handle) if (found := slice_of(info, piece))]
        if not slices:
            problems.append(f"{whole.label} has MIG on but no slice: create some, or switch MIG off.")
        return [whole, *slices]


def silent_ones(before: list[Device], awake: list[Device], reasons: dict[int, str], problems: list[str]
                ) -> list[Device]:
    """GPUs that were there and are not found any more keep their index, and so do all others."""
    found = {device.uuid for device in awake}
    gone = [device for device in before if device.uuid not in found and device.info.parent_uuid not in found]
    silent = [replace(device, handle=None, silent=reasons.get(device.index, LOST)) for device in gone]
    called = {device.index: f"GPU {device.index}" for device in silent} | {index: f"GPU {index}" for index in reasons}
    called |= {device.index: device.label for device in silent if not device.is_slice}
    for index in sorted(called):
        problems.append(f"{called[index]} does not answer ({reasons.get(index, LOST)}): "
                        "drain this node and reset the GPU, or reboot.")
    return silent


def place_of(device: Device) -> int:
    return device.index


def shut_down() -> None:
    """The library counts how often it was opened."""
    for _ in range(INIT_COUNT_MOST):
        try:
            pynvml.nvmlShutdown()
        except TROUBLE:
            return


class RenewPatience:
    """Opening the library anew may take seconds, so it is done ever more rarely while it does not help."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._renewed_at = float("-inf")

    def is_over(self, is_worn: bool, now: float) -> bool:
        if not is_worn:
            self._wait_s = 0.0
            return False
        if now - self._renewed_at < self._wait_s:
            return False
        self._renewed_at = now
        self._wait_s = min(max(RENEW_AFTER_S, 2 * self._wait_s), RENEW_AFTER_MOST_S)
        return True
