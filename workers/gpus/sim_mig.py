"""Symbols of the simulated library: MIG, from its mode over instances of the GPU to slices that are devices."""

from typing import Any

from workers.gpus.arguments import (
    IN_USE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Refusal,
    behind,
    fill,
    plain,
    point,
    point_at,
    point_member,
    put,
)
from workers.gpus.boards import MigProfile
from workers.gpus.partitions import COMPUTE_OF, COMPUTE_PROFILES, ComputeInstance, GpuInstance, compute_slices
from workers.gpus.sim_gpu import Slice
from workers.gpus.sim_handles import COMPUTE_INSTANCE, GPU_INSTANCE, Handles, Symbol, number

PROFILE_COUNT = 18
COMPUTE_PROFILE_COUNT = 9
SUCCESS = 0


def symbols(handles: Handles) -> dict[str, Symbol]:
    return (mode_symbols(handles) | profile_symbols(handles) | instance_symbols(handles)
            | compute_profile_symbols(handles) | compute_symbols(handles) | device_symbols(handles))


def mode_symbols(handles: Handles) -> dict[str, Symbol]:
    def get(handle: Any, current: Any, pending: Any) -> None:
        for out, mode in zip((current, pending), handles.gpu(handle).partition.modes(), strict=True):
            put(out, int(mode))

    def change(handle: Any, mode: Any, status: Any) -> None:
        """The call succeeds although the mode may wait: `status` says so."""
        gpu = handles.gpu(handle)
        if plain(mode) not in (0, 1):
            raise Refusal(INVALID_ARGUMENT)
        applied = gpu.partition.set_mode(bool(plain(mode)), busy=handles.machine.is_held(gpu))
        put(status, SUCCESS if applied else IN_USE)
        handles.machine.recut(gpu)

    return {"nvmlDeviceGetMigMode": get, "nvmlDeviceSetMigMode": change}


def profile_symbols(handles: Handles) -> dict[str, Symbol]:
    def by_constant(handle: Any, constant: Any, out: Any) -> None:
        gpu = handles.gpu(handle)
        if not 0 <= plain(constant) < PROFILE_COUNT:
            raise Refusal(INVALID_ARGUMENT)
        profiles = gpu.partition.table.profiles if gpu.partition.table else []
        describe(next((one for one in profiles if one.constant == plain(constant)), None), out)

    def by_id(handle: Any, profile_id: Any, out: Any) -> None:
        describe(handles.gpu(handle).partition.profile(plain(profile_id)), out)

    def placements(handle: Any, profile_id: Any, out: Any, count: Any) -> None:
        profile = handles.gpu(handle).partition.profile(plain(profile_id))
        put(count, len(profile.starts))
        for place, start in enumerate(profile.starts if out is not None else ()):
            fill(behind(out)[place], start=start, size=profile.size)

    def remaining(handle: Any, profile_id: Any, out: Any) -> None:
        put(out, handles.gpu(handle).partition.remaining(plain(profile_id)))

    return {
        "nvmlDeviceGetGpuInstanceProfileInfo": by_constant,
        "nvmlDeviceGetGpuInstanceProfileInfoV": by_constant,
        "nvmlDeviceGetGpuInstanceProfileInfoByIdV": by_id,
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2": placements,
        "nvmlDeviceGetGpuInstanceRemainingCapacity": remaining,
    }


