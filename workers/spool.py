"""The spool: one directory per attempt, kept until the portal's database has everything in it.

A directory appears whole (built aside, then renamed), so it is there or not; its name is the attempt, so the same
attempt cannot have two. What must be written at a run's end has its blocks set aside here.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
from pathlib import Path

import msgspec

from wire.desired import Launch
from wire.reports import AttemptEvent
from workers import plan
from workers.plan import Pairs, Plan

LAUNCH = "launch.json"
EVENTS = "events.jsonl"
EVENTS_BYTES = 64 * 1024
DRAFT = ".new-"
WORK = "work"
FOLDERS = (plan.LOGS, "errors", WORK, "tmp")

EPOCHS_KEPT = 50_000

logger = logging.getLogger(__name__)


class SpoolError(Exception):
    """The spool cannot be written; the sentence names what is wrong."""


class AttemptDir:
    """One attempt on disk. One object per process and attempt: its events are read from disk once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.launch = msgspec.json.decode((path / LAUNCH).read_bytes(), type=Launch)
        self._events = self._read_events()
        self._lock = threading.Lock()

    @property
    def plan(self) -> Plan | None:
        try:
            return plan.decode_plan((self.path / plan.PLAN).read_bytes())
        except FileNotFoundError:
            return None

    def write_plan(self, made: Plan) -> None:
        draft = self.path / f"{plan.PLAN}.new"
        write_synced(draft, made.encode())
        draft.replace(self.path / plan.PLAN)

    def shim(self) -> dict[str, str] | None:
        """Who looks after the run: pid, start time, boot id, control group. None: never started."""
        return plan.read_record(str(self.path / plan.SHIM))

    def status(self) -> dict[str, str] | None:
        return plan.read_record(str(self.path / plan.STATUS))

    def stuck(self) -> dict[str, str] | None:
        """Why a run that is being ended does not end."""
        return plan.read_record(str(self.path / plan.STUCK))

    def exit_record(self) -> dict[str, str] | None:
        return plan.read_record(str(self.path / plan.EXIT))

    def write_exit_record(self, pairs: Pairs) -> None:
        plan.write_record(str(self.path / plan.EXIT), pairs)

    def request_stop(self, grace_s: float) -> None:
        """The first request stands; a later one may only shorten its grace."""
        before = plan.read_record(str(self.path / plan.STOP))
        if before is None or float(before["grace_s"]) > grace_s:
            # Of one width: the shim may read while a shorter grace is written over the first.
            plan.write_record(str(self.path / plan.STOP), [("grace_s", f"{grace_s:012.3f}")])
        plan.nudge(str(self.path / plan.WAKE))

    def stop_requested(self) -> bool:
        return plan.read_record(str(self.path / plan.STOP)) is not None

    def append_event(self, event: AttemptEvent) -> None:
        """Durable when it returns. The next number only: a repeated or skipped one is a fault of the caller."""
        with self._lock:
            if event.seq != self.last_seq + 1:
                raise ValueError(f"event {event.seq} of {event.attempt} after {self.last_seq}")
            self._write_event(msgspec.json.encode(event) + b"\n")
            self._events.append(event)

    def events(self, after_seq: int = 0) -> list[AttemptEvent]:
        return [event for event in self._events if event.seq > after_seq]

    @property
    def last_seq(self) -> int:
        return self._events[-1].seq if self._events else 0

    def log_path(self, stream: str) -> Path:
        return self.path / plan.LOGS / f"{stream}.log"

    def streams(self) -> list[str]:
        """Streams that have a file by now."""
        return sorted(path.stem for path in (self.path / plan.LOGS).glob("*.log"))

    def log_sizes(self) -> dict[str, int]:
        return {stream: self.log_path(stream).lstat().st_size for stream in self.streams()}

    def drops(self, stream: str) -> list[tuple[int, int]]:
        """Ranges that were cut out of a flood: (from, to), in order."""
        try:
            lines = self.log_path(stream).with_suffix(".drops").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(start), int(end)) for start, end in (line.split() for line in lines)]

    def lock(self) -> int | None:
        """-> a descriptor that holds the attempt, None if a shim holds it. Closing it gives the attempt back."""
        fd = os.open(self.path / plan.LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def lock_held(self) -> bool:
        fd = self.lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def remove(self) -> None:
        """Moved aside first, so that a half-deleted directory is never taken for an attempt."""
        trash = self.path.with_name(f"{DRAFT}gone-{self.path.name}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def keep_work(self, root: Path) -> None:
        work = self.path / WORK
        if not work.is_dir() or not any(work.iterdir()):
            return
        root.mkdir(mode=0o700, exist_ok=True)
        os.utime(work)  # its age counts from now
        with contextlib.suppress(OSError):  # kept before, or a disk that takes nothing: the end of the run matters more
            work.rename(root / f"job-{self.launch.job}-attempt-{self.launch.epoch}")

    def _write_event(self, line: bytes) -> None:
        fd = os.open(self.path / EVENTS, os.O_RDWR | os.O_CLOEXEC)
        try:
            end = len(complete_lines(read_fd(fd)))
            os.pwrite(fd, line, end)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read_events(self) -> list[AttemptEvent]:
        lines = complete_lines((self.path / EVENTS).read_bytes()).splitlines()
        return [msgspec.json.decode(line, type=AttemptEvent) for line in lines]


class Spool:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, AttemptDir] = {}
        self._unreadable: set[str] = set()
        self._lock = threading.RLock()
        self._make_root()
        self.epochs = Epochs(root / "epochs")

    def create(self, launch: Launch, ended: plan.Pairs | None = None) -> AttemptDir:
        """-> the attempt's directory, made now or before. `ended` is the exit record of one that will never start: it
        is there in the same step as the directory. Raises SpoolError."""
        with self._lock:
            known = self.find(launch.attempt)
            if known is not None:
                return known
            try:
                self._build(launch, ended)
            except OSError as error:
                why = f"the spool {self.root} cannot take attempt {launch.attempt}: {error.strerror}"
                raise SpoolError(why) from error
            return self._known.setdefault(launch.attempt, AttemptDir(self.root / launch.attempt))

    def find(self, attempt: str) -> AttemptDir | None:
        with self._lock:
            if attempt not in self._known and (self.root / safe_name(attempt)).is_dir():
                self._known[attempt] = AttemptDir(self.root / attempt)
            return self._known.get(attempt)

    def attempts(self) -> list[AttemptDir]:
        with self._lock:
            names = sorted(entry.name for entry in os.scandir(self.root)
                           if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."))
            return [directory for name in names if (directory := self._find_readable(name)) is not None]

    def remove(self, attempt: str) -> None:
        """What the run left in a working directory of its own is kept: see `kept_root`."""
        with self._lock:
            directory = self._known.pop(attempt, None)
            if directory is not None:
                directory.keep_work(self.kept_root)
                directory.remove()

    @property
    def kept_root(self) -> Path:
        """Working directories of ended runs that were not empty, one `job-<id>-attempt-<n>` each."""
        return self.root.with_name("kept")

    def clear_kept(self, older_than_s: float, now: float) -> None:
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.kept_root):
                if now - entry.stat(follow_symlinks=False).st_mtime > older_than_s:
                    shutil.rmtree(entry.path, ignore_errors=True)

    @property
    def changed(self) -> Path:
        """FIFO that a shim writes into when it has news."""
        return self.root / f".{plan.CHANGED}"

    def _find_readable(self, name: str) -> AttemptDir | None:
        """One directory that a broken disk or a person spoilt must not hide the others."""
        try:
            return self.find(name)
        except (OSError, msgspec.MsgspecError):
            if name not in self._unreadable:
                logger.exception("%s is not the directory of an attempt; it is left alone", self.root / name)
                self._unreadable.add(name)
            return None

    def _build(self, launch: Launch, ended: plan.Pairs | None) -> None:
        draft = self.root / f"{DRAFT}{safe_name(launch.attempt)}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        for folder in FOLDERS:
            (draft / folder).mkdir(mode=0o700)
        (draft / plan.LOCK).touch(mode=0o600)
        os.mkfifo(draft / plan.WAKE, 0o600)
        for record in plan.RECORDS:
            plan.reserve(str(draft / record))
        if ended is not None:
            plan.write_record(str(draft / plan.EXIT), ended)
        plan.reserve(str(draft / EVENTS), EVENTS_BYTES)
        write_synced(draft / LAUNCH, msgspec.json.encode(launch))
        sync_directory(draft)
        draft.rename(self.root / launch.attempt)
        sync_directory(self.root)

    def _make_root(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self.root.glob(f"{DRAFT}*"):
                shutil.rmtree(left, ignore_errors=True)
            if not self.changed.is_fifo():
                os.mkfifo(self.changed, 0o600)
        except OSError as error:
            raise SpoolError(f"the spool {self.root} cannot be used: {error.strerror}") from error


class Epochs:
    """The newest attempt of every job that this node has taken, kept beyond the attempt's directory: the fence."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest: dict[int, tuple[int, str]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            self._learn(line)
        if len(lines) > 2 * EPOCHS_KEPT:
            self._compact()

    def refuses(self, launch: Launch) -> str | None:
        """-> why this launch may not start, for an attempt without a directory here."""
        epoch, attempt = self._newest.get(launch.job, (0, ""))
        if launch.epoch < epoch:
            return f"attempt {launch.epoch} of job {launch.job} is older than attempt {epoch}, taken by this node"
        if launch.attempt == attempt:
            return f"attempt {launch.epoch} of job {launch.job} has already run here and was put away"
        return None

    def take(self, launch: Launch) -> None:
        epoch, attempt = self._newest.get(launch.job, (0, ""))
        if (launch.epoch, launch.attempt) != (epoch, attempt) and launch.epoch >= epoch:
            line = f"{launch.job} {launch.epoch} {launch.attempt}"
            append_synced(self._path, line.encode() + b"\n")
            self._learn(line)

    def _learn(self, line: str) -> None:
        words = line.split()
        if len(words) == 3 and words[0].isdigit() and words[1].isdigit():  # else torn by a power cut
            self._newest.pop(int(words[0]), None)
            self._newest[int(words[0])] = (int(words[1]), words[2])

    def _compact(self) -> None:
        kept = list(self._newest.items())[-EPOCHS_KEPT:]
        draft = self._path.with_name(f"{DRAFT}epochs")
        write_synced(draft, "".join(f"{job} {epoch} {attempt}\n" for job, (epoch, attempt) in kept).encode())
        draft.replace(self._path)
        self._newest = dict(kept)


def safe_name(attempt: str) -> str:
    """An attempt's id is a directory's name here. Raises SpoolError for one that is more than a name."""
    if not attempt or attempt.startswith(".") or "/" in attempt or "\0" in attempt:
        raise SpoolError(f"{attempt!r} cannot be the id of an attempt")
    return attempt


def complete_lines(data: bytes) -> bytes:
    """What was written whole, of a file whose rest is zeros or a torn line."""
    written = data.partition(b"\0")[0]
    return written[:written.rfind(b"\n") + 1]


def read_fd(fd: int) -> bytes:
    chunks = []
    while chunk := os.read(fd, 1 << 20):
        chunks.append(chunk)
    return b"".join(chunks)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_synced(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
