"""What the NVIDIA driver tells by itself: Xid errors, double-bit ECC errors, and what it wants done about them."""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from wire.hardware import HealthEvent
from workers.gpus.nvml_identity import Device
from workers.gpus.nvml_values import TROUBLE, Probe, reason_of, text

XID = pynvml.nvmlEventTypeXidCriticalError
DOUBLE_BIT = pynvml.nvmlEventTypeDoubleBitEccError
RECOVERY_ACTION = 0x8000
WANTED = (XID, DOUBLE_BIT, RECOVERY_ACTION)
KINDS = {XID: "xid", DOUBLE_BIT: "ecc", RECOVERY_ACTION: "recovery"}
AT_ONCE = 256
NO_INSTANCE = 0xFFFFFFFF
MESSAGES = {
    XID: "The driver reports Xid {code}",
    DOUBLE_BIT: "The driver reports an uncorrectable memory error",
    RECOVERY_ACTION: "The driver asks for recovery action {code}",
}


class EventFeed:
    """One set of events for all GPUs, polled. A driver that has none (vGPU, WSL) gives none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._set: Any = None
        self._registered: set[str] = set()
        self._by_address: dict[int | None, Device] = {}

    def register(self, devices: Iterable[Device]) -> None:
        """Each GPU once for the life of the set; GPUs that were lost and came back are registered again."""
        for device in devices:
            if device.silent:
                self._registered.discard(device.uuid)
            elif not device.is_slice and device.uuid not in self._registered and self._register(device):
                self._registered.add(device.uuid)
                self._by_address[address(device.handle)] = device

    def poll(self) -> list[HealthEvent]:
        events: list[HealthEvent] = []
        while self._set is not None and len(events) < AT_ONCE:
            try:
                raw = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except TROUBLE as error:
                if reason_of(error) != "timeout":
                    self.forget()  # until the next enumeration registers all of them again
                break
            if event := self._event(raw):
                events.append(event)
        return events

    def forget(self) -> None:
        if self._set is not None:
            Probe()("free", lambda: pynvml.nvmlEventSetFree(self._set))
        self._set, self._registered, self._by_address = None, set(), {}

    def _register(self, device: Device) -> bool:
        probe = Probe()
        supported = probe("events", lambda: pynvml.nvmlDeviceGetSupportedEventTypes(device.handle)) or 0
        kinds = sum(kind for kind in WANTED if supported & kind)
        if not kinds:
            return False
        if self._set is None:
            self._set = probe("set", pynvml.nvmlEventSetCreate)
        if self._set is None:
            return False
        try:
            pynvml.nvmlDeviceRegisterEvents(device.handle, kinds, self._set)
        except TROUBLE:
            return False
        return True

    def _event(self, raw: Any) -> HealthEvent | None:
        if raw.eventType not in KINDS:
            return None
        # A GPU that is lost cannot be asked for its name any more, and that is what it has to tell.
        device = self._by_address.get(address(raw.device))
        uuid = device.uuid if device else Probe()("uuid", lambda: text(pynvml.nvmlDeviceGetUUID, raw.device))
        code = int(raw.eventData) if raw.eventType != DOUBLE_BIT else None
        at, kind = self._clock(), KINDS[raw.eventType]
        message = MESSAGES[raw.eventType].format(code=code)
        if raw.gpuInstanceId != NO_INSTANCE:
            message += f" in MIG instance {raw.gpuInstanceId}"
        return HealthEvent(
            at=at, key=f"{kind}/{uuid}/{code}/{round(at * 1000)}", kind=kind, gpu_uuid=uuid,
            pci_bus_id=device.info.pci_bus_id if device else None, code=code, message=f"{message}.", source="nvml",
        )


def address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
