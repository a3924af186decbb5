"""What must be true before ranks start: the GPUs answer, are empty and sound, and the disk has room.

The newest reading is held against it, nothing is asked of the driver: a start must not wait for a call that may hang.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wire.desired import GpuSlot, Launch
from wire.hardware import HealthEvent
from wire.reports import GpuInfo, GpuProcess, GpuReading, Refusal

GB = 1_000_000_000
STUCK_BYTES = 1024**3
STUCK_AFTER_S = 3.0  # memory comes back a moment after its job has ended
STALE_AFTER_S = 5.0
SPOOL_LEAST_BYTES = 256 * 1024**2
FATAL_FOR_S = 10.0  # by then the portal has fenced the GPU itself
FATAL_XIDS = frozenset({46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 167, 171, 172})
FATAL_KINDS = frozenset({"ecc", "lost", "hang"})

BUSY, BROKEN, DISK = "busy", "broken", "disk"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Situation:
    """What is known on this node at the moment of a start."""

    now: float
    readings: Mapping[str, GpuReading] = field(default_factory=dict)
    stuck_since: Mapping[str, float] = field(default_factory=dict)  # memory in use without a process, by UUID
    known: Mapping[str, GpuInfo] | None = None  # by UUID; None: the driver has not listed anything yet
    problem: str | None = None  # what the driver's list complains of
    reader: str = "ok"
    fatal: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # UUID -> when, and what happened to it
    spool_free_bytes: int | None = None
    is_gone: Callable[[GpuProcess], bool] = lambda _: False  # a process that has ended since it was read


def check(launch: Launch, now: Situation) -> list[Refusal]:
    """Pure. An empty list: nothing speaks against the start."""
    found = [refusal for slot in launch.gpus if (refusal := check_gpu(slot, launch, now))]
    free = now.spool_free_bytes
    if free is not None and free < SPOOL_LEAST_BYTES:
        least = SPOOL_LEAST_BYTES // 1024**2
        message = f"The node's disk has {free / 1024**2:.0f} MiB left, a start needs {least} MiB."
        found.append(Refusal(code=DISK, message=message))
    return found


def check_gpu(slot: GpuSlot, launch: Launch, now: Situation) -> Refusal | None:
    def refusal(code: str, what: str) -> Refusal:
        return Refusal(code=code, message=f"GPU {slot.index} {what}", gpu_uuid=slot.uuid)

    if now.known is not None and slot.uuid not in now.known:
        # Without any GPU it is the driver that is at fault, and it may come back.
        code = BROKEN if now.known else BUSY
        return refusal(code, f"is not among those that the driver lists{because(now.problem)}.")
    happened_at, what_happened = now.fatal.get(slot.uuid, (0.0, ""))
    if what_happened and happened_at > slot.trusted_since:
        return refusal(BROKEN, f"just reported {what_happened}.")
    reading = now.readings.get(slot.uuid)
    if reading is None:
        return None  # the first one is still on its way
    if now.now - reading.at > STALE_AFTER_S:
        # While the reader hangs on another GPU, it says nothing about this one.
        old_s = now.now - reading.at
        return refusal(BROKEN, f"has not been read for {old_s:.0f} s.") if now.reader == "ok" else None
    if "gpu" in reading.missing:
        return refusal(*of_missing(reading.missing["gpu"]))
    what = in_the_way(reading, launch, now)
    return refusal(BUSY, what) if what else None


def of_missing(reason: str) -> tuple[str, str]:
    if reason == "released":
        return BUSY, "is not read now, so that its driver can be worked on."
    return BROKEN, f"does not answer: {reason}."


def because(problem: str | None) -> str:
    return f": {problem.rstrip('.')}" if problem else ""


def in_the_way(reading: GpuReading, launch: Launch, now: Situation) -> str | None:
    alive = [one for one in reading.processes or [] if not now.is_gone(one)]
    stranger = next((one for one in alive if one.attempt != launch.attempt), None)
    if stranger is not None:
        return f"is used by {described(stranger)}."
    since = now.stuck_since.get(reading.uuid)
    if since is not None and now.now - since >= STUCK_AFTER_S:
        used = (reading.memory_used_bytes or 0) / GB
        return f"has {used:.1f} GB in use and no process that explains them."
    return None


def described(process: GpuProcess) -> str:
    words = [f"process {process.pid}"]
    words += [f"of {process.user}"] if process.user else []
    words += [f"({process.command[:60]})"] if process.command else []
    return " ".join(words) + (f" of attempt {process.attempt}, which has ended" if process.attempt else "")


class Preflight:
    """Keeps what the checks need, as it comes in."""

    def __init__(self, state_dir: Path, listed: Callable[[], tuple[list[GpuInfo] | None, str | None]],
                 reader: Callable[[], str]) -> None:
        """`listed`: the newest list of GPUs, None before the first, and what it complains of; `reader`: its status."""
        self._state_dir, self._listed, self._reader = state_dir, listed, reader
        self._readings: dict[str, GpuReading] = {}
        self._stuck_since: dict[str, float] = {}
        self._fatal: dict[str, tuple[float, str]] = {}

    def note(self, readings: Iterable[GpuReading]) -> None:
        for reading in readings:
            self._readings[reading.uuid] = reading
            if is_stuck(reading):
                self._stuck_since.setdefault(reading.uuid, reading.at)
            else:
                self._stuck_since.pop(reading.uuid, None)

    def note_event(self, event: HealthEvent) -> None:
        fatal = event.code in FATAL_XIDS if event.kind == "xid" else event.kind in FATAL_KINDS
        if event.gpu_uuid and fatal:
            what = f"Xid {event.code}" if event.kind == "xid" else f"«{event.kind}»"
            self._fatal[event.gpu_uuid] = (event.at, what)
        elif event.gpu_uuid and event.kind == "back":
            self._fatal.pop(event.gpu_uuid, None)

    def __call__(self, launch: Launch) -> list[Refusal]:
        refusals = check(launch, self.situation())
        for refusal in refusals:
            logger.warning("attempt %s of job %d is not started: %s", launch.attempt, launch.job, refusal.message)
        return refusals

    def situation(self) -> Situation:
        now = time.time()
        infos, problem = self._listed()
        return Situation(
            now=now, readings=dict(self._readings), stuck_since=dict(self._stuck_since),
            known=None if infos is None else {info.uuid: info for info in infos}, problem=problem,
            reader=self._reader(), spool_free_bytes=shutil.disk_usage(self._state_dir).free, is_gone=is_gone,
            fatal={uuid: event for uuid, event in list(self._fatal.items()) if now - event[0] < FATAL_FOR_S},
        )


def is_stuck(reading: GpuReading) -> bool:
    return reading.processes == [] and (reading.memory_used_bytes or 0) >= STUCK_BYTES


def is_gone(process: GpuProcess) -> bool:
    """Only of one that could be looked at: the pids of other containers mean nothing here."""
    return process.user is not None and not Path(f"/proc/{process.pid}").exists()
