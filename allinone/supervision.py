"""Keeps a list of services running: one that dies is started again and that is said; stops go in reverse order."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from allinone.faults import Fault

CALM_S = 30.0  # after this long without a fall, the next one counts as the first
LONGEST_PAUSE_S = 15.0


class Service(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    def start(self) -> object: ...
    def stop(self) -> None: ...
    def exit_code(self) -> int | None: ...


@dataclass
class Watch:
    """How one service has been doing."""

    service: Service
    falls: int = 0
    started_at: float = 0.0
    start_again_at: float | None = None


@dataclass
class Supervision:
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    watches: list[Watch] = field(default_factory=list)

    def start(self, service: Service) -> None:
        # Before the start: one that was interrupted while starting must be stopped too.
        self.watches.append(Watch(service, started_at=self.clock()))
        service.start()

    def tend(self) -> None:
        """One look at every service. Call it a few times a second."""
        now = self.clock()
        for watch in self.watches:
            if watch.start_again_at is None and watch.service.exit_code() is not None:
                self._fell(watch, now)
            if watch.start_again_at is not None and now >= watch.start_again_at:
                self._start_again(watch, now)
        reap_adopted({watch.service.pid for watch in self.watches})

    def stop(self) -> None:
        while self.watches:
            self.watches.pop().service.stop()

    def _fell(self, watch: Watch, now: float) -> None:
        if now - watch.started_at > CALM_S:
            watch.falls = 0
        watch.falls += 1
        pause_s = pause_before_restart_s(watch.falls)
        watch.start_again_at = now + pause_s
        when = "now" if pause_s == 0 else f"in {pause_s:g} s"
        self.say(f"{watch.service.name} ended ({how(watch.service.exit_code())}); starting it again {when}.")

    def _start_again(self, watch: Watch, now: float) -> None:
        watch.start_again_at, watch.started_at = None, now
        try:
            watch.service.start()
        except (Fault, OSError) as error:  # a machine out of memory or processes for a moment must not end the rest
            self.say(f"{watch.service.name} could not be started: {error}")
            self._fell(watch, now)


def pause_before_restart_s(falls: int) -> float:
    """The first restart is immediate; one that keeps falling is tried ever more rarely."""
    return 0.0 if falls <= 1 else min(0.5 * 2 ** (falls - 2), LONGEST_PAUSE_S)


def how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"signal {-exit_code}"
    return f"exit status {exit_code}"


def reap_adopted(own: set[int | None]) -> None:
    """Collects dead processes that became ours when their parent ended, without taking what Popen waits for."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in own:
            return
        try:
            os.waitpid(dead.si_pid, os.WNOHANG)
        except ChildProcessError:
            return
