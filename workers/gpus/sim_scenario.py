"""Plays a fault script on a simulated machine: what calls answer, what the boards do, which events come."""

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from workers.gpus.fault_script import Item
from workers.gpus.faults import NONE, Faults, GpuName, Return, Text
from workers.gpus.machine import Machine
from workers.gpus.sim_gpu import Condition, Errors, Gpu

NOT_SUPPORTED, DRIVER_NOT_LOADED, VERSION_MISMATCH = 3, 9, 18
EVENT_DOUBLE_BIT_ECC, EVENT_XID, EVENT_RECOVERY_ACTION = 0x2, 0x8, 0x8000
XID_LOST, XID_ECC, XID_NVLINK = 79, 48, 74
RESET_GPU, DRAIN_AND_RESET = 1, 4
NEEDS_RESET = frozenset({46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140, 143})
NODE_CODES = {"mismatch": VERSION_MISMATCH, "unloaded": DRIVER_NOT_LOADED}
BAD_NAME = b"NVIDIA \xff\xfe\xc3("

KERNEL_WORDS = {
    XID_LOST: "GPU has fallen off the bus.", XID_ECC: "DBE (double bit error) ECC error",
    XID_NVLINK: "NVLink: fatal error detected", 31: "MMU fault", 13: "Graphics SM exception",
}
COMMON = "nvmlDeviceGet"
SYMBOLS = {
    "utilization": ["UtilizationRates"], "memory": ["MemoryInfo", "MemoryInfo_v2"], "power": ["PowerUsage"],
    "temperature": ["Temperature", "TemperatureV"],
    "energy": ["TotalEnergyConsumption"],
    "throttle_reasons": ["CurrentClocksEventReasons", "CurrentClocksThrottleReasons"],
    "processes": [f"{kind}RunningProcesses_v{n}" for kind in ("Compute", "Graphics", "MPSCompute") for n in (2, 3)],
    "fan": ["FanSpeed", "FanSpeed_v2"], "encoder": ["EncoderUtilization"], "decoder": ["DecoderUtilization"],
    "ecc": ["EccMode", "TotalEccErrors", "MemoryErrorCounter"],
    "pcie": ["CurrPcieLinkGeneration", "CurrPcieLinkWidth", "PcieThroughput", "PcieReplayCounter"],
    "nvlink": ["NvLinkState", "NvLinkVersion", "NvLinkErrorCounter", "NvLinkRemotePciInfo_v2"],
}
FIELDS = {"power": {185, 186}, "energy": {83}, "memory_temperature": {82}, "ecc": {3, 4, 5, 6},
          "pcie": {94, 197, 198}, "nvlink": {138, 139, 140, 141, 164, 165, 166, 202, 204}}


@dataclass(frozen=True, slots=True)
class Event:
    gpu: int
    kind: int
    data: int


class Told(msgspec.Struct):
    """Which items a script of that start has begun: their events do not come twice when the process is another."""

    started: float
    words: set[str]


@dataclass(frozen=True, slots=True)
class Places:
    """Files of a scenario; None: there is none."""

    kernel_log: Path | None = None
    told: Path | None = None


