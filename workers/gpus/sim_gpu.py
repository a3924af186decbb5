"""One simulated GPU: what it is, what it carries, and how it gets warm, draws power and moves bytes."""

import math
import uuid as uuids
from dataclasses import dataclass, field

from workers.gpus.boards import CATALOGUE, MIB, PCIE_GBYTES_PER_S, Board, Topology
from workers.gpus.partitions import Partition

NAMESPACE = uuids.UUID("5c1f0d0e-7f3c-4f53-9d0d-6f6a2c1f5b7e")
GIGA = 1_000_000_000

THERMAL_TIME_S = 20.0
IDLE_TEMPERATURE_C, LOADED_RISE_C = 31.0, 38.0
MEMORY_RISE_C = 6.0

FEED_SHARE = 0.04
"""Of the PCIe link that a busy GPU uses to be fed, and of it that it sends back."""
EXCHANGE_SHARE = 0.3
"""Of a link that busy GPUs of one job use between them."""

GUESTS_MISS = frozenset({74, 75, 82, 83, 185, 186, 187, 188, 189, 190, 197, 198, 230})
"""Fields of power, temperature, energy and bytes: a guest with a virtual GPU is not told."""

POWER_CAP_AT = 0.97
THROTTLED_CLOCK, THROTTLED_POWER = 0.4, 0.55
STUCK_SHARE = 0.6
SLOW_LINK = (1, 4)
"""PCIe generation and width of a link that trained badly."""


@dataclass(slots=True)
class Load:
    """What a device or a slice carries at the moment."""

    utilization: float = 0.0  # 0 … 1
    processes: list[tuple[int, int]] = field(default_factory=list)  # pid, bytes
    shares: dict[int, float] = field(default_factory=dict)  # pid -> its part of the utilization

    @property
    def used_bytes(self) -> int:
        return sum(size for _, size in self.processes)


@dataclass(slots=True)
class Slice:
    """A MIG slice: a compute instance of a GPU instance."""

    uuid: str
    profile: str
    memory_bytes: int
    gpu: "Gpu"
    instance: int
    compute: int
    share: float  # of the board's compute
    position: int = 0  # the index by which the driver lists it; there may be holes
    load: Load = field(default_factory=Load)


@dataclass(slots=True)
class Condition:
    """What a scripted fault does to a GPU as long as it lasts."""

    throttled: bool = False
    slow_link: bool = False
    memory_stuck: bool = False
    bad_pids: bool = False
    links_down: frozenset[int] = frozenset()
    hidden_fields: frozenset[int] = frozenset()
    hidden_clocks: frozenset[str] = frozenset()


@dataclass(slots=True)
class Errors:
    """Counters that only grow until the board is reset."""

    corrected: int = 0
    uncorrected: int = 0
    rows_uncorrectable: int = 0
    remap_pending: bool = False
    recovery_action: int = 0
    pcie_replays: int = 0
    links: dict[int, int] = field(default_factory=dict)  # link -> errors of each kind


