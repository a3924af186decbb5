"""The GPU reader: a process of its own, as a call into the vendor's library may hang for ever.

Here it is watched, killed and started again. Nothing in `Reader` blocks its caller longer than the deadline.
"""

import logging
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass

from wire.hardware import Hardware, HealthEvent, OrderResult
from wire.reports import GpuReading
from workers.gpus import GpuList
from workers.gpus.errands import Errands
from workers.gpus.frames import Command, Detailed, Frame, Listed, Noticed, Outcome, Read, Stuck
from workers.gpus.life import Died, Hung, Life

log = logging.getLogger(__name__)

KEPT_READINGS = 8192
KEPT_EVENTS = 1024
KEPT_TICKS = 4096

STARTING = "failed: the GPU reader is starting, no answer yet"
HANGS = "Calls for the GPU do not return; it is left out until it is tried again."


@dataclass(frozen=True, slots=True)
class Limits:
    deadline_s: float = 3.0
    start_deadline_s: float = 60.0  # without persistence mode the driver wakes every board when it is opened
    restart_delays_s: tuple[float, ...] = (0.5, 5.0, 20.0, 60.0)
    steady_s: float = 60.0  # after that long a failure counts as the first
    retry_silent_s: float = 60.0  # until a GPU that made the reader hang is asked again; doubled each time
    retry_silent_most_s: float = 900.0
    details_every_s: float = 10.0

    def retry_after_s(self, hangs: int) -> float:
        return min(self.retry_silent_s * 2 ** min(hangs - 1, 10), self.retry_silent_most_s)


