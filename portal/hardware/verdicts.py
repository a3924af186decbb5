"""What an event or a reading says about a GPU: the state it should have, and why. No clock, no database.

A GPU's state is the worst that any of its open findings asks for; without one it is ok. Only the GPU is fenced, never
its node, and what runs on it goes on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from portal.hardware import xids
from wire.reports import GpuProcess, GpuReading
from wire.states import GpuState

GB = 1_000_000_000  # as everywhere else that people read
STUCK_BYTES = 1024**3  # less is what the driver itself may hold
REASON_CHARS = 200
RANKS = {state: rank for rank, state in enumerate(
    (GpuState.OK, GpuState.DIRTY, GpuState.SUSPECT, GpuState.QUARANTINED, GpuState.LOST))}
HARDWARE_SLOWDOWN = 0x8 | 0x40 | 0x80  # of NVML's clock reasons: slowdown, thermal, power brake

INFO, WARNING, CRITICAL = "info", "warning", "critical"
_S = GpuState


@dataclass(frozen=True, slots=True)
class Verdict:
    severity: str
    meaning: str = ""
    advice: str = ""
    state: GpuState | None = None  # what the GPU becomes; None: it goes on
    app_caused: bool = False


RESET = xids.ADVICE["reset"]
BY_KIND = {
    "ecc": Verdict(CRITICAL, "A memory error that ECC could detect but not correct.", RESET, _S.SUSPECT),
    "throttle": Verdict(WARNING, "The hardware slows the GPU down to protect it.",
                        "Look at the cooling of the machine and at the power supply."),
    "lost": Verdict(CRITICAL, "The driver no longer answers for this GPU.",
                    "Look for Xid 79 in the kernel log; restart the machine. It is on offer again once it answers.",
                    _S.LOST),
    "hang": Verdict(CRITICAL, "A call about this GPU does not come back from the driver.",
                    "It is asked again by itself after a while. If it goes on, restart the machine.", _S.SUSPECT),
    "slow_link": Verdict(WARNING, "The PCIe link is slower than GPU and slot allow.",
                         "Reseat the card or its riser; look for PCIe errors in the kernel log."),
    "link_down": Verdict(WARNING, "An NVLink that was up is down.", xids.ADVICE["check_links"]),
    "driver": Verdict(CRITICAL, "The GPU driver of this machine cannot be used.",
                      "Restart the machine after an upgrade of the driver, or load the driver again."),
    "back": Verdict(INFO, "The driver answers for this GPU again."),
    "quarantine": Verdict(CRITICAL, "An administrator took it out of service.",
                          "An administrator may release it.", _S.QUARANTINED),
    "preflight": Verdict(CRITICAL, "A check before the start of a job failed.",
                         "Look at the reason, then release it here.", _S.SUSPECT),
    "foreign": Verdict(WARNING, "A process that belongs to no job uses this GPU.",
                       "Ask its owner to end it; then the GPU is on offer again by itself.", _S.DIRTY),
    "leftover": Verdict(WARNING, "A job ended and its memory on the GPU was not returned.",
                        "End what is left of it; then the GPU is on offer again by itself.", _S.DIRTY),
    "busy": Verdict(WARNING, "A job could not be started here, as something else uses this GPU.",
                    "It is on offer again by itself once its readings are clean.", _S.DIRTY),
    "memory": Verdict(WARNING, "Memory is in use and no process explains it.",
                      "It usually comes back by itself. If it does not, reset the GPU.", _S.DIRTY),
    "disk": Verdict(WARNING, "The node has too little disk space to start jobs.",
                    "Make room on the disk that holds the node's state directory."),
}
SELF_HEALING = frozenset({"foreign", "leftover", "memory", "busy"})
"""Seen in readings: they come and go with what is seen."""

WHILE_IT_LASTS = SELF_HEALING | {"lost", "hang"}
"""No one can release a GPU from these; they end by themselves."""

NODE_KINDS = frozenset({
    "xid", "sxid", "ecc", "row_remap", "recovery", "throttle", "lost", "hang", "slow_link", "link_down", "driver",
    "back",
})  # fmt: skip
"""What a node may report; the rest is found out here."""

REMAP_PENDING = Verdict(CRITICAL, "A faulty row of memory waits for a reset to be replaced.", RESET, _S.SUSPECT)
REMAP_FAILED = Verdict(CRITICAL, "A faulty row of memory cannot be replaced.",
                       "Open a case with the vendor: the card is to be exchanged.", _S.QUARANTINED)
RECOVERY = {
    1: Verdict(CRITICAL, "The driver asks for a reset of this GPU.", RESET, _S.SUSPECT),
    2: Verdict(CRITICAL, "The driver asks for a restart of the machine.", xids.ADVICE["reboot"], _S.SUSPECT),
    3: Verdict(WARNING, "The driver asks to end what uses peer-to-peer access to this GPU.",
               "Let the jobs that span several GPUs end; it recovers by itself."),
    4: Verdict(CRITICAL, "The driver asks to empty this GPU and reset it.", RESET, _S.SUSPECT),
}


def of(kind: str, code: int | None = None, message: str = "") -> Verdict:
    match kind:
        case "xid":
            xid = xids.lookup(code)
            return Verdict(xid.severity, xid.meaning, xid.advice, xid.state, xid.app_caused)
        case "sxid":
            return of_switch(message)
        case "row_remap":
            return REMAP_FAILED if code == 2 else REMAP_PENDING
        case "recovery":
            return RECOVERY.get(code or 0, Verdict(WARNING, "The driver asks for an action that is not in the table."))
    return BY_KIND.get(kind, Verdict(INFO))


def of_switch(message: str) -> Verdict:
    """The driver writes whether it is fatal; «Non-fatal» contains the other word."""
    fatal = "fatal" in message.lower().replace("non-fatal", "")
    advice = xids.ADVICE["check_links" if fatal else "none"]
    return Verdict(CRITICAL if fatal else INFO, "An NVSwitch reported an error.", advice)


def worst(findings: Iterable[tuple[GpuState | None, str]]) -> tuple[GpuState, str]:
    """-> the state that all findings together ask for, with the reason of the first that asks for it."""
    found = [(state, reason) for state, reason in findings if state is not None]
    return max(found, key=lambda one: RANKS[one[0]], default=(GpuState.OK, ""))


# --- what a node reads slowly -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    code: int | None
    message: str


def of_hardware(hardware: dict[str, Any]) -> list[Finding]:
    """Conditions of a GpuHardware as a dict that last until somebody does something."""
    found = []
    if hardware.get("row_remap_failed"):
        found.append(Finding("row_remap", 2, "A remapping of memory rows failed."))
    elif hardware.get("row_remap_pending"):
        found.append(Finding("row_remap", 1, "A remapping of memory rows is pending."))
    action = hardware.get("recovery_action")
    if action:
        found.append(Finding("recovery", action, f"Recovery action {action}."))
    return found


def over(hardware: dict[str, Any]) -> set[str]:
    """Kinds of findings that these details show to be over. A PCIe link at rest slows down and proves nothing."""
    kinds = set()
    pcie = [(hardware.get(name), hardware.get(f"{name}_max")) for name in ("pcie_generation", "pcie_width")]
    if all(now is not None and now == most for now, most in pcie):
        kinds.add("slow_link")
    links = hardware.get("links") or []
    if links and all(link.get("active") for link in links):
        kinds.add("link_down")
    return kinds


# --- what a node reads every second -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Something on a GPU that the attempt holding it does not explain. `identity` stays while it lasts."""

    kind: str  # foreign | leftover | memory
    identity: str
    reason: str
    process: GpuProcess | None = None


