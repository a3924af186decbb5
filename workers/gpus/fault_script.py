"""What shall go wrong on a simulated node, and when: `gpu3:lost@60s gpu2:throttle@10s+20s node:mismatch@40s`.

An item is TARGET:FAULT@START+DURATION, separated from the next by spaces or commas. Times count from the start of the
node's reader; without a start it is so at once, without a duration it stays so.
"""

import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from workers.gpus.amd_boards import AMD_CATALOGUE
from workers.gpus.boards import CATALOGUE

SCRIPT_VARIABLE = "GPUYARD_SIM_FAULTS_SCRIPT"
STATE_VARIABLE = "GPUYARD_SIM_STATE"
STARTED_VARIABLE = "GPUYARD_SIM_STARTED"
"""The monotonic clock at the start of the node: a reading process that was started again goes on in the script."""

STATE_FILE = "simulated.json"

GPU_FAULTS = {
    "lost": "fell off the bus, with Xid 79", "xidN": "an Xid, e.g. xid79", "throttle": "hot, clocks held back",
    "slowlink": "its PCIe link trained badly", "hang": "no call returns", "ecc": "an uncorrectable memory error",
    "nvlinkNdown": "an NVLink is down, e.g. nvlink2down", "memstuck": "memory held by no process",
    "badpids": "impossible pids in its process list", "badname": "a name that is not text",
    "nometric=NAME": "one value is not supported, e.g. nometric=temperature",
}
NODE_FAULTS = {"mismatch": "driver and library versions differ", "unloaded": "the kernel module is not loaded"}
NVIDIAS_OWN = frozenset({"xid", "mismatch"})
METRICS = ("utilization", "memory", "power", "temperature", "memory_temperature", "sm_clock", "memory_clock", "energy",
           "throttle_reasons", "processes", "fan", "encoder", "decoder", "ecc", "pcie", "nvlink")

ITEM = re.compile(r"(?P<target>gpu(?P<gpu>\d+)|node):(?P<fault>[a-z0-9]+)(=(?P<metric>[a-z_]+))?(@(?P<when>.+))?")
NUMBERED = re.compile(r"(xid|nvlink)(\d+)(down)?")
TIMES = re.compile(r"(?P<start>\d+(\.\d+)?)(?P<unit>ms|s|m)?(\+(?P<lasts>\d+(\.\d+)?)(?P<lasts_unit>ms|s|m)?)?")
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}


class ScriptError(ValueError):
    """One sentence that names the item and the way out."""


@dataclass(frozen=True, slots=True)
class Item:
    words: str
    gpu: int | None  # None: the node
    fault: str  # xid and nvlinkdown have lost their number
    number: int = 0
    metric: str = ""
    start_s: float = 0.0
    end_s: float | None = None

    def is_on(self, now_s: float) -> bool:
        return self.start_s <= now_s and (self.end_s is None or now_s < self.end_s)


def parse(text: str) -> list[Item]:
    """Raises ScriptError."""
    return [item(words) for words in re.split(r"[\s,;]+", text) if words]


def item(words: str) -> Item:
    match = ITEM.fullmatch(words)
    if not match:
        raise ScriptError(f"{words!r} is not a fault: write it like gpu3:lost@60s or node:mismatch@40s.")
    gpu = int(match["gpu"]) if match["gpu"] is not None else None
    fault, number = known(words, match["fault"], gpu)
    metric = metric_named(words, fault, match["metric"])
    start_s, end_s = times(words, match["when"])
    return Item(words, gpu, fault, number, metric, start_s, end_s)


def known(words: str, fault: str, gpu: int | None) -> tuple[str, int]:
    """-> the fault and its number."""
    choices = NODE_FAULTS if gpu is None else GPU_FAULTS
    numbered = NUMBERED.fullmatch(fault)
    if gpu is not None and numbered and (numbered[1] == "nvlink") == bool(numbered[3]):
        return numbered[1] + (numbered[3] or ""), int(numbered[2])
    name = f"{fault}=NAME" if fault == "nometric" else fault
    if name not in choices:
        what = "a node" if gpu is None else "a GPU"
        raise ScriptError(f"{words!r} names no fault of {what}: choose one of {', '.join(choices)}.")
    return fault, 0


def metric_named(words: str, fault: str, metric: str | None) -> str:
    if fault != "nometric":
        if metric:
            raise ScriptError(f"{words!r} has a value, but only nometric takes one: leave ={metric} out.")
        return ""
    if metric not in METRICS:
        raise ScriptError(f"{words!r} names no value of a GPU: choose one of {', '.join(METRICS)}.")
    return metric


def times(words: str, when: str | None) -> tuple[float, float | None]:
    if when is None:
        return 0.0, None
    match = TIMES.fullmatch(when)
    if not match:
        raise ScriptError(f"{words!r} has no time after the @: write it like @60s or, with a duration, @10s+20s.")
    start_s = float(match["start"]) * UNITS[match["unit"]]
    if match["lasts"] is None:
        return start_s, None
    return start_s, start_s + float(match["lasts"]) * UNITS[match["lasts_unit"]]


def check_on(items: list[Item], topology: str | None) -> None:
    """That a simulated node has what the script breaks. Raises ScriptError."""
    if not items:
        return
    if topology in AMD_CATALOGUE.topologies:
        check_on_amd(items, topology)
        return
    if topology not in CATALOGUE.topologies:
        choices = ", ".join(sorted({*CATALOGUE.topologies, *AMD_CATALOGUE.topologies}))
        raise ScriptError(f"{items[0].words!r} cannot be played on {topology!r}: choose one of {choices}.")
    node = CATALOGUE.topologies[topology]
    board = CATALOGUE.boards[node.board]
    check(items, len(node.numa), board.nvlinks, has_ecc=board.has_ecc)


def check_on_amd(items: list[Item], topology: str) -> None:
    node = AMD_CATALOGUE.topologies[topology]
    for one in items:
        if one.fault in NVIDIAS_OWN:
            raise ScriptError(f"{one.words!r}: only NVIDIA's driver does that, {topology} has cards of AMD.")
    gpus = range(len(node.numa))
    check(items, len(gpus), min(len(node.link_ends(gpu)) for gpu in gpus), has_ecc=True)


def check(items: list[Item], gpus: int, links: int, *, has_ecc: bool) -> None:
    """That a node has what the script breaks. Raises ScriptError."""
    for one in items:
        if one.gpu is not None and one.gpu >= gpus:
            raise ScriptError(f"{one.words!r} names GPU {one.gpu}, but the node has {gpus}, counted from 0.")
        if one.fault == "nvlinkdown" and one.number >= links:
            raise ScriptError(f"{one.words!r} names NVLink {one.number}, but its board has {links}, counted from 0.")
        if one.fault == "ecc" and not has_ecc:
            raise ScriptError(f"{one.words!r}: its board counts no memory errors, choose another fault or topology.")


def pass_on(environment: MutableMapping[str, str], script: str, state_dir: Path, started: float) -> None:
    """What the reading process of a simulated node must know, every time it is started. What is set already stays."""
    environment.setdefault(STATE_VARIABLE, str(state_dir / STATE_FILE))
    environment.setdefault(STARTED_VARIABLE, repr(started))
    if script:
        environment.setdefault(SCRIPT_VARIABLE, script)