class Scenario:
    def __init__(self, machine: Machine, items: list[Item], started: float, places: Places | None = None) -> None:
        """`started` is on the machine's clock."""
        self._machine, self._items, self._started = machine, sorted(items, key=lambda one: one.start_s), started
        self._places = places or Places()
        self._begun: set[str] = set()
        self._told = recall(self._places.told, started)
        self._changes_at = -math.inf if items else math.inf
        self._hung: list[Item] = []
        self.faults = NONE
        self.events: deque[Event] = deque()

    @property
    def now_s(self) -> float:
        return self._machine.clock() - self._started

    def advance(self) -> None:
        """Cheap as long as nothing changes."""
        if self._changes_at == math.inf or (now_s := self.now_s) < self._changes_at:
            return
        on = [one for one in self._items if one.is_on(now_s)]
        for one in self._items:
            if one.start_s <= now_s and one.words not in self._begun:
                self._begun.add(one.words)
                self._begin(one)
        self._remember()
        for gpu in self._machine.gpus:
            its_own = [one for one in on if one.gpu == gpu.index]
            gpu.condition, gpu.errors = condition(its_own), errors_of(its_own)
        self._hung = [one for one in on if one.fault == "hang"]
        self.faults = faults_of(on)
        times = itertools.chain.from_iterable((one.start_s, one.end_s) for one in self._items)
        self._changes_at = min((at for at in times if at is not None and at > now_s), default=math.inf)

    @property
    def hangs(self) -> bool:
        return bool(self._hung)

    def hang_s(self, names: tuple[GpuName, ...]) -> float:
        """How long a call about a GPU does not return."""
        if not self._hung:
            return 0.0
        ends = [one.end_s for one in self._hung if one.gpu in names]
        return max((3600.0 if end is None else end - self.now_s for end in ends), default=0.0)

    def _begin(self, one: Item) -> None:
        if one.gpu is None:
            return
        gpu = self._machine.gpus[one.gpu]
        if one.words in self._told.words:
            return
        for kind, data in events_of(one):
            self.events.append(Event(gpu.index, kind, data))
            if kind == EVENT_XID:
                self._log(gpu, data)

    def _remember(self) -> None:
        if self._places.told and self._begun - self._told.words:
            self._told.words |= self._begun
            draft = self._places.told.with_suffix(".new")
            draft.write_bytes(msgspec.json.encode(self._told))
            draft.replace(self._places.told)

    def _log(self, gpu: Gpu, code: int) -> None:
        if self._places.kernel_log:
            words = KERNEL_WORDS.get(code, "see the list of Xid errors")
            # The form of a record in /dev/kmsg: priority, sequence, microseconds since the boot, flags.
            place = gpu.bus_id[4:].rpartition(".")[0]
            record = f"3,{code},{time.monotonic_ns() // 1000},-;"
            with self._places.kernel_log.open("a") as log:
                log.write(f"{record}NVRM: Xid (PCI:{place}): {code}, pid='<unknown>', {words}\n")


def recall(path: Path | None, started: float) -> Told:
    try:
        told = msgspec.json.decode(path.read_bytes(), type=Told) if path else None
    except (OSError, msgspec.MsgspecError):
        told = None
    return told if told and told.started == started else Told(started, set())


def errors_of(on: list[Item]) -> Errors:
    """After the end of a fault a board is as if it had been reset."""
    errors = Errors()
    for one in on:
        hurt(errors, one)
    return errors


def hurt(errors: Errors, one: Item) -> None:
    match one.fault:
        case "xid":
            errors.recovery_action = max(errors.recovery_action, RESET_GPU if one.number in NEEDS_RESET else 0)
        case "ecc":
            errors.uncorrected += 1
            errors.corrected += 3
            errors.rows_uncorrectable += 1
            errors.remap_pending, errors.recovery_action = True, DRAIN_AND_RESET
        case "nvlinkdown":
            errors.links[one.number] = errors.links.get(one.number, 0) + 17
        case "slowlink":
            errors.pcie_replays += 211


def events_of(one: Item) -> list[tuple[int, int]]:
    match one.fault:
        case "lost":
            return [(EVENT_XID, XID_LOST)]
        case "xid":
            return [(EVENT_XID, one.number)]
        case "ecc":
            return [(EVENT_DOUBLE_BIT_ECC, 0), (EVENT_XID, XID_ECC), (EVENT_RECOVERY_ACTION, DRAIN_AND_RESET)]
        case "nvlinkdown":
            return [(EVENT_XID, XID_NVLINK)]
    return []


def condition(on: list[Item]) -> Condition:
    faults = {one.fault for one in on}
    return Condition(
        throttled="throttle" in faults, slow_link="slowlink" in faults, memory_stuck="memstuck" in faults,
        bad_pids="badpids" in faults, links_down=frozenset(one.number for one in on if one.fault == "nvlinkdown"),
        hidden_fields=frozenset().union(*(FIELDS.get(one.metric, set()) for one in on)),
        hidden_clocks=frozenset(one.metric for one in on if one.metric in ("sm_clock", "memory_clock")),
    )


def faults_of(on: list[Item]) -> Faults:
    """What calls answer. A driver that does not match, or is gone, answers nothing else."""
    found = Faults(
        lost=[one.gpu for one in on if one.fault == "lost" and one.gpu is not None],
        returns=[Return(symbol=COMMON + name, gpu=one.gpu, code=NOT_SUPPORTED)
                 for one in on for name in SYMBOLS.get(one.metric, [])],
        texts=[Text(symbol="nvmlDeviceGetName", gpu=one.gpu, hex=BAD_NAME.hex())
               for one in on if one.fault == "badname"],
        everything=next((NODE_CODES[one.fault] for one in on if one.gpu is None), None),
    )
    return NONE if found == Faults() else found
