"""What was sent and what is durable: the node keeps everything until the portal's database acknowledges it.

The broker may lose what it accepted. Entries of one upward stream are read in order, so a heartbeat that comes back
proves that everything sent before it was read or lost: what is then still not acknowledged is sent again.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from wire.reports import AttemptEvent
from wire.states import ATTEMPT_ENDED
from workers.publish import Publisher
from workers.spool import AttemptDir, Spool

Clock = Callable[[], float]

RESEND_AFTER_S = 5.0
"""Without any progress, and with a heartbeat that came back after the sending."""

RESEND_UNPROVEN_AFTER_S = 60.0
"""Without any sign from the portal. Longer, or an ingest that is down would find everything many times."""


class Pulse:
    """The node's heartbeats by number, and the newest that the portal has seen."""

    KEPT = 256

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self.sent = 0
        self.echoed = 0
        self._echoed_at: float | None = None

    def beat(self) -> str:
        """-> the nonce of a new heartbeat."""
        nonce = secrets.token_urlsafe(12)
        with self._lock:
            self.sent += 1
            self._numbers[nonce] = self.sent
            if len(self._numbers) > self.KEPT:
                del self._numbers[next(iter(self._numbers))]
        return nonce

    def heard(self, nonce: str) -> None:
        with self._lock:
            number = self._numbers.get(nonce, 0)
            if number > self.echoed:
                self.echoed = number
                self._echoed_at = self._clock()

    def silence_s(self) -> float | None:
        """Since a new heartbeat came back last; None if none ever did."""
        return None if self._echoed_at is None else self._clock() - self._echoed_at


class Cursor:
    """One stream of numbered things: events by number, bytes by offset."""

    def __init__(self, pulse: Pulse, clock: Clock = time.monotonic) -> None:
        self._pulse, self._clock = pulse, clock
        self.acknowledged = 0
        self.sent = 0
        self._beats_at_send = 0
        self._repeats = 0  # without progress: a portal that takes none of it gets it ever more rarely
        self._progress_at = 0.0

    @property
    def in_flight(self) -> int:
        return max(0, self.sent - self.acknowledged)

    def advance(self, to: int) -> None:
        """Call it after the sending, so that a beat counted here may only have gone out earlier."""
        if not self.in_flight:
            self._progress_at = self._clock()
        self._beats_at_send = self._pulse.sent
        self.sent = to

    def acknowledge(self, to: int) -> None:
        """`to` may be smaller than before: a portal restored from a backup asks for the rest again."""
        if to != self.acknowledged:
            self._progress_at = self._clock()
            self._repeats = 0
        self.acknowledged = to
        self.sent = max(self.sent, to)

    def rewind_if_lost(self) -> bool:
        if not self.in_flight:
            return False
        waited_s = self._clock() - self._progress_at
        proven = self._pulse.echoed > self._beats_at_send
        patience_s = RESEND_AFTER_S * 2**self._repeats if proven else RESEND_UNPROVEN_AFTER_S
        if waited_s < min(patience_s, RESEND_UNPROVEN_AFTER_S):
            return False
        self.sent = self.acknowledged
        self._repeats = min(self._repeats + 1, 10)
        return True


class EventOutbox:
    """Sends the spooled events of every attempt, in order, until they are durable."""

    def __init__(self, spool: Spool, publisher: Publisher, pulse: Pulse,
                 stream_sizes: Callable[[str, dict[str, int]], dict[str, int]]) -> None:
        """`stream_sizes` turns sizes of files into lengths of streams (see logs.Shipper)."""
        self._spool, self._publisher, self._pulse = spool, publisher, pulse
        self._stream_sizes = stream_sizes
        self._cursors: dict[str, Cursor] = {}
        self._complete: set[str] = set()
        self._noted: dict[str, int] = {}
        self._lock = threading.Lock()
        self.outstanding = False

    def acknowledge(self, attempt: str, seq: int) -> None:
        with self._lock:
            self._noted[attempt] = seq

    def run_once(self) -> int:
        """-> how many were sent. Raises BrokerDown; nothing is lost by it."""
        attempts = self._spool.attempts()
        self._drop_all_but({attempt.path.name for attempt in attempts})
        self._apply_noted()
        sent = sum(self._send_from(attempt) for attempt in attempts if attempt.path.name not in self._complete)
        self.outstanding = any(cursor.in_flight for cursor in self._cursors.values())
        return sent

    def _apply_noted(self) -> None:
        with self._lock:
            noted, self._noted = self._noted, {}
        for attempt, seq in noted.items():
            cursor = self._cursor(attempt)
            if seq < cursor.acknowledged:
                self._complete.discard(attempt)
            cursor.acknowledge(seq)

    def _send_from(self, attempt: AttemptDir) -> int:
        cursor = self._cursor(attempt.path.name)
        cursor.rewind_if_lost()
        events = [self._true_sizes(event) for event in attempt.events(cursor.sent)]
        if events:
            self._publisher.send_all(events)
            cursor.advance(events[-1].seq)
        elif not cursor.in_flight and ended(attempt.events(cursor.acknowledged - 1)):
            self._complete.add(attempt.path.name)
        return len(events)

    def _true_sizes(self, event: AttemptEvent) -> AttemptEvent:
        if not event.log_sizes:
            return event
        return msgspec.structs.replace(event, log_sizes=self._stream_sizes(event.attempt, event.log_sizes))

    def _cursor(self, attempt: str) -> Cursor:
        return self._cursors.setdefault(attempt, Cursor(self._pulse))

    def _drop_all_but(self, present: set[str]) -> None:
        for attempt in self._cursors.keys() - present:
            del self._cursors[attempt]
            self._complete.discard(attempt)


def ended(events: Iterable[AttemptEvent]) -> bool:
    return any(event.state in ATTEMPT_ENDED for event in events)
