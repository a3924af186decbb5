"""One node without its portal: a spool, a supervisor, and real processes."""

import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wire.desired import GpuSlot, Launch, Stop
from wire.reports import AttemptEvent
from wire.states import ATTEMPT_ENDED
from workers import plan
from workers.runtimes import tree
from workers.spool import AttemptDir, Spool
from workers.supervisor import Supervisor

MARK = "GPUYARD_ATTEMPT_ID"
DEADLINE_S = 20.0


class Settings:
    job_path = ""


class Yard:
    def __init__(self, root: Path, cgroups: str = "auto") -> None:
        self.root = root
        self.cgroups = cgroups
        self.jobs = 0
        self.restart_worker()

    def restart_worker(self) -> None:
        """A new worker in place of the old one, which knows only what is on disk."""
        self.spool = Spool(self.root / "spool")
        self.supervisor = Supervisor(self.spool, Settings(), self.cgroups)

    def order(self, command: str, **fields: Any) -> Launch:
        self.jobs += 1
        given: dict[str, Any] = {"attempt": str(uuid.uuid4()), "job": self.jobs, "epoch": 1, "name": "test",
                                 "user": "alice", "launcher": "script", "command": command, "stop_grace_s": 5.0}
        return Launch(**(given | fields))

    def start(self, command: str, **fields: Any) -> AttemptDir:
        launch = self.order(command, **fields)
        self.supervisor.launch(launch)
        found = self.spool.find(launch.attempt)
        assert found is not None
        return found

    def python(self, text: str, **fields: Any) -> AttemptDir:
        """Runs a Python program."""
        path = self.root / f"program-{self.jobs}.py"
        path.write_text(text)
        return self.start(f"{sys.executable} -u {path}", **fields)

    def run(self, command: str, **fields: Any) -> AttemptEvent:
        return self.ended(self.start(command, **fields))

    def ended(self, attempt: AttemptDir, deadline_s: float = DEADLINE_S) -> AttemptEvent:
        self.until(lambda: bool(attempt.events()) and attempt.events()[-1].state in ATTEMPT_ENDED, deadline_s)
        return attempt.events()[-1]

    def stop(self, attempt: AttemptDir, grace_s: float = 5.0) -> None:
        launch = attempt.launch
        self.supervisor.stop(Stop(attempt=launch.attempt, job=launch.job, epoch=launch.epoch, grace_s=grace_s))

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            self.supervisor.wait(0.05)
            self.supervisor.poll()

    def until_output(self, attempt: AttemptDir, text: str, stream: str = "rank-0") -> None:
        self.until(lambda: text in output(attempt, stream))

    def clear(self) -> None:
        """Ends everything, and nothing may be left of it."""
        for attempt in self.spool.attempts():
            self.stop(attempt, grace_s=0.0)
        self.until(lambda: not self.supervisor.active())
        left = [pid for attempt in self.spool.attempts() for pid in alive(attempt)]
        for pid in left:
            os.kill(pid, 9)
        self.supervisor.close()
        assert not left


def output(attempt: AttemptDir, stream: str = "rank-0") -> str:
    path = attempt.log_path(stream)
    return path.read_text(errors="replace") if path.exists() else ""


def alive(attempt: AttemptDir) -> list[int]:
    """By the mark that every process of an attempt inherits: independent of how the shim finds them."""
    return tree.marked({MARK: attempt.launch.attempt})


def shim_pid(attempt: AttemptDir) -> int:
    shim = attempt.shim()
    assert shim is not None
    return int(shim["pid"])


def is_running(pid: int) -> bool:
    return plan.start_time(pid) is not None and not tree.is_zombie(pid)


def slots(count: int) -> list[GpuSlot]:
    return [GpuSlot(uuid=f"GPU-{index:08d}-test", index=index) for index in range(count)]


def states(attempt: AttemptDir) -> list[str]:
    return [event.state.value for event in attempt.events()]
