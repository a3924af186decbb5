"""Cutting an NVIDIA GPU by order: the wanted layout, or the one that was there before."""

from collections.abc import Iterable
from ctypes import byref, c_uint
from typing import Any

import pynvml

from wire.hardware import MigOrder, MigSlice
from workers.gpus.base import OrderFailed
from workers.gpus.nvml_identity import Device, mig_handles
from workers.gpus.nvml_mig import GpuInstance, MigTables, gpu_instances
from workers.gpus.nvml_processes import listings
from workers.gpus.nvml_values import TROUBLE, Probe

WHY = {
    pynvml.NVML_ERROR_NO_PERMISSION: "the node agent needs root to change MIG",
    pynvml.NVML_ERROR_IN_USE: "something still uses it",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "there is no room for it",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the board or its driver does not support it",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost",
}


class NeedsReset(OrderFailed):
    """Nothing to undo: the mode waits for a reset."""


def carry_out(device: Device, order: MigOrder) -> None:
    cutter = Cutter(device)
    cutter.check_free()
    cutter.cut(set(order.layout))


class Cutter:
    def __init__(self, device: Device) -> None:
        self._handle, self._label = device.handle, device.label
        self._bus_id = device.info.pci_bus_id or device.uuid
        self._tables = MigTables()

    def check_free(self) -> None:
        pids = sorted({pid for handle in [self._handle, *mig_handles(self._handle)] for pid in users_of(handle)})
        if pids:
            raise OrderFailed(f"{self._label} is in use by {'process' if len(pids) == 1 else 'processes'} "
                              f"{', '.join(map(str, pids))}: end {'it' if len(pids) == 1 else 'them'} first.")

    def cut(self, wanted: set[MigSlice]) -> None:
        was_on, former = False, set[MigSlice]()
        try:
            was_on = self._is_on()
            former = self._layout() if was_on else former
            self._become(wanted)
        except NeedsReset:
            raise
        except (*TROUBLE, OrderFailed) as error:
            sentence = str(error) if isinstance(error, OrderFailed) else f"{self._label} cannot be cut: {why(error)}."
            raise self._undo(was_on, former, sentence) from error

    def _become(self, wanted: set[MigSlice]) -> None:
        if wanted and not self._is_on():
            self._switch(True)
        if self._is_on():
            self._replace(wanted)
        if not wanted and self._is_on():
            self._switch(False)

    def _replace(self, wanted: set[MigSlice]) -> None:
        kept = set()
        for instance in self._instances():
            if instance.slice in wanted and self._compute_instances(instance.handle):
                kept.add(instance.slice)
            else:
                self._destroy(instance)
        for piece in sorted(wanted - kept, key=lambda one: one.start):
            self._create(piece)
        if (made := self._layout()) != wanted:
            raise OrderFailed(f"{self._label} was to be cut into {listed(wanted)}, the driver lists {listed(made)}.")

    def _undo(self, was_on: bool, former: set[MigSlice], sentence: str) -> OrderFailed:
        try:
            if self._is_on():
                self._replace(former if was_on else set())
            if self._is_on() != was_on:
                self._switch(was_on)
                self._replace(former)
        except (*TROUBLE, OrderFailed) as error:
            return OrderFailed(f"{sentence} The former layout ({listed(former)}) could not be brought back either: "
                               f"{error if isinstance(error, OrderFailed) else why(error)}.")
        return OrderFailed(f"{sentence} The former layout ({listed(former)}) is back.", undone=True)

    def _is_on(self) -> bool:
        return bool(pynvml.nvmlDeviceGetMigMode(self._handle)[0])

    def _switch(self, on: bool) -> None:
        """On most boards at once when nobody uses the GPU, on some only by a reset."""
        pynvml.nvmlDeviceSetMigMode(self._handle, int(on))
        self._tables = MigTables()
        if self._is_on() == on:
            return
        raise NeedsReset(
            f"MIG of {self._label} will be {'on' if on else 'off'} after the GPU's next reset: release the driver on "
            f"this node, run `nvidia-smi --gpu-reset -i {self._bus_id}` (or reboot), then give the order again.")

    def _instances(self) -> list[GpuInstance]:
        return gpu_instances(self._handle, self._tables)

    def _layout(self) -> set[MigSlice]:
        return {instance.slice for instance in self._instances()}

    def _create(self, piece: MigSlice) -> None:
        profile = self._tables.named(self._handle).get(piece.profile)
        if profile is None or piece.start not in profile.placements:
            offered = ", ".join(sorted(self._tables.named(self._handle))) or "none"
            raise OrderFailed(f"{self._label} has no place {piece.start} for {piece.profile}; its profiles: {offered}.")
        place = pynvml.c_nvmlGpuInstancePlacement_t(start=piece.start, size=profile.size)
        try:
            made = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(self._handle, profile.id, byref(place))
            pynvml.nvmlGpuInstanceCreateComputeInstance(made, whole_compute_profile(made).id)
        except TROUBLE as error:
            raise OrderFailed(f"{self._label}: {piece.profile} at {piece.start} cannot be made: {why(error)}."
                              ) from error

    def _destroy(self, instance: GpuInstance) -> None:
        try:
            for compute in self._compute_instances(instance.handle):
                pynvml.nvmlComputeInstanceDestroy(compute)
            pynvml.nvmlGpuInstanceDestroy(instance.handle)
        except TROUBLE as error:
            raise OrderFailed(f"{self._label}: {instance.profile} at {instance.start} cannot be removed: {why(error)}."
                              ) from error

    def _compute_instances(self, gpu_instance: Any) -> list[Any]:
        found: list[Any] = []
        for profile in compute_profiles(gpu_instance):
            room, count = (pynvml.c_nvmlComputeInstance_t * max(profile.instanceCount, 1))(), c_uint(0)
            pynvml.nvmlGpuInstanceGetComputeInstances(gpu_instance, profile.id, room, byref(count))
            found += room[:count.value]
        return found


def compute_profiles(gpu_instance: Any) -> list[Any]:
    shared, probe = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, Probe()
    get = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    found = [probe(f"profile {number}", lambda number=number: get(gpu_instance, number, shared),  # type: ignore[misc]
                   lambda number=number: get(gpu_instance, number, shared, version=1))  # type: ignore[misc]
             for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)]
    return [one for one in found if one is not None]


def whole_compute_profile(gpu_instance: Any) -> Any:
    """The one that takes all of the GPU instance."""
    profiles = compute_profiles(gpu_instance)
    if not profiles:
        raise OrderFailed("The driver offers no compute instance for it.")
    return max(profiles, key=lambda one: one.sliceCount)


def users_of(handle: Any) -> list[int]:
    probe = Probe()
    lists = [probe(kind, *listings(handle, kind)) for kind in ("Compute", "MPSCompute", "Graphics")]
    return [one.pid for found in lists if found for one in found]


def why(error: Exception) -> str:
    code = error.value if isinstance(error, pynvml.NVMLError) else None
    return WHY.get(code, str(error))


def listed(layout: Iterable[MigSlice]) -> str:
    ordered = sorted(layout, key=lambda one: one.start)
    return ", ".join(f"{one.profile} at {one.start}" for one in ordered) or "no slices"
