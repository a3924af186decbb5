"""What runs on this node: starts shims, turns what they write into events, and finds them again after a restart.

Everything is derived from disk: the worker may be killed at any moment and the next goes on. Who is alive is decided by
the attempt's lock, which its shim holds for life, and by (pid, start time, boot id); nothing is ended on doubt.
"""

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from wire.desired import Launch, Stop
from wire.reports import AttemptEvent, RankExit, Refusal
from wire.states import ATTEMPT_ENDED, END_STATE, AttemptState, EndReason
from workers import launchers, plan
from workers.launchers.base import LaunchError
from workers.runtimes import RUNTIMES
from workers.runtimes.process import Leftover, live_members
from workers.spool import AttemptDir, Spool

ROOT = Path(__file__).resolve().parent.parent

BOOT = "import sys; sys.path.append(sys.argv[1]); from workers.shim import main; main(sys.argv[2], int(sys.argv[3]))"
"""Imported rather than run as a file, so that its compiled form is used; its path comes last and shadows nothing."""

SHIM_LOG = "shim.log"
NEVER_STARTED = "stopped before it started on this node"
CHILD_EXIT_S = 5.0
MESSAGE_CHARS = 1000

logger = logging.getLogger(__name__)


class JobSettings(Protocol):
    @property
    def job_path(self) -> str: ...


class Supervised:
    """An attempt that has not ended."""

    def __init__(self, directory: AttemptDir) -> None:
        self.directory = directory
        self.child: subprocess.Popen[bytes] | None = None
        self.leftover: Leftover | None = None
        self.empty_rounds = 0
        self.complained = False