def instance_symbols(handles: Handles) -> dict[str, Symbol]:
    def create(handle: Any, profile_id: Any, *rest: Any) -> None:
        """With a placement in front of the answer, or without."""
        gpu = handles.gpu(handle)
        start = behind(rest[0]).start if len(rest) == 2 else None
        made = gpu.partition.create(plain(profile_id), start)
        point(rest[-1], number(gpu, GPU_INSTANCE, made.id))
        handles.machine.recut(gpu)

    def destroy(handle: Any) -> None:
        gpu, one = handles.instance(handle)
        gpu.partition.destroy(one.id)
        handles.machine.recut(gpu)

    def listed(handle: Any, profile_id: Any, out: Any, count: Any) -> None:
        gpu = handles.gpu(handle)
        profile = gpu.partition.profile(plain(profile_id))
        found = [one for one in gpu.partition.instances.values() if one.profile.id == profile.id]
        for place, one in enumerate(found):
            point_at(out, place, number(gpu, GPU_INSTANCE, one.id))
        put(count, len(found))

    def by_id(handle: Any, instance_id: Any, out: Any) -> None:
        gpu = handles.gpu(handle)
        point(out, number(gpu, GPU_INSTANCE, gpu.partition.instance(plain(instance_id)).id))

    def info(handle: Any, out: Any) -> None:
        gpu, one = handles.instance(handle)
        struct = behind(out)
        fill(struct, id=one.id, profileId=one.profile.id)
        fill(struct.placement, start=one.start, size=one.profile.size)
        point_member(struct, "device", handles.of(gpu))

    return {
        "nvmlDeviceCreateGpuInstance": create,
        "nvmlDeviceCreateGpuInstanceWithPlacement": create,
        "nvmlGpuInstanceDestroy": destroy,
        "nvmlDeviceGetGpuInstances": listed,
        "nvmlDeviceGetGpuInstanceById": by_id,
        "nvmlGpuInstanceGetInfo": info,
    }


def compute_profile_symbols(handles: Handles) -> dict[str, Symbol]:
    def info(handle: Any, profile: Any, _engine: Any, out: Any) -> None:
        _, one = handles.instance(handle)
        if not 0 <= plain(profile) < COMPUTE_PROFILE_COUNT:
            raise Refusal(INVALID_ARGUMENT)
        if plain(profile) not in COMPUTE_OF[one.profile.slices]:
            raise Refusal(NOT_SUPPORTED)
        describe_compute(one, plain(profile), out)

    def placements(handle: Any, profile: Any, out: Any, count: Any) -> None:
        _, one = handles.instance(handle)
        slices = compute_slices(one, plain(profile))
        starts = range(0, one.profile.slices - slices + 1, slices)
        put(count, len(starts))
        for place, start in enumerate(starts if out is not None else ()):
            fill(behind(out)[place], start=start, size=slices)

    def remaining(handle: Any, profile: Any, out: Any) -> None:
        _, one = handles.instance(handle)
        put(out, len(one.free_starts(compute_slices(one, plain(profile)))))

    return {
        "nvmlGpuInstanceGetComputeInstanceProfileInfo": info,
        "nvmlGpuInstanceGetComputeInstanceProfileInfoV": info,
        "nvmlGpuInstanceGetComputeInstancePossiblePlacements": placements,
        "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": remaining,
    }


def compute_symbols(handles: Handles) -> dict[str, Symbol]:
    def create(handle: Any, profile: Any, *rest: Any) -> None:
        gpu, one = handles.instance(handle)
        start = behind(rest[0]).start if len(rest) == 2 else None
        made = gpu.partition.create_compute(one.id, plain(profile), start)
        point(rest[-1], number(gpu, COMPUTE_INSTANCE, one.id, made.id))
        handles.machine.recut(gpu)

    def destroy(handle: Any) -> None:
        gpu, one, part = handles.compute(handle)
        piece = next(piece for piece in gpu.slices if (piece.instance, piece.compute) == (one.id, part.id))
        if handles.machine.is_held(piece):
            raise Refusal(IN_USE)
        gpu.partition.destroy_compute(one.id, part.id)
        handles.machine.recut(gpu)

    def listed(handle: Any, profile: Any, out: Any, count: Any) -> None:
        gpu, one = handles.instance(handle)
        compute_slices(one, plain(profile))
        found = [part for part in one.computes.values() if part.profile == plain(profile)]
        for place, part in enumerate(found):
            point_at(out, place, number(gpu, COMPUTE_INSTANCE, one.id, part.id))
        put(count, len(found))

    def by_id(handle: Any, compute_id: Any, out: Any) -> None:
        gpu, one = handles.instance(handle)
        part = gpu.partition.compute(one.id, plain(compute_id))
        point(out, number(gpu, COMPUTE_INSTANCE, one.id, part.id))

    def info(handle: Any, out: Any) -> None:
        gpu, one, part = handles.compute(handle)
        struct = behind(out)
        fill(struct, id=part.id, profileId=part.profile)
        fill(struct.placement, start=part.start, size=part.slices)
        point_member(struct, "device", handles.of(gpu))
        point_member(struct, "gpuInstance", number(gpu, GPU_INSTANCE, one.id))

    return {
        "nvmlGpuInstanceCreateComputeInstance": create,
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement": create,
        "nvmlComputeInstanceDestroy": destroy,
        "nvmlGpuInstanceGetComputeInstances": listed,
        "nvmlGpuInstanceGetComputeInstanceById": by_id,
        "nvmlComputeInstanceGetInfo_v2": info,
    }


