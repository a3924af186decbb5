"""The simulated GPUs of one node: their identity, and a load that follows the processes that hold them."""

import math
import time
import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.gpus import holders, procfs
from workers.gpus.boards import CATALOGUE, MIB, Board, Topology

NAMESPACE = uuids.UUID("5c1f0d0e-7f3c-4f53-9d0d-6f6a2c1f5b7e")
SCAN_EVERY_S = 0.5
CONTEXT_BYTES = 512 * MIB
"""What a CUDA context takes before the first tensor."""

RESIDENT_SCALE = 8
"""A process on the CPU holds far less than one on a GPU would; its resident memory is shown this many times larger."""

THERMAL_TIME_S = 20.0
IDLE_TEMPERATURE_C, LOADED_RISE_C = 31.0, 38.0
GIB_SLICES = 7

Scan = Callable[[frozenset[str]], list[holders.Holder]]


@dataclass(slots=True)
class Load:
    """What a device or a slice carries at the moment."""

    utilization: float = 0.0  # 0 … 1
    processes: list[tuple[int, int]] = field(default_factory=list)  # pid, bytes

    @property
    def used_bytes(self) -> int:
        return sum(size for _, size in self.processes)


@dataclass(slots=True)
class Slice:
    """A MIG slice."""

    uuid: str
    profile: str
    memory_bytes: int
    gpu: "Gpu"
    load: Load = field(default_factory=Load)


@dataclass(slots=True)
class Gpu:
    index: int
    uuid: str
    board: Board
    numa: int
    serial: str
    slices: list[Slice] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    temperature_c: float = IDLE_TEMPERATURE_C
    energy_mj: float = 0.0

    @property
    def bus(self) -> int:
        return 0x07 + 0x0C * self.index

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"

    @property
    def memory_bytes(self) -> int:
        return self.board.memory_mib * MIB

    @property
    def reserved_bytes(self) -> int:
        return self.board.reserved_mib * MIB

    @property
    def power_mw(self) -> int:
        idle, limit = self.board.idle_power_w * 1000, self.board.power_limit_w * 1000
        # Concave: half the load already draws most of the power.
        return round(idle + (limit - idle) * 0.95 * math.sqrt(self.load.utilization))

    @property
    def sm_clock_mhz(self) -> int:
        board = self.board
        if not self.load.processes:
            return board.idle_sm_clock_mhz
        return round(board.sm_clock_mhz * (1 - 0.12 * self.load.utilization))

    def pass_time(self, seconds: float) -> None:
        target = IDLE_TEMPERATURE_C + LOADED_RISE_C * self.load.utilization
        self.temperature_c += (target - self.temperature_c) * (1 - math.exp(-seconds / THERMAL_TIME_S))
        self.energy_mj += self.power_mw * seconds


class Machine:
    def __init__(
        self,
        topology: Topology,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        scan: Scan = holders.scan,
    ) -> None:
        self.topology = topology
        self.gpus = [new_gpu(topology, node, index) for index in range(len(topology.numa))]
        self.slices = [piece for gpu in self.gpus for piece in gpu.slices]
        self._targets: dict[str, Gpu | Slice] = {gpu.uuid: gpu for gpu in self.gpus}
        self._targets.update({piece.uuid: piece for piece in self.slices})
        self._clock, self._scan = clock, scan
        self._scanned_at: float | None = None
        self._cpu_ticks: dict[tuple[int, int], int] = {}

    def refresh(self) -> None:
        """Follows the processes. Cheap when called often."""
        now = self._clock()
        elapsed = None if self._scanned_at is None else now - self._scanned_at
        if elapsed is not None and elapsed < SCAN_EVERY_S:
            return
        for gpu in self.gpus:
            gpu.pass_time(elapsed or 0.0)
        self._scanned_at = now
        self._follow(self._scan(frozenset(self._targets)), elapsed)

    def _follow(self, found: list[holders.Holder], elapsed: float | None) -> None:
        for target in self._targets.values():
            target.load = Load()
        ticks = {(one.pid, one.stat.start_ticks): one.stat.cpu_ticks for one in found}
        for one in found:
            busy = self._busy(one, elapsed)
            size = CONTEXT_BYTES + RESIDENT_SCALE * one.stat.resident_bytes // len(one.uuids)
            for name in one.uuids:
                self._carry(self._targets[name], one.pid, busy, size)
        self._cpu_ticks = ticks

    def _busy(self, one: holders.Holder, elapsed: float | None) -> float:
        """Cores kept busy since the scan before, or since its start for a process that is new."""
        stat = one.stat
        before = self._cpu_ticks.get((one.pid, stat.start_ticks))
        if before is None or elapsed is None:
            before, elapsed = 0, procfs.uptime_s() - stat.start_ticks / procfs.CLOCK_TICKS
        return max(0, stat.cpu_ticks - before) / procfs.CLOCK_TICKS / max(elapsed, 0.1)

    def _carry(self, target: Gpu | Slice, pid: int, busy: float, size: int) -> None:
        load = target.load
        load.utilization = min(1.0, load.utilization + busy)
        room = target.memory_bytes - load.used_bytes
        if isinstance(target, Gpu):
            room -= target.reserved_bytes
        load.processes.append((pid, max(0, min(size, room))))
        if isinstance(target, Slice):
            share = int(target.profile[0]) / GIB_SLICES
            parent = target.gpu.load
            parent.utilization = min(1.0, parent.utilization + busy * share)
            parent.processes.append(load.processes[-1])


def new_gpu(topology: Topology, node: str, index: int) -> Gpu:
    board = CATALOGUE.boards[topology.board]
    name = uuids.uuid5(NAMESPACE, f"{node}/{board.name}/{index}")
    gpu = Gpu(index, f"GPU-{name}", board, topology.numa[index], serial=str(name.int % 10**13).zfill(13))
    for place, profile in enumerate(topology.mig.get(str(index), [])):
        uuid = f"MIG-{uuids.uuid5(NAMESPACE, f'{gpu.uuid}/{place}/{profile}')}"
        gpu.slices.append(Slice(uuid, profile, board.mig_memory_mib[profile] * MIB, gpu))
    return gpu