@dataclass(slots=True)
class Gpu:
    index: int
    uuid: str
    board: Board
    numa: int
    serial: str
    link_ends: list[int | None]
    partition: Partition
    cpu_affinity: str = ""
    hidden_fields: frozenset[int] = frozenset()
    is_guest: bool = False
    slices: list[Slice] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    peers: frozenset[int] = frozenset()  # busy GPUs of the same job
    condition: Condition = field(default_factory=Condition)
    errors: Errors = field(default_factory=Errors)
    temperature_c: float = IDLE_TEMPERATURE_C
    energy_mj: float = 0.0
    pcie_sent: float = 0.0
    pcie_received: float = 0.0
    link_bytes: list[float] = field(default_factory=list)  # each way
    power_violation_ns: float = 0.0
    thermal_violation_ns: float = 0.0

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
    def used_bytes(self) -> int:
        used = self.load.used_bytes
        if self.condition.memory_stuck:
            used = max(used, round(self.memory_bytes * STUCK_SHARE))
        return used

    @property
    def power_mw(self) -> int:
        idle, limit = self.board.idle_power_w * 1000, self.board.power_limit_w * 1000
        # Concave: half the load already draws most of the power.
        above_idle = (limit - idle) * 0.95 * math.sqrt(self.load.utilization)
        return round(idle + above_idle * (THROTTLED_POWER if self.condition.throttled else 1.0))

    @property
    def sm_clock_mhz(self) -> int:
        board = self.board
        if not self.load.processes:
            return board.idle_sm_clock_mhz
        factor = THROTTLED_CLOCK if self.condition.throttled else 1 - 0.12 * self.load.utilization
        return round(board.sm_clock_mhz * factor)

    @property
    def memory_temperature_c(self) -> float:
        return self.temperature_c + MEMORY_RISE_C

    @property
    def fan_percent(self) -> int:
        return max(0, min(100, round(30 + 1.6 * (self.temperature_c - 40))))

    @property
    def pcie_generation(self) -> int:
        """A board without ECC memory, made for desks, lets its link rest when it idles."""
        if self.condition.slow_link or (self.board.fans and not self.load.processes):
            return SLOW_LINK[0]
        return self.board.pcie_generation

    @property
    def pcie_width(self) -> int:
        return SLOW_LINK[1] if self.condition.slow_link else self.board.pcie_width

    @property
    def pcie_bytes_per_s(self) -> float:
        return PCIE_GBYTES_PER_S[self.pcie_generation] * GIGA * self.pcie_width / 16

    @property
    def is_busy(self) -> bool:
        return self.load.utilization > 0

    def link_is_up(self, link: int) -> bool:
        return self.link_ends[link] is not None and link not in self.condition.links_down

    def pass_time(self, seconds: float) -> None:
        hottest = self.board.slowdown_c + 1
        target = hottest if self.condition.throttled else IDLE_TEMPERATURE_C + LOADED_RISE_C * self.load.utilization
        self.temperature_c += (target - self.temperature_c) * (1 - math.exp(-seconds / THERMAL_TIME_S))
        self.energy_mj += self.power_mw * seconds
        self.power_violation_ns += GIGA * seconds * (self.load.utilization > POWER_CAP_AT)
        self.thermal_violation_ns += GIGA * seconds * self.condition.throttled
        if self.is_busy:
            self._move_bytes(seconds * self.load.utilization)

    def _move_bytes(self, busy_s: float) -> None:
        through_pcie = self.pcie_bytes_per_s * busy_s
        self.pcie_received += through_pcie * FEED_SHARE
        self.pcie_sent += through_pcie * FEED_SHARE / 4
        if not self.peers:
            return
        used = [link for link, end in enumerate(self.link_ends)
                if self.link_is_up(link) and (end == self.index or end in self.peers)]
        for link in used:
            self.link_bytes[link] += self.board.nvlink_gbytes_per_s * GIGA * EXCHANGE_SHARE * busy_s
        if not used:
            self.pcie_received += through_pcie * EXCHANGE_SHARE
            self.pcie_sent += through_pcie * EXCHANGE_SHARE

    def cut_anew(self) -> None:
        """After a change of its instances. What stays keeps its position, what is new takes the first that is free."""
        known = {piece.uuid: piece for piece in self.slices}
        wanted = {piece.uuid: piece for piece in self._pieces()}
        kept = [known[uuid] for uuid in wanted if uuid in known]
        taken = {piece.position for piece in kept}
        for piece in (piece for uuid, piece in wanted.items() if uuid not in known):
            piece.position = next(place for place in range(len(wanted)) if place not in taken)
            taken.add(piece.position)
            kept.append(piece)
        self.slices = sorted(kept, key=lambda piece: piece.position)

    def _pieces(self) -> list[Slice]:
        slices = self.partition.table.slices if self.partition.table else 1
        return [
            Slice(
                uuid=f"MIG-{uuids.uuid5(NAMESPACE, f'{self.uuid}/{one.id}/{part.id}')}", profile=one.name_of(part),
                memory_bytes=one.profile.memory_mib * MIB, gpu=self, instance=one.id, compute=part.id,
                share=part.slices / slices,
            )
            for one in self.partition.instances.values() for part in one.computes.values()
        ]


def new_gpu(topology: Topology, node: str, index: int) -> Gpu:
    board = CATALOGUE.boards[topology.board]
    name = uuids.uuid5(NAMESPACE, f"{node}/{board.name}/{index}")
    affinity = topology.cpu_affinity
    gpu = Gpu(
        index, f"GPU-{name}", board, topology.numa[index], serial=str(name.int % 10**13).zfill(13),
        link_ends=topology.link_ends(index, board.nvlinks), partition=Partition(CATALOGUE.mig_table(board)),
        cpu_affinity=affinity[index] if affinity else "", is_guest=topology.virtual,
        hidden_fields=GUESTS_MISS if topology.virtual else frozenset(), link_bytes=[0.0] * board.nvlinks,
    )
    if str(index) in topology.mig:
        gpu.partition.cut(topology.mig[str(index)])
        gpu.cut_anew()
    return gpu
