"""The order of the portal, reconciled: read the desired state, check it, launch, stop, forget, note what is durable.

A hint only makes the next pass come sooner. Absence from the desired state means nothing; only an explicit stop ends a
run.
"""

import base64
import binascii
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from wire import names
from wire.desired import Desired, HintBody, Launch, Stop
from wire.hardware import Order
from wire.reports import Rejected
from wire.signing import LIFETIME_S, Action, Opener, Refused, decode
from workers.logs import Shipper
from workers.outbox import Clock, EventOutbox, Pulse
from workers.publish import Publisher
from workers.settings import Settings
from workers.supervisor import Supervisor

REJECTION_INTERVAL_S = 30.0
"""At most one report per reason: an attacker, or a wrong clock, must not flood the portal."""

MAX_NONCES = 10_000

RACE_S = 5.0
"""Two processes of the portal may lay down their snapshots in the wrong order: an older but fresh one is no attack."""

logger = logging.getLogger(__name__)


class Overtaken(Exception):
    """A snapshot that a newer one has overtaken on its way: not carried out, and nothing to report."""


class Rejections:
    """Orders that were refused, until they are reported."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._reported_at: dict[str, float] = {}
        self._waiting: list[Rejected] = []
        self._lock = threading.Lock()

    def note(self, refused: Refused) -> bool:
        """-> whether it will be reported."""
        with self._lock:
            now = self._clock()
            if now - self._reported_at.get(refused.code, float("-inf")) < REJECTION_INTERVAL_S:
                return False
            self._reported_at[refused.code] = now
            self._waiting.append(Rejected(at=time.time(), code=refused.code, message=refused.message))
        logger.warning("refused an order (%s): %s", refused.code, refused.message)
        return True

    def send(self, publisher: Publisher) -> None:
        """Raises BrokerDown; they are kept."""
        with self._lock:
            waiting = list(self._waiting)
        if waiting:
            publisher.send_all(waiting)
        with self._lock:
            del self._waiting[:len(waiting)]


class Doorbell:
    """Turns checked hints, and nothing else, into «look now»."""

    def __init__(self, settings: Settings, rejections: Rejections, look: Callable[[], None],
                 clock: Clock = time.time) -> None:
        self._opener = Opener(settings.portal_public_key, sender=names.PORTAL, audience=settings.node,
                              action=Action.HINT, clock=clock)
        self._rejections, self._look, self._clock = rejections, look, clock
        self._nonces: dict[str, float] = {}

    def ring(self, sealed: object) -> None:
        try:
            self._check(sealed)
        except Refused as refused:
            if self._rejections.note(refused):
                self._look()  # reports it, too
        else:
            self._look()

    def _check(self, sealed: object) -> None:
        try:
            raw = base64.b64decode(str(sealed), validate=True)
        except (binascii.Error, ValueError) as error:
            raise Refused("malformed", f"a hint that is not base64: {error}") from error
        envelope = self._opener.open(raw)
        decode(envelope.body, HintBody)
        self._spend(envelope.nonce, envelope.issued_at)

    def _spend(self, nonce: str, issued_at: float) -> None:
        if nonce in self._nonces:
            raise Refused("replayed", "a hint that was already taken")
        oldest = self._clock() - LIFETIME_S
        self._nonces = {known: at for known, at in self._nonces.items() if at >= oldest}
        if len(self._nonces) < MAX_NONCES:  # beyond it a replay costs one look, which is harmless
            self._nonces[nonce] = issued_at


class SerialFile:
    """The newest order that was accepted, kept so that an older one is refused after a restart as well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.value = self._read()

    def raise_to(self, serial: int) -> None:
        if serial <= self.value:
            return
        self.value = serial
        draft = self._path.with_name(self._path.name + ".new")
        draft.write_text(json.dumps({"serial": serial}))
        draft.replace(self._path)

    def _read(self) -> int:
        try:
            return int(json.loads(self._path.read_bytes())["serial"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error("%s is unreadable (%s): taking the next order as the newest", self._path, error)
            return 0


class OrderBook(Protocol):
    def take(self, orders: Iterable[Order]) -> None: ...


@dataclass(frozen=True)
class Upward:
    """What waits for acknowledgements."""

    events: EventOutbox
    logs: Shipper
    pulse: Pulse
    orders: OrderBook | None = None  # about the hardware: their results are told until the portal asks no more

    def note(self, desired: Desired) -> None:
        for attempt, acknowledged in desired.acknowledged.items():
            self.events.acknowledge(attempt, acknowledged.event_seq)
            self.logs.acknowledge(attempt, acknowledged.log_offsets)
        self.logs.prime()
        self.pulse.heard(desired.echo)


class Sync:
    def __init__(self, settings: Settings, publisher: Publisher, supervisor: Supervisor, upward: Upward,
                 rejections: Rejections) -> None:
        self._node = settings.node
        self._publisher, self._supervisor = publisher, supervisor
        self._upward, self._rejections = upward, rejections
        self._opener = Opener(settings.portal_public_key, sender=names.PORTAL, audience=settings.node,
                              action=Action.DESIRED)
        self._serial = SerialFile(settings.state_dir / "serial.json")
        self._done: bytes | None = None  # the snapshot that was carried out in full
        self._launched: set[str] = set()
        self._stopped: set[tuple[str, int, float]] = set()
        self.inventory_digest: str | None = None  # that the portal has; None until an order was read

    @property
    def serial(self) -> int:
        return self._serial.value

    def run_once(self) -> bool:
        """One pass; -> whether there was something new. Raises BrokerDown."""
        sealed = self._publisher.read_desired()
        if sealed is None or sealed == self._done:
            return False
        try:
            desired = self._open(sealed)
        except Overtaken:
            self._done = sealed
            return False
        except Refused as refused:
            self._done = sealed
            self._rejections.note(refused)
            return False
        self._done = sealed if self._apply(desired) else None
        return True

    def _open(self, sealed: bytes) -> Desired:
        envelope = self._opener.open(sealed)
        desired = decode(envelope.body, Desired)
        if desired.node != self._node:
            raise Refused("wrong_audience", f"an order for node {desired.node!r}, this is {self._node!r}")
        if desired.serial < self._serial.value:
            if time.time() - envelope.issued_at < RACE_S:
                raise Overtaken
            raise Refused("stale_serial", f"order {desired.serial}, but {self._serial.value} was already accepted")
        return desired

    def _apply(self, desired: Desired) -> bool:
        """-> whether everything was carried out; what failed is tried again in the next pass."""
        orders: list[Callable[[], None]] = [partial(self._stop, stop) for stop in desired.stops]
        orders += [partial(self._launch, launch) for launch in desired.launches]
        orders += [partial(self._serial.raise_to, desired.serial), partial(self._note, desired)]
        orders += [partial(self._supervisor.forget, attempt) for attempt in desired.forget]
        orders += [partial(self._upward.orders.take, desired.orders)] if self._upward.orders else []
        results = [carried_out(order) for order in orders]
        self._prune(desired)
        return all(results)

    def _launch(self, launch: Launch) -> None:
        if launch.attempt not in self._launched:
            self._supervisor.launch(launch)
            self._launched.add(launch.attempt)

    def _stop(self, stop: Stop) -> None:
        key = (stop.attempt, stop.epoch, stop.grace_s)
        if key not in self._stopped:
            self._supervisor.stop(stop)
            self._stopped.add(key)

    def _note(self, desired: Desired) -> None:
        self._upward.note(desired)
        self.inventory_digest = desired.inventory_digest

    def _prune(self, desired: Desired) -> None:
        """What left the order may come back only as something new; the supervisor knows it from its spool."""
        self._launched &= attempts_of(desired.launches)
        ordered = attempts_of(desired.stops)
        self._stopped = {key for key in self._stopped if key[0] in ordered}


def attempts_of(orders: Iterable[Launch | Stop]) -> set[str]:
    return {order.attempt for order in orders}


def carried_out(order: Callable[[], None]) -> bool:
    """One order that fails must not keep the others from being carried out."""
    try:
        order()
    except Exception:
        logger.exception("an order could not be carried out; it is tried again")
        return False
    return True