def device_symbols(handles: Handles) -> dict[str, Symbol]:
    def most(handle: Any, out: Any) -> None:
        partition = handles.gpu(handle).partition
        put(out, partition.table.slices if partition.enabled and partition.table else 0)

    def by_index(handle: Any, index: Any, out: Any) -> None:
        gpu = handles.gpu(handle)
        if not gpu.partition.enabled:
            raise Refusal(NOT_SUPPORTED if gpu.partition.table is None else NOT_FOUND)
        piece = next((piece for piece in gpu.slices if piece.position == plain(index)), None)
        if piece is None:
            raise Refusal(NOT_FOUND)
        handles.give(out, piece)

    def attributes(handle: Any, out: Any) -> None:
        piece = handles.device(handle)
        if not isinstance(piece, Slice):
            raise Refusal(NOT_SUPPORTED)
        describe_device(piece, out)

    return {
        "nvmlDeviceGetMaxMigDeviceCount": most,
        "nvmlDeviceGetMigDeviceHandleByIndex": by_index,
        "nvmlDeviceIsMigDeviceHandle": lambda handle, out: put(out, int(isinstance(handles.device(handle), Slice))),
        "nvmlDeviceGetGpuInstanceId": lambda handle, out: put(out, handles.slice(handle).instance),
        "nvmlDeviceGetComputeInstanceId": lambda handle, out: put(out, handles.slice(handle).compute),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle, out: handles.give(
            out, handles.slice(handle).gpu),
        "nvmlDeviceGetAttributes_v2": attributes,
    }


def describe(profile: MigProfile | None, out: Any) -> None:
    if profile is None:
        raise Refusal(NOT_SUPPORTED)
    struct = behind(out)
    fill(struct, id=profile.id, isP2pSupported=0, sliceCount=profile.slices, instanceCount=profile.instances_max,
         multiprocessorCount=profile.multiprocessors, copyEngineCount=profile.copy_engines,
         decoderCount=profile.decoders, encoderCount=0, jpegCount=profile.jpeg, ofaCount=profile.ofa,
         memorySizeMB=profile.memory_mib)
    if hasattr(struct, "version"):
        struct.name = f"MIG {profile.name}".encode()


def describe_compute(one: GpuInstance, profile: int, out: Any) -> None:
    slices, struct = COMPUTE_PROFILES[profile], behind(out)
    fill(struct, id=profile, sliceCount=slices, instanceCount=one.profile.slices // slices,
         multiprocessorCount=multiprocessors(one, slices), sharedCopyEngineCount=one.profile.copy_engines,
         sharedDecoderCount=one.profile.decoders, sharedEncoderCount=0, sharedJpegCount=one.profile.jpeg,
         sharedOfaCount=one.profile.ofa)
    if hasattr(struct, "version"):
        struct.name = f"MIG {one.name_of(ComputeInstance(0, profile, 0, slices))}".encode()


def describe_device(piece: Slice, out: Any) -> None:
    one = piece.gpu.partition.instance(piece.instance)
    part = one.computes[piece.compute]
    fill(out, multiprocessorCount=multiprocessors(one, part.slices), sharedCopyEngineCount=one.profile.copy_engines,
         sharedDecoderCount=one.profile.decoders, sharedEncoderCount=0, sharedJpegCount=one.profile.jpeg,
         sharedOfaCount=one.profile.ofa, gpuInstanceSliceCount=one.profile.slices,
         computeInstanceSliceCount=part.slices, memorySizeMB=one.profile.memory_mib)


def multiprocessors(one: GpuInstance, slices: int) -> int:
    return one.profile.multiprocessors * slices // one.profile.slices
