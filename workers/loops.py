"""Threads that cannot die unseen, and the restart of a worker that has gone deaf."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from workers.publish import BrokerDown

STOP_WAIT_S = 0.5
MAX_PAUSE_S = 2.0
"""After failures; the level sync must find its way back within seconds."""

WARN_INTERVAL_S = 60.0
RESTART_INTERVAL_S = 300.0
EXIT_RESTART = 75

logger = logging.getLogger(__name__)


class Loop:
    """Repeats `body` in a thread of its own. `body` returns the seconds until its next turn; `wake` ends the wait."""

    def __init__(self, name: str, body: Callable[[], float]) -> None:
        self.name = name
        self._body = body
        self._wake = threading.Event()
        self._stopping = False
        self._failures = 0
        self._warned_at = float("-inf")
        self._turn_began_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_WAIT_S)

    def wake(self) -> None:
        self._wake.set()

    def stuck_s(self) -> float:
        """How long the present turn has been going on; infinite if the thread is gone."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._stopping:
            return float("inf")
        began_at = self._turn_began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def _run(self) -> None:
        while not self._stopping:
            self._turn_began_at = time.monotonic()
            pause_s = self._turn()
            self._turn_began_at = None
            self._wake.wait(pause_s)
            self._wake.clear()

    def _turn(self) -> float:
        try:
            pause_s = self._body()
        except BrokerDown as error:
            self._warn_of_broker(error)
            return self._failed()
        except Exception:
            logger.exception("%s failed; it is tried again", self.name)
            return self._failed()
        self._failures = 0
        return pause_s

    def _warn_of_broker(self, error: BrokerDown) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARN_INTERVAL_S:
            self._warned_at = now
            logger.warning("%s: %s; it goes on as soon as the broker is back", self.name, error)

    def _failed(self) -> float:
        self._failures += 1
        return float(min(MAX_PAUSE_S, 0.1 * 2 ** min(self._failures, 10)))


class Restarter:
    """Ends the process so that whoever supervises it starts a fresh one; at most once in five minutes."""

    def __init__(self, stamp: Path, clock: Callable[[], float] = time.time,
                 leave: Callable[[int], object] = os._exit) -> None:
        self._stamp, self._clock, self._leave = stamp, clock, leave

    def restart(self, reason: str) -> None:
        now = self._clock()
        if 0 <= now - self._last() < RESTART_INTERVAL_S:
            return
        self._stamp.write_text(str(now))
        logger.critical("restarting this worker: %s. Running jobs are not touched.", reason)
        logging.shutdown()
        self._leave(EXIT_RESTART)

    def _last(self) -> float:
        try:
            return float(self._stamp.read_text())
        except (OSError, ValueError):
            return float("-inf")
