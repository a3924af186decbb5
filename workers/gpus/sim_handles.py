"""Handles of the simulated library, and the shapes that most of its calls have.

A handle is a number that says what it means: which GPU, and which instance of it. One that is stale is so by itself.
"""

from collections.abc import Callable
from typing import Any

from workers.gpus.arguments import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Refusal,
    address,
    behind,
    plain,
    point,
    write_text,
)
from workers.gpus.machine import Machine
from workers.gpus.partitions import ComputeInstance, GpuInstance
from workers.gpus.sim_gpu import Gpu, Slice

HANDLE_STEP = 0x1000
"""Between two GPUs. Below it: the kind in the higher byte, the GPU and compute instance in the lower."""

DEVICE, MIG_DEVICE, GPU_INSTANCE, COMPUTE_INSTANCE = range(4)
COMPUTES = 8  # of one GPU instance, at most

Device = Gpu | Slice

Symbol = Callable[..., Any]
"""Returns a code, or None for success."""


class Handles:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._gpus = {HANDLE_STEP * (gpu.index + 1): gpu for gpu in machine.gpus}

    def of(self, device: Device) -> int:
        if isinstance(device, Gpu):
            return HANDLE_STEP * (device.index + 1)
        return number(device.gpu, MIG_DEVICE, device.instance, device.compute)

    def give(self, argument: Any, device: Device) -> None:
        point(argument, self.of(device))

    def device(self, handle: Any) -> Device:
        self.machine.refresh()
        where = address(handle) or 0
        gpu = self._gpus.get(where)
        if gpu is not None:
            return gpu
        owner, kind, instance, compute = self._parts(where)
        if kind == MIG_DEVICE:
            for piece in owner.slices:
                if (piece.instance, piece.compute) == (instance, compute):
                    return piece
        raise Refusal(INVALID_ARGUMENT)

    def gpu(self, handle: Any) -> Gpu:
        """A whole GPU: most of NVML does not answer for slices."""
        device = self.device(handle)
        if isinstance(device, Slice):
            raise Refusal(NOT_SUPPORTED)
        return device

    def slice(self, handle: Any) -> Slice:
        device = self.device(handle)
        if isinstance(device, Gpu):
            raise Refusal(INVALID_ARGUMENT)
        return device

    def instance(self, handle: Any) -> tuple[Gpu, GpuInstance]:
        gpu, kind, instance, _ = self._parts(address(handle) or 0)
        if kind != GPU_INSTANCE or instance not in gpu.partition.instances:
            raise Refusal(INVALID_ARGUMENT)
        return gpu, gpu.partition.instances[instance]

    def compute(self, handle: Any) -> tuple[Gpu, GpuInstance, ComputeInstance]:
        gpu, kind, instance, compute = self._parts(address(handle) or 0)
        if kind != COMPUTE_INSTANCE or instance not in gpu.partition.instances:
            raise Refusal(INVALID_ARGUMENT)
        found = gpu.partition.instances[instance]
        if compute not in found.computes:
            raise Refusal(INVALID_ARGUMENT)
        return gpu, found, found.computes[compute]

    def names(self, handle: Any) -> tuple[int | str, ...]:
        """What the GPU that a call is about may be called in a fault."""
        where = address(handle) or 0
        gpu = self._gpus.get(where - where % HANDLE_STEP)
        if gpu is None:
            return ()
        if where % HANDLE_STEP == 0:
            return (gpu.index, gpu.uuid)
        _, _, instance, compute = self._parts(where)
        uuids = [piece.uuid for piece in gpu.slices if (piece.instance, piece.compute) == (instance, compute)]
        return (*uuids, gpu.index, gpu.uuid)

    def by_index(self, index: Any, out: Any) -> None:
        if not 0 <= plain(index) < len(self.machine.gpus):
            raise Refusal(INVALID_ARGUMENT)
        self.give(out, self.machine.gpus[plain(index)])

    def by_uuid(self, uuid: Any, out: Any) -> None:
        found = self.machine.by_uuid((plain(uuid) or b"").decode(errors="replace"))
        if found is None:
            raise Refusal(NOT_FOUND)
        self.give(out, found)

    def by_pci(self, bus_id: Any, out: Any) -> None:
        wanted = (plain(bus_id) or b"").decode(errors="replace").upper()
        for gpu in self.machine.gpus:
            if wanted and gpu.bus_id.endswith(wanted):
                return self.give(out, gpu)
        raise Refusal(NOT_FOUND)

    # Shapes of calls.

    def number(self, getter: Callable[[Gpu], int]) -> Symbol:
        def symbol(handle: Any, out: Any) -> None:
            behind(out).value = getter(self.gpu(handle))
        return symbol

    def constant(self, value: int) -> Symbol:
        return self.number(lambda _gpu: value)

    def numbers(self, getter: Callable[[Gpu], tuple[int, ...]]) -> Symbol:
        def symbol(handle: Any, *outs: Any) -> None:
            for out, value in zip(outs, getter(self.gpu(handle)), strict=True):
                behind(out).value = value
        return symbol

    def text(self, getter: Callable[[Device], str | None]) -> Symbol:
        def symbol(handle: Any, buffer: Any, size: Any) -> int | None:
            value = getter(self.device(handle))
            return NOT_SUPPORTED if value is None else write_text(buffer, size, value.encode())
        return symbol

    def _parts(self, where: int) -> tuple[Gpu, int, int, int]:
        gpu = self._gpus.get(where - where % HANDLE_STEP)
        if gpu is None:
            raise Refusal(INVALID_ARGUMENT)
        kind, rest = divmod(where % HANDLE_STEP, 0x100)
        return gpu, kind, *divmod(rest, COMPUTES)


def number(gpu: Gpu, kind: int, instance: int, compute: int = 0) -> int:
    return HANDLE_STEP * (gpu.index + 1) + 0x100 * kind + COMPUTES * instance + compute
