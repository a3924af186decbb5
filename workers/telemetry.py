"""The GPU reader: a process of its own, as a call into the vendor's library may hang for ever.

Here it is watched, killed and started again. Nothing in `Reader` blocks its caller longer than the deadline.
"""

import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wire.reports import GpuReading
from workers.gpus import GpuList
from workers.gpus.faults import FAULTS_VARIABLE
from workers.gpus.reading import Frame, Listed, Read, Stuck, Unpacker

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
KEPT_READINGS = 8192
INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", FAULTS_VARIABLE)
"""The broker's address and the node's key stay out of the reader's environment."""

STARTING = "failed: the GPU reader is starting, no answer yet"


@dataclass(frozen=True, slots=True)
class Limits:
    deadline_s: float = 3.0
    start_deadline_s: float = 60.0  # without persistence mode the driver wakes every board when it is opened
    restart_delays_s: tuple[float, ...] = (0.5, 5.0, 20.0, 60.0)
    steady_s: float = 60.0  # after that long a failure counts as the first
    retry_silent_s: float = 60.0  # until a GPU that made the reader hang is asked again; doubled each time
    retry_silent_most_s: float = 900.0

    def retry_after_s(self, hangs: int) -> float:
        return min(self.retry_silent_s * 2 ** min(hangs - 1, 10), self.retry_silent_most_s)


class Hung(Exception):
    def __init__(self, gpu: int | None) -> None:
        super().__init__(gpu)
        self.gpu = gpu


class Died(Exception):
    pass


class Reader:
    """`status` is `ok`, `hung` (a GPU does not answer; the others are read on) or `failed: <sentence>`."""

    def __init__(self, kind: str, topology: str | None = None, node: str = "", interval_s: float = 1.0,
                 limits: Limits | None = None) -> None:
        self._kind, self._topology, self._node, self._interval_s = kind, topology, node, interval_s
        self._limits = limits or Limits()
        self._status = STARTING
        self._gpus: GpuList | None = None
        self._readings: deque[GpuReading] = deque(maxlen=KEPT_READINGS)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._skip: set[int] = set()
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

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(self._limits.deadline_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
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
            self._stopping.wait(delays[min(self.failures, len(delays)) - 1])

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
                if self._stopping.is_set():
                    return
                if self._may_ask_all_again(time.monotonic() - began):
                    return
        finally:
            self._life = None
            if not life.end():
                self._undead.append(life)

    def _may_ask_all_again(self, lived_s: float) -> bool:
        """Each try may cost a process that sleeps in the driver for ever, so never while one does."""
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
                with self._changed:
                    self._gpus = gpus
                self._unavailable = unavailable
                self._say(f"failed: {gpus.problem}" if unavailable else "hung" if self._skip else "ok")
            case Read(readings):
                with self._changed:
                    self._readings.extend(readings)

    def _note_hung(self, hung: Hung) -> None:
        self._hangs += 1
        log.error("GPU %s does not answer: its reader is ended and started again without it",
                  "driver" if hung.gpu is None else hung.gpu)
        if hung.gpu is not None:
            self._skip.add(hung.gpu)
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
        }
        words = [sys.executable, "-m", "workers.gpus.reading", self._kind]
        words += [f"{name}={value}" for name, value in options.items() if value is not None]
        return words + [f"--skip={index}" for index in sorted(self._skip)]


class Life:
    """One reading process and its pipe. It ends at the end of its input, so it never outlives this process."""

    def __init__(self, command: list[str], patience_s: float) -> None:
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment["PYTHONPATH"] = str(ROOT)
        self._patience_s = patience_s
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True, bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def frames(self, deadline_s: float, first_deadline_s: float) -> Iterator[Frame | None]:
        """Frames as they come, None when there is none for a while. Raises Hung after the deadline, Died at the end."""
        unpacker = Unpacker()
        due = time.monotonic() + first_deadline_s + deadline_s
        for data in self._pieces():
            for frame in unpacker.feed(data):
                due = time.monotonic() + deadline_s
                yield frame
            yield None
            if time.monotonic() > due:
                raise Hung(None)

    def _pieces(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(0.1):
                    yield b""
                elif data := os.read(self._process.stdout.fileno(), 1 << 16):
                    yield data
                else:
                    raise Died(f"the GPU reader ended ({self._exit()}); it is started again")

    def _exit(self) -> str:
        try:
            code = self._process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> bool:
        """False for a process that not even a kill ends."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        try:
            self._process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            log.error("the GPU reader (pid %d) sleeps inside the driver and cannot be killed: left behind", self.pid)
            return False
        return True
