"""How an NVIDIA GPU is cut into MIG slices: what the driver offers, and what exists."""

import math
from ctypes import byref, c_uint
from dataclasses import dataclass
from functools import partial
from typing import Any

import pynvml

from wire.hardware import MigInstance, MigProfile, MigSlice, MigStatus
from workers.gpus.nvml_identity import mig_handles
from workers.gpus.nvml_values import Probe, text

MIB = 1 << 20
MEDIA_EXTRAS = {7, 11, 15}  # profiles that differ from another by their media engines
CUDA_WORDS = "MIG "


@dataclass(frozen=True, slots=True)
class GpuInstance:
    handle: Any
    id: int
    profile: str
    start: int
    size: int

    @property
    def slice(self) -> MigSlice:
        return MigSlice(self.profile, self.start)


class MigTables:
    """The profiles of one GPU. They do not change while its mode does not."""

    def __init__(self) -> None:
        self._profiles: list[MigProfile] = []

    def profiles(self, handle: Any) -> list[MigProfile]:
        if not self._profiles:
            numbers = range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
            self._profiles = [found for number in numbers if (found := profile_of(handle, number))]
        return self._profiles

    def named(self, handle: Any) -> dict[str, MigProfile]:
        return {profile.name: profile for profile in self.profiles(handle)}


def mig_status(handle: Any, tables: MigTables) -> MigStatus | None:
    """None for a board that cannot be cut."""
    mode = Probe()("mig", lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if mode is None:
        return None
    enabled, pending = bool(mode[0]), bool(mode[1])
    instances = instances_of(handle, tables) if enabled else []
    return MigStatus(enabled=enabled, pending=pending, profiles=tables.profiles(handle), instances=instances)


def profile_of(handle: Any, number: int) -> MigProfile | None:
    probe = Probe()
    info = probe("profile", lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number),
                 lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=1))
    if info is None:
        return None
    places = probe("placements", lambda: placements(handle, info.id)) or []
    return MigProfile(
        name=profile_name(info, number), id=info.id, slices=info.sliceCount,
        memory_bytes=info.memorySizeMB * MIB, instances_max=info.instanceCount,
        placements=[start for start, _ in places], size=places[0][1] if places else 1,
    )


def profile_name(info: Any, number: int) -> str:
    """Older drivers do not name it."""
    named = getattr(info, "name", b"")
    name = named.decode(errors="replace") if isinstance(named, bytes) else str(named)
    if name:
        return name.removeprefix(CUDA_WORDS)
    extra = "+me" if number in MEDIA_EXTRAS else ""
    return f"{info.sliceCount}g.{math.ceil(info.memorySizeMB / 1024)}gb{extra}"


def placements(handle: Any, profile_id: int) -> list[tuple[int, int]]:
    """-> (start, size); both in memory slices."""
    count = c_uint(0)
    try:
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, byref(count))
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
            raise
    if not count.value:
        return []
    found = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, found, byref(count))
    return sorted((one.start, one.size) for one in found[:count.value])


def gpu_instances(handle: Any, tables: MigTables) -> list[GpuInstance]:
    found = []
    for profile in tables.profiles(handle):
        room, count = (pynvml.c_nvmlGpuInstance_t * max(profile.instances_max, 1))(), c_uint(0)
        pynvml.nvmlDeviceGetGpuInstances(handle, profile.id, room, byref(count))
        for place in range(count.value):
            info = pynvml.nvmlGpuInstanceGetInfo(room[place])
            found.append(GpuInstance(room[place], info.id, profile.name, info.placement.start, info.placement.size))
    return sorted(found, key=lambda one: one.start)


def instances_of(handle: Any, tables: MigTables) -> list[MigInstance]:
    """The slices that a process can be given; a GPU instance without a compute instance is none."""
    names = {profile.id: profile.name for profile in tables.profiles(handle)}
    found = [instance for piece in mig_handles(handle) if (instance := instance_of(handle, piece, names))]
    return sorted(found, key=lambda one: (one.start, one.compute_instance))


def instance_of(parent: Any, piece: Any, names: dict[int, str]) -> MigInstance | None:
    probe = Probe()
    uuid = probe("uuid", partial(text, pynvml.nvmlDeviceGetUUID, piece))
    number = probe("gpu_instance", lambda: pynvml.nvmlDeviceGetGpuInstanceId(piece))
    compute = probe("compute_instance", lambda: pynvml.nvmlDeviceGetComputeInstanceId(piece))
    info = probe("info", lambda: pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(parent, number)))
    if uuid is None or number is None or compute is None or info is None:
        return None
    return MigInstance(
        uuid=uuid, profile=names.get(info.profileId, f"profile {info.profileId}"), start=info.placement.start,
        size=info.placement.size, gpu_instance=number, compute_instance=compute,
    )