class Reader:
    """`status` is `ok`, `hung` (a GPU does not answer; the others are read on) or `failed: <sentence>`."""

    def __init__(self, kind: str, topology: str | None = None, node: str = "", interval_s: float = 1.0,
                 limits: Limits | None = None) -> None:
        self._kind, self._topology, self._node, self._interval_s = kind, topology, node, interval_s
        self._limits = limits or Limits()
        self._status = STARTING
        self._gpus: GpuList | None = None
        self._readings: deque[GpuReading] = deque(maxlen=KEPT_READINGS)
        self._hardware: Hardware | None = None
        self._events: deque[HealthEvent] = deque(maxlen=KEPT_EVENTS)
        self._errands = Errands()
        self.ticks_s: deque[float] = deque(maxlen=KEPT_TICKS)  # how long the newest looks at all GPUs took
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._skip: set[int] = set()
        self._hung_uuids: set[str] = set()
        self._unavailable = False
        self.failures = 0  # in a row
        self._hangs = 0  # since all GPUs answered for a while
        self._life: Life | None = None
        self._undead: list[Life] = []
        self._thread = threading.Thread(target=self._run, name="gpu-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def status(self) -> str:
        return self._status

    @property
    def pid(self) -> int | None:
        life = self._life
        return life.pid if life else None

    def inventory(self) -> GpuList | None:
        """The newest enumeration. Only the first is waited for, at most for the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._gpus is not None or self._status != STARTING, self._limits.deadline_s)
            return self._gpus

    def latest(self) -> list[GpuReading]:
        """Every reading since the call before."""
        with self._changed:
            readings = list(self._readings)
            self._readings.clear()
        return readings

    def hardware(self) -> Hardware | None:
        """The newest details, if there are some since the call before."""
        with self._changed:
            found, self._hardware = self._hardware, None
        return found

    def health(self) -> list[HealthEvent]:
        """Every event since the call before."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
        return events

    def carry_out(self, order: Command) -> None:
        """Only hands it over; what becomes of it is told by `results`, also when nobody is there to take it."""
        self._errands.take(order)

    def results(self) -> list[OrderResult]:
        """How orders went since the call before: `running`, later one that is final."""
        return self._errands.results()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(self._limits.deadline_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._errands.give_up(self._status)
            try:
                self._live()
            except Hung as hung:
                self._note_hung(hung)
            except (Died, OSError) as error:
                if self._unavailable:
                    continue  # it said why, and ended to be started anew
                self._say(f"failed: {error}")
            else:
                continue
            self.failures = 1 if time.monotonic() - began > self._limits.steady_s else self.failures + 1
            delays = self._limits.restart_delays_s
            self._rest(delays[min(self.failures, len(delays)) - 1])

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping.wait(min(1.0, max(0.0, end - time.monotonic()))):
            self._errands.give_up(self._status)
            if time.monotonic() >= end:
                return

    def _live(self) -> None:
        """One life of the reading process. Returns when it is to stop, or to ask a silent GPU again."""
        self._undead = [one for one in self._undead if not one.is_over()]
        life = self._life = Life(self._command(), self._limits.deadline_s)
        self._unavailable = False
        began = time.monotonic()
        try:
            for frame in life.frames(self._interval_s + 2 * self._limits.deadline_s, self._limits.start_deadline_s):
                if frame is not None:
                    self._take(frame)
                self._errands.send(life.command)
                if self._stopping.is_set():
                    return
                if self._may_ask_all_again(time.monotonic() - began):
                    return
        finally:
            self._life = None
            self._errands.carrier_ended()
            if not life.end():
                self._undead.append(life)

    def _may_ask_all_again(self, lived_s: float) -> bool:
        """Each try may cost a process that sleeps in the driver for ever, so never while one does."""
        if self._errands.are_under_way:
            return False
        if not self._skip:
            if lived_s > self._limits.steady_s:
                self._hangs = 0
            return False
        if lived_s < self._limits.retry_after_s(self._hangs) or not all(one.is_over() for one in self._undead):
            return False
        self._skip.clear()
        return True

    def _take(self, frame: Frame) -> None:
        match frame:
            case Stuck(gpu):
                raise Hung(gpu)
            case Listed(gpus, unavailable):
                self._take_list(gpus, unavailable)
            case Read(readings, took_s):
                with self._changed:
                    self._readings.extend(readings)
                if took_s is not None:
                    self.ticks_s.append(took_s)
            case Detailed(at, gpus):
                with self._changed:
                    self._hardware = Hardware(at=at, gpus=gpus)
            case Noticed(events):
                self._notice(*events)
            case Outcome(result):
                self._errands.note(result)

    def _take_list(self, gpus: GpuList, unavailable: bool) -> None:
        if unavailable and not self._unavailable and (self._gpus is None or self._gpus.problem != gpus.problem):
            self._notice(event("driver", gpus.problem or "The GPU driver cannot be used."))
        answering = {info.uuid for info in gpus.infos} & self._hung_uuids
        self._notice(*(event("back", "The GPU answers again.", uuid) for uuid in sorted(answering)))
        self._hung_uuids -= answering
        with self._changed:
            self._gpus = gpus
        self._unavailable = unavailable
        self._say(f"failed: {gpus.problem}" if unavailable else "hung" if self._skip else "ok")

    def _notice(self, *events: HealthEvent) -> None:
        with self._changed:
            self._events.extend(events)

    def _note_hung(self, hung: Hung) -> None:
        self._hangs += 1
        log.error("GPU %s does not answer: its reader is ended and started again without it",
                  "driver" if hung.gpu is None else hung.gpu)
        if hung.gpu is None:
            self._notice(event("hang", "The GPU driver does not answer: its reader is started again."))
        else:
            self._skip.add(hung.gpu)
            known = {info.uuid for info in self._gpus.infos if info.index == hung.gpu} if self._gpus else set()
            self._hung_uuids |= known
            self._notice(*(event("hang", HANGS, uuid) for uuid in sorted(known)))
        self._say("hung")

    def _say(self, status: str) -> None:
        with self._changed:
            if status != self._status:
                log.log(logging.INFO if status == "ok" else logging.WARNING, "GPU reader: %s", status)
            self._status = status
            self._changed.notify_all()

    def _command(self) -> list[str]:
        options = {
            "--topology": self._topology, "--node": self._node, "--interval": self._interval_s,
            "--deadline": self._limits.deadline_s, "--start-deadline": self._limits.start_deadline_s,
            "--details-every": self._limits.details_every_s,
        }
        words = [sys.executable, "-m", "workers.gpus.reading", self._kind]
        words += [f"{name}={value}" for name, value in options.items() if value is not None]
        return words + [f"--skip={index}" for index in sorted(self._skip)]


def event(kind: str, message: str, uuid: str | None = None) -> HealthEvent:
    at = time.time()
    return HealthEvent(at=at, key=f"{kind}/{uuid or 'node'}/{round(at * 1000)}", kind=kind, gpu_uuid=uuid,
                       message=message, source="reader")