class Supervisor:
    def __init__(self, spool: Spool, settings: JobSettings, cgroups: str = "auto",
                 preflight: Callable[[Launch], list[Refusal]] = lambda _: []) -> None:
        """`preflight` says what speaks against a start on this node, from what is known already: it must not wait."""
        self._spool, self._settings, self._cgroups, self._preflight = spool, settings, cgroups, preflight
        self._open: dict[str, Supervised] = {}
        self._lock = threading.RLock()
        self._boot_id = plan.boot_id()
        self._changed = os.open(spool.changed, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def launch(self, launch: Launch) -> None:
        """Starts an attempt once, however often it is asked. Raises SpoolError."""
        with self._lock:
            directory = self._spool.find(launch.attempt)
            if directory is None and (refusal := self._spool.epochs.refuses(launch)) is not None:
                self._bury(launch, EndReason.UNKNOWN_EPOCH, refusal)
                return
            directory = directory or self._spool.create(launch)
            self._spool.epochs.take(launch)
            if not has_ended(directory):
                self._start(self._supervised(directory))

    def stop(self, stop: Stop) -> None:
        """Of an attempt that never came: it is ended here and now, and its late launch starts nothing."""
        with self._lock:
            directory = self._spool.find(stop.attempt)
            if directory is None:
                self._bury(unseen(stop), EndReason.STOP_REQUESTED, NEVER_STARTED)
            elif not has_ended(directory):
                directory.request_stop(stop.grace_s)
                if directory.shim() is None and not directory.lock_held():
                    self._end(directory, EndReason.STOP_REQUESTED, message=NEVER_STARTED)

    def poll(self) -> None:
        """Turns news on disk into events. One attempt that fails to be read does not hide the others."""
        with self._lock:
            for attempt, supervised in list(self._open.items()):
                try:
                    self._look_at(supervised)
                    supervised.complained = False
                except Exception:
                    if not supervised.complained:
                        logger.exception("attempt %s could not be looked at; it is tried again", attempt)
                    supervised.complained = True

    def wait(self, timeout_s: float) -> bool:
        """Until a shim has news. -> whether one has."""
        ready, _, _ = select.select([self._changed], [], [], timeout_s)
        if ready:
            os.read(self._changed, 65536)
        return bool(ready)

    def recover(self) -> None:
        """After a restart of the worker. What never started waits for its order to be given anew."""
        with self._lock:
            found = self._spool.attempts()
            for directory in found:
                if not has_ended(directory):
                    self._supervised(directory)
            for directory in found:
                self._spool.epochs.take(directory.launch)
        self.poll()

    def forget(self, attempt: str) -> None:
        """Removes the spool of an attempt that has ended; of another one it does nothing."""
        with self._lock:
            directory = self._spool.find(attempt)
            if directory is not None and has_ended(directory):
                self._spool.remove(attempt)

    def active(self) -> list[str]:
        with self._lock:
            return sorted(self._open)

    def processes(self, attempt: str) -> set[int]:
        with self._lock:
            supervised = self._open.get(attempt)
        shim = supervised.directory.shim() if supervised else None
        return live_members(shim) if shim and self._is_alive(shim) else set()

    def close(self) -> None:
        """Lets go of everything; runs go on."""
        os.close(self._changed)

    def _bury(self, launch: Launch, reason: EndReason, message: str) -> None:
        """An attempt that will never start here leaves a directory all the same: its end is reported from there."""
        directory = self._spool.create(launch, end_record(reason, message))
        self._spool.epochs.take(launch)
        self._supervised(directory)
        self._look_at(self._supervised(directory))

    def _supervised(self, directory: AttemptDir) -> Supervised:
        return self._open.setdefault(directory.launch.attempt, Supervised(directory))

    def _start(self, supervised: Supervised) -> None:
        directory = supervised.directory
        if directory.shim() is not None or directory.exit_record() is not None:
            return
        lock_fd = directory.lock()
        if lock_fd is None:
            return  # its shim is on the way
        try:
            self._start_locked(supervised, lock_fd)
        finally:
            os.close(lock_fd)

    def _start_locked(self, supervised: Supervised, lock_fd: int) -> None:
        directory = supervised.directory
        refusals = self._preflight(directory.launch)
        if refusals:
            self._refuse(directory, refusals)
            return
        if directory.last_seq == 0:
            self._append(directory, AttemptState.STARTING, elapsed_s=0.0)
        try:
            self._write_plan(directory)
        except LaunchError as error:
            self._end(directory, EndReason.LAUNCH_FAILED, message=str(error))
            return
        supervised.child = spawn(directory, lock_fd)

    def _write_plan(self, directory: AttemptDir) -> None:
        launch = directory.launch
        if launch.runtime not in RUNTIMES:
            raise LaunchError(f"this node has no runtime {launch.runtime!r}; it has {', '.join(RUNTIMES)}")
        launcher = launchers.load(launch.launcher)
        try:
            made = launcher.plan(launch, directory, self._settings.job_path)
        except OSError as error:  # such as a name longer than a file's may be
            raise LaunchError(f"the command cannot be prepared: {error.strerror}") from error
        made.share, made.accepted_s = f"{launch.attempt}.{launch.node_rank}", plan.boot_clock_s()
        made.runtime, made.limits.cgroups = launch.runtime, self._cgroups
        try:
            directory.write_plan(made)
        except ValueError as error:
            raise LaunchError(str(error)) from error

    def _look_at(self, supervised: Supervised) -> None:
        directory = supervised.directory
        dead = supervised.child is not None and supervised.child.poll() is not None
        record = directory.exit_record()
        self._note_status(directory)
        if record is not None:
            self._finish(directory, record)
        elif supervised.leftover is not None:
            self._end_leftover(supervised)
        elif dead or supervised.child is None:
            self._check_shim(supervised)

    def _note_status(self, directory: AttemptDir) -> None:
        state = last_state(directory)
        if state not in (None, AttemptState.STARTING, AttemptState.RUNNING):
            return
        status = directory.status()
        if status is None:
            return
        if state is not AttemptState.RUNNING:
            self._append(directory, AttemptState.RUNNING, at=float(status["at"]), pid=int(status["pid"]),
                         elapsed_s=float(status["elapsed_s"]))
        stuck = directory.stuck()
        if stuck is not None:
            self._append(directory, AttemptState.STOPPING, message=stuck["message"],
                         elapsed_s=float(stuck["elapsed_s"]))

    def _finish(self, directory: AttemptDir, record: dict[str, str]) -> None:
        reason = EndReason(record["reason"])
        code, signal = record.get("exit_code"), record.get("signal")
        ended = RankExit(rank=-1, exit_code=int(code) if code else None, signal=int(signal) if signal else None,
                         ended_at=float(record["at"]))
        launch = directory.launch
        known = reason in (EndReason.EXITED, EndReason.EXIT_CODE, EndReason.SIGNAL, EndReason.OUT_OF_MEMORY)
        ranks = launchers.load(launch.launcher).rank_exits(launch, directory, ended) if known else []
        self._append_end(directory, reason, ended, ranks, record)

    def _append_end(self, directory: AttemptDir, reason: EndReason, ended: RankExit, ranks: list[RankExit],
                    record: dict[str, str]) -> None:
        message = record.get("message") or next((one.message for one in ranks if one.message), None)
        if message is None and reason is EndReason.EXIT_CODE:
            message = self._any_last_line(directory)
        elapsed = record.get("elapsed_s")
        event = self._event(directory, END_STATE[reason], at=ended.ended_at, message=message,
                            elapsed_s=float(elapsed) if elapsed else None)
        event.reason, event.exit_code, event.signal, event.ranks = reason, ended.exit_code, ended.signal, ranks
        event.log_sizes = directory.log_sizes()
        if "refusals" in record:
            event.refusals = msgspec.json.decode(record["refusals"], type=list[Refusal])
        directory.append_event(event)
        self._close(directory)

    def _any_last_line(self, directory: AttemptDir) -> str | None:
        lines = [launchers.base.last_error_line(directory.log_path(stream)) for stream in directory.streams()]
        return next((line for line in lines if line), None)

    def _end(self, directory: AttemptDir, reason: EndReason, *, message: str) -> None:
        """An end that needs no shim. Written down first: the event follows from the record, also after a crash."""
        if directory.exit_record() is None:
            directory.write_exit_record(end_record(reason, message))
        self._look_at(self._supervised(directory))

    def _refuse(self, directory: AttemptDir, refusals: list[Refusal]) -> None:
        record = end_record(EndReason.PREFLIGHT, " ".join(one.message for one in refusals))
        directory.write_exit_record([*record, ("refusals", msgspec.json.encode(refusals).decode())])
        self._look_at(self._supervised(directory))

    def _check_shim(self, supervised: Supervised) -> None:
        """The lock is free and there is no record: what the shim looked after is ended, never taken over half-blind."""
        directory = supervised.directory
        if directory.lock_held() or directory.exit_record() is not None:
            return
        shim = directory.shim()
        if shim is None:
            if supervised.child is not None:
                self._end(directory, EndReason.LAUNCH_FAILED, message=shim_complaint(directory))
            elif directory.stop_requested():
                self._end(directory, EndReason.STOP_REQUESTED, message=NEVER_STARTED)
        elif shim["boot_id"] != self._boot_id:
            self._end(directory, EndReason.NODE_REBOOT, message="the node was restarted while the job ran")
        else:
            supervised.leftover = Leftover(marks(directory.launch), shim, directory.status())
            self._end_leftover(supervised)

    def _end_leftover(self, supervised: Supervised) -> None:
        """One round per poll, so that one stubborn tree holds nobody up; found empty twice, it is empty."""
        leftover = supervised.leftover
        if leftover is None:
            return
        if leftover.pids():
            supervised.empty_rounds = 0
            leftover.kill()
            return
        supervised.empty_rounds += 1
        if supervised.empty_rounds >= 2:
            leftover.clean_up()
            self._end(supervised.directory, EndReason.SUPERVISOR_LOST,
                      message="the process that looked after the job died; the job was ended and nothing of it is left")

    def _is_alive(self, shim: dict[str, str]) -> bool:
        return shim["boot_id"] == self._boot_id and str(plan.start_time(int(shim["pid"]))) == shim["start_time"]

    def _append(self, directory: AttemptDir, state: AttemptState, *, at: float | None = None, pid: int | None = None,
                message: str | None = None, elapsed_s: float | None = None) -> None:
        event = self._event(directory, state, at=at, message=message, elapsed_s=elapsed_s)
        event.pid = pid
        directory.append_event(event)

    def _event(self, directory: AttemptDir, state: AttemptState, *, at: float | None, message: str | None,
               elapsed_s: float | None) -> AttemptEvent:
        launch = directory.launch
        return AttemptEvent(attempt=launch.attempt, job=launch.job, epoch=launch.epoch, seq=directory.last_seq + 1,
                            at=time.time() if at is None else at, state=state, message=message, monotonic_s=elapsed_s)

    def _close(self, directory: AttemptDir) -> None:
        supervised = self._open.pop(directory.launch.attempt, None)
        if supervised is not None and supervised.child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervised.child.wait(CHILD_EXIT_S)  # its record is its last act


def spawn(directory: AttemptDir, lock_fd: int) -> subprocess.Popen[bytes]:
    """Starts the shim in a session of its own with a bare environment. It inherits the lock and nothing else."""
    argv = [sys.executable, "-I", "-S", "-X", "utf8", "-c", BOOT, str(ROOT), str(directory.path), str(lock_fd)]
    with (directory.path / SHIM_LOG).open("ab") as log:
        return subprocess.Popen(argv, env={}, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                pass_fds=(lock_fd,), start_new_session=True)


def marks(launch: Launch) -> dict[str, str]:
    """What every process of a share has in its environment."""
    return {"GPUYARD_ATTEMPT_ID": launch.attempt, "GPUYARD_NODE_RANK": str(launch.node_rank)}


def unseen(stop: Stop) -> Launch:
    """What is known of an attempt of which only the stop came."""
    return Launch(attempt=stop.attempt, job=stop.job, epoch=stop.epoch, name="", user="", launcher="script", command="")


def end_record(reason: EndReason, message: str) -> plan.Pairs:
    said = message[:MESSAGE_CHARS].replace("\0", "\ufffd")
    return [("reason", reason.value), ("at", repr(time.time())), ("message", said)]


def has_ended(directory: AttemptDir) -> bool:
    return last_state(directory) in ATTEMPT_ENDED


def last_state(directory: AttemptDir) -> AttemptState | None:
    events = directory.events()
    return events[-1].state if events else None


def shim_complaint(directory: AttemptDir) -> str:
    said = launchers.base.last_error_line(directory.path / SHIM_LOG)
    return f"the process that was to look after the job did not start: {said or 'it left no message'}"
