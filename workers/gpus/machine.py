"""The simulated GPUs of one node: their load follows the processes that hold them, their slices outlive a reader."""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from workers.gpus import holders, procfs
from workers.gpus.arguments import Refusal
from workers.gpus.boards import MIB, Topology
from workers.gpus.partitions import Layout
from workers.gpus.sim_gpu import Gpu, Load, Slice, new_gpu

SCAN_EVERY_S = 0.5
CONTEXT_BYTES = 512 * MIB
"""What a CUDA context takes before the first tensor."""

RESIDENT_SCALE = 8
"""A process on the CPU holds far less than one on a GPU would; its resident memory is shown this many times larger."""

Scan = Callable[[frozenset[str]], list[holders.Holder]]
Layouts = dict[str, Layout]


class Machine:
    def __init__(
        self,
        topology: Topology,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        scan: Scan | None = None,
        state: Path | None = None,
    ) -> None:
        """`state` names the file in which the MIG layout outlives this process."""
        self.topology = topology
        self.gpus = [new_gpu(topology, node, index) for index in range(len(topology.numa))]
        self.clock, self._scan, self._state = clock, scan or holders.Scanner(), state
        self.is_alive: Callable[[int], bool] = anybody if scan else procfs.is_alive
        self._epoch_s = time.time() - clock()
        self._scanned_at: float | None = None
        self._cpu_ticks: dict[tuple[int, int], int] = {}
        self._targets: dict[str, Gpu | Slice] = {}
        self._recall()
        self._aim()

    def refresh(self) -> None:
        """Follows the processes. Cheap when called often."""
        now = self.clock()
        elapsed = None if self._scanned_at is None else now - self._scanned_at
        if elapsed is not None and elapsed < SCAN_EVERY_S:
            return
        self.look_again(now, elapsed)

    @property
    def sampled_us(self) -> int:
        """When the counters were last brought up to date, in microseconds since the epoch."""
        return round((self._epoch_s + (self._scanned_at or 0.0)) * 1e6)

    def look_again(self, now: float, elapsed: float | None) -> None:
        for gpu in self.gpus:
            gpu.pass_time(elapsed or 0.0)
        self._scanned_at = now
        self._follow(self._scan(frozenset(self._targets)), elapsed)

    def is_held(self, device: Gpu | Slice) -> bool:
        """Whether processes are there now, not half a second ago: what is cut away must be free."""
        now = self.clock()
        self.look_again(now, None if self._scanned_at is None else now - self._scanned_at)
        return bool(device.load.processes)

    def by_uuid(self, uuid: str) -> Gpu | Slice | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None) or self._targets.get(uuid)

    def recut(self, gpu: Gpu) -> None:
        """After a change of a GPU's MIG mode or instances."""
        gpu.cut_anew()
        self._aim()
        if self._state:
            layouts = {gpu.uuid: gpu.partition.layout() for gpu in self.gpus if gpu.partition.table}
            draft = self._state.with_name(self._state.name + ".new")
            draft.write_bytes(msgspec.json.encode(layouts))
            draft.replace(self._state)

    def _recall(self) -> None:
        """A file that is absent, or not of this node, leaves the node as it is delivered."""
        if self._state is None:
            return
        try:
            layouts = msgspec.json.decode(self._state.read_bytes(), type=Layouts)
        except (OSError, msgspec.MsgspecError):
            return
        for gpu in self.gpus:
            if gpu.uuid in layouts:
                restore(gpu, layouts[gpu.uuid])

    def _aim(self) -> None:
        """By what names a process may hold what. With MIG on, the name of a GPU means its first slice."""
        self._targets = {}
        for gpu in self.gpus:
            if not gpu.partition.enabled:
                self._targets[gpu.uuid] = gpu
            elif gpu.slices:
                self._targets[gpu.uuid] = gpu.slices[0]
            for piece in gpu.slices:
                self._targets[piece.uuid] = piece
                self._targets[f"MIG-{gpu.uuid}/{piece.instance}/{piece.compute}"] = piece

    def _follow(self, found: list[holders.Holder], elapsed: float | None) -> None:
        for gpu in self.gpus:
            gpu.load = Load()
            for piece in gpu.slices:
                piece.load = Load()
        ticks = {(one.pid, one.stat.start_ticks): one.stat.cpu_ticks for one in found}
        for one in found:
            busy = self._busy(one, elapsed)
            size = CONTEXT_BYTES + RESIDENT_SCALE * one.stat.resident_bytes // len(one.uuids)
            for name in one.uuids:
                carry(self._targets[name], one.pid, busy, size)
        self._cpu_ticks = ticks
        self._team_up(found)

    def _team_up(self, found: list[holders.Holder]) -> None:
        """Busy GPUs of one job exchange what they compute. Slices never do."""
        teams: dict[str, set[int]] = defaultdict(set)
        for one in found:
            if not one.team:
                continue
            whole = [target for name in one.uuids if isinstance(target := self._targets[name], Gpu)]
            teams[one.team].update(gpu.index for gpu in whole if gpu.is_busy)
        for gpu in self.gpus:
            mates = [team for team in teams.values() if gpu.index in team]
            gpu.peers = frozenset().union(*mates) - {gpu.index} if mates else frozenset()

    def _busy(self, one: holders.Holder, elapsed: float | None) -> float:
        """Cores kept busy since the scan before, or since its start for a process that is new."""
        stat = one.stat
        before = self._cpu_ticks.get((one.pid, stat.start_ticks))
        if before is None or elapsed is None:
            before, elapsed = 0, procfs.uptime_s() - stat.start_ticks / procfs.CLOCK_TICKS
        return max(0, stat.cpu_ticks - before) / procfs.CLOCK_TICKS / max(elapsed, 0.1)


def anybody(_pid: int) -> bool:
    """Of processes that a test made up."""
    return True


def restore(gpu: Gpu, layout: Layout) -> None:
    try:
        gpu.partition.restore(layout)
    except Refusal:
        gpu.partition.instances = {}
    gpu.cut_anew()


def carry(target: Gpu | Slice, pid: int, busy: float, size: int) -> None:
    load = target.load
    load.utilization = min(1.0, load.utilization + busy)
    load.shares[pid] = min(1.0, load.shares.get(pid, 0.0) + busy)
    room = target.memory_bytes - load.used_bytes
    if isinstance(target, Gpu):
        room -= target.reserved_bytes
    load.processes.append((pid, max(0, min(size, room))))
    if isinstance(target, Slice):
        parent = target.gpu.load
        parent.utilization = min(1.0, parent.utilization + busy * target.share)
        parent.processes.append(load.processes[-1])