def is_quiet(reading: GpuReading) -> bool:
    """Nothing on it that would need an explanation. Called for every reading: the cheapest test first."""
    return not reading.processes and (reading.memory_used_bytes or 0) < STUCK_BYTES


def unexplained(reading: GpuReading, holder: str | None) -> list[Unexplained]:
    """`holder`: the attempt that holds the GPU now. What is not known explains nothing and blames nobody."""
    if reading.processes is None or "processes" in reading.missing or "gpu" in reading.missing:
        return []
    strangers = [process for process in reading.processes if process.attempt is None or process.attempt != holder]
    if strangers or reading.processes:
        return [of_process(process) for process in strangers]
    used = reading.memory_used_bytes or 0
    if holder is None and used >= STUCK_BYTES:
        return [Unexplained("memory", "memory", f"{used / GB:.1f} GB are in use and no process explains them.")]
    return []


def of_process(process: GpuProcess) -> Unexplained:
    kind = "foreign" if process.attempt is None else "leftover"
    return Unexplained(kind, f"{kind}/{process.pid}", sentence(process), process)


def sentence(process: GpuProcess) -> str:
    """-> "Process 4711 of bob (python train.py) uses 12.3 GB since 2026-11-30 14:02 UTC, in container ab12cd34."."""
    used, since = process.memory_used_bytes, process.start_time
    words = [f"Process {process.pid}"]
    words += [f"of {process.user[:32]}"] if process.user else []
    words += [f"({process.command[:60]})"] if process.command else []
    words += ["uses the GPU" if used is None else f"uses {used / GB:.1f} GB"]
    words += [f"since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M} UTC"] if since and 0 < since < 1e11 else []
    return " ".join(words) + (f", in container {process.container[:12]}." if process.container else ".")


def is_held_back(reading: GpuReading) -> bool:
    return bool((reading.throttle_reasons or 0) & HARDWARE_SLOWDOWN)
