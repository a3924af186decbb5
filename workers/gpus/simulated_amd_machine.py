"""The simulated AMD GPUs of one node. Their load follows the processes that were given them."""

import math
import time
import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.gpus import holders, procfs
from workers.gpus.amd_boards import AMD_CATALOGUE, AmdBoard, AmdTopology

NAMESPACE = uuids.UUID("8b6fbb1d-3f0a-4a61-8a2e-0f2f4a9c7d11")
SCAN_EVERY_S = 0.5
MIB, KIB = 1 << 20, 1 << 10
CONTEXT_BYTES = 640 * MIB
"""What a HIP context takes before the first tensor."""

RESIDENT_SCALE = 8
"""A process on the CPU holds far less than one on a GPU would; its resident memory is shown this many times larger."""

THERMAL_TIME_S = 25.0
IDLE_TEMPERATURE_C, LOADED_RISE_C, MEMORY_RISE_C = 38.0, 42.0, 5.0
TICKS_PER_S = 1000.0
CAPPED_FROM = 0.97
STUCK_SHARE = 0.6
LINK_SHARE = 0.3
"""Of an XGMI link that busy GPUs of one team use."""

Scan = Callable[[frozenset[str]], list[holders.Holder]]


@dataclass(frozen=True, slots=True)
class AmdCondition:
    """What a scripted fault does to a GPU as long as it lasts."""

    hot: bool = False
    slow_link: bool = False
    memory_stuck: bool = False
    bad_pids: bool = False
    links_down: frozenset[int] = frozenset()
    hidden: frozenset[str] = frozenset()  # of the table that is read in one go


@dataclass(slots=True)
class AmdGpu:
    index: int
    uuid: str
    serial: int
    board: AmdBoard
    numa: int
    link_ends: list[int]
    utilization: float = 0.0  # 0 … 1
    processes: list[tuple[int, int]] = field(default_factory=list)  # pid, bytes
    mates: frozenset[int] = frozenset()  # other GPUs of the teams on it
    temperature_c: float = IDLE_TEMPERATURE_C
    energy_j: float = 1e6
    ticks: float = 0.0
    capped_ticks: float = 0.0
    hot_ticks: float = 0.0
    link_kib: list[float] = field(default_factory=list)  # each way
    condition: AmdCondition = AmdCondition()
    corrected: int = 0
    uncorrected: int = 0
    bad_pages: list[int] = field(default_factory=list)  # their states

    def __post_init__(self) -> None:
        self.link_kib = self.link_kib or [0.0] * len(self.link_ends)

    @property
    def bus_id(self) -> str:
        return f"0000:{0x0C + 0x10 * self.index:02x}:00.0"

    @property
    def reports_power(self) -> bool:
        """The first die tells for the card."""
        return self.index % self.board.dies == 0

    @property
    def memory_bytes(self) -> int:
        return self.board.memory_mib * MIB

    @property
    def used_bytes(self) -> int:
        used = sum(size for _, size in self.processes)
        return max(used, round(self.memory_bytes * STUCK_SHARE)) if self.condition.memory_stuck else used

    @property
    def power_w(self) -> float:
        """Its part of the card's. Concave: half the load already draws most of the power."""
        idle, most = self.board.idle_power_w, self.board.power_cap_w
        return (idle + (most - idle) * 0.95 * math.sqrt(self.utilization)) / self.board.dies

    @property
    def sm_clock_mhz(self) -> int:
        board = self.board
        if not self.processes:
            return board.idle_sm_clock_mhz
        return round(board.sm_clock_mhz * (0.5 if self.condition.hot else 1 - 0.1 * self.utilization))

    def pass_time(self, seconds: float) -> None:
        target = IDLE_TEMPERATURE_C + LOADED_RISE_C * self.utilization
        self.temperature_c += (target - self.temperature_c) * (1 - math.exp(-seconds / THERMAL_TIME_S))
        self.energy_j += self.power_w * seconds
        self.ticks += seconds * TICKS_PER_S
        if self.utilization > CAPPED_FROM:
            self.capped_ticks += seconds * TICKS_PER_S
        if self.condition.hot:
            self.hot_ticks += seconds * TICKS_PER_S
        one_way_kib_per_s = self.board.xgmi_max_bandwidth * 1e9 / 8 / KIB
        for link, peer in enumerate(self.link_ends):
            if peer in self.mates and link not in self.condition.links_down:
                self.link_kib[link] += one_way_kib_per_s * LINK_SHARE * self.utilization * seconds


class AmdMachine:
    def __init__(self, topology: AmdTopology, node: str, clock: Callable[[], float] = time.monotonic,
                 scan: Scan | None = None) -> None:
        self.topology = topology
        self.gpus = [new_gpu(topology, node, index) for index in range(len(topology.numa))]
        self._by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        self.clock, self._scan = clock, scan or holders.Scanner(holders.ROCR_VISIBLE)
        self._scanned_at: float | None = None
        self._cpu_ticks: dict[tuple[int, int], int] = {}

    def card_of(self, gpu: AmdGpu) -> list[AmdGpu]:
        first = gpu.index - gpu.index % gpu.board.dies
        return self.gpus[first:first + gpu.board.dies]

    def refresh(self) -> None:
        """Follows the processes. Cheap when called often."""
        now = self.clock()
        elapsed = None if self._scanned_at is None else now - self._scanned_at
        if elapsed is not None and elapsed < SCAN_EVERY_S:
            return
        for gpu in self.gpus:
            gpu.pass_time(elapsed or 0.0)
        self._scanned_at = now
        self._follow(self._scan(frozenset(self._by_uuid)), elapsed)

    def _follow(self, found: list[holders.Holder], elapsed: float | None) -> None:
        for gpu in self.gpus:
            gpu.utilization, gpu.processes, gpu.mates = 0.0, [], frozenset()
        teams: dict[str, set[int]] = {}
        for one in found:
            busy = self._busy(one, elapsed)
            size = CONTEXT_BYTES + RESIDENT_SCALE * one.stat.resident_bytes // len(one.uuids)
            for uuid in one.uuids:
                carry(self._by_uuid[uuid], one.pid, busy, size)
            teams.setdefault(one.team, set()).update(self._by_uuid[uuid].index for uuid in one.uuids)
        for team in teams.values():
            for index in team:
                self.gpus[index].mates |= frozenset(team - {index})
        self._cpu_ticks = {(one.pid, one.stat.start_ticks): one.stat.cpu_ticks for one in found}

    def _busy(self, one: holders.Holder, elapsed: float | None) -> float:
        """Cores kept busy since the scan before, or since its start for a process that is new."""
        stat = one.stat
        before = self._cpu_ticks.get((one.pid, stat.start_ticks))
        if before is None or elapsed is None:
            before, elapsed = 0, procfs.uptime_s() - stat.start_ticks / procfs.CLOCK_TICKS
        return max(0, stat.cpu_ticks - before) / procfs.CLOCK_TICKS / max(elapsed, 0.1)


def carry(gpu: AmdGpu, pid: int, busy: float, size: int) -> None:
    gpu.utilization = min(1.0, gpu.utilization + busy)
    gpu.processes.append((pid, max(0, min(size, gpu.memory_bytes - gpu.used_bytes))))


def new_gpu(topology: AmdTopology, node: str, index: int) -> AmdGpu:
    board = AMD_CATALOGUE.boards[topology.board]
    serial = uuids.uuid5(NAMESPACE, f"{node}/{board.market_name}/{index}").int & (1 << 64) - 1 | 1
    return AmdGpu(index, f"GPU-{serial:016x}", serial, board, topology.numa[index], topology.link_ends(index))
