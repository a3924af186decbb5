"""Orders about the hardware: each is carried out once, however often it is read, and its result told until it is known.

An order has a file by its id, so that neither a repeat nor a restart of the worker carries it out twice. What a restart
interrupted is taken up again: cutting a GPU into a layout, or ending one certain process, may be begun anew.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from wire.hardware import MigOrder, Order, OrderResult, ReleaseOrder, StopForeignOrder
from workers.strangers import Outcome, end_stranger

FINAL = frozenset({"done", "failed", "undone"})
TRIES_MOST = 3
KEPT_S = 7 * 86_400.0

logger = logging.getLogger(__name__)


class Carrier(Protocol):
    """The process that reads the GPUs: it alone touches the vendor's library."""

    def carry_out(self, order: MigOrder | ReleaseOrder) -> None: ...

    def results(self) -> list[OrderResult]: ...


class Attempts(Protocol):
    def active(self) -> list[str]: ...

    def processes(self, attempt: str) -> set[int]: ...


class Record(msgspec.Struct, kw_only=True):
    """What lies in an order's file. Without a state nothing is known of it yet."""

    order: Order
    state: str = ""
    message: str = ""
    at: float = 0.0
    tries: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in FINAL

    def result(self) -> OrderResult:
        return OrderResult(id=self.order.id, at=self.at, state=self.state, message=self.message)


class Orders:
    def __init__(self, state_dir: Path, carrier: Carrier, attempts: Attempts,
                 clock: Callable[[], float] = time.time) -> None:
        self._folder = state_dir / "orders"
        self._carrier, self._attempts, self._clock = carrier, attempts, clock
        self._lock = threading.RLock()
        self._under_way: set[str] = set()
        self._asked_for: set[str] = set()  # stand in the newest desired state
        self._records = self._read_all()

    def take(self, orders: Iterable[Order]) -> None:
        """Everything that stands in the desired state. What is known already only goes on being reported."""
        wanted = [order for order in orders if is_identity(order.id)]
        with self._lock:
            self._asked_for = {order.id for order in wanted}
            for order in wanted:
                self._take_one(order)
            self._clear_out()

    def results(self) -> list[OrderResult]:
        """How the orders stand that the portal still asks for; the same again until it stops asking."""
        for result in self._carrier.results():
            self._note(result.id, result.state, result.message)
        with self._lock:
            told = [self._records[key] for key in sorted(self._asked_for) if key in self._records]
            return [record.result() for record in told if record.state]

    def _take_one(self, order: Order) -> None:
        record = self._records.get(order.id)
        if record is None:
            record = self._records[order.id] = Record(order=order, at=self._clock())
        if record.is_over or order.id in self._under_way:
            return
        record.tries += 1
        if record.tries > TRIES_MOST:
            self._note(order.id, "failed", f"The node's worker ended {TRIES_MOST} times while it was carried out; "
                                           "look at the GPU before giving another order.")
            return
        self._write(record)  # first on disk: an order that is begun is known after a restart
        self._under_way.add(order.id)
        self._begin(record.order)

    def _begin(self, order: Order) -> None:
        if isinstance(order, StopForeignOrder):
            threading.Thread(target=self._stop, args=(order,), name=f"stop-{order.pid}", daemon=True).start()
        else:
            self._carrier.carry_out(order)

    def _stop(self, order: StopForeignOrder) -> None:
        self._note(order.id, "running", f"Process {order.pid} is asked to end.")
        try:
            outcome = end_stranger(order, self._attempts)
        except Exception as error:
            logger.exception("process %d could not be ended", order.pid)
            outcome = Outcome("failed", f"Process {order.pid} could not be ended: {error}.")
        self._note(order.id, outcome.state, outcome.message)

    def _note(self, key: str, state: str, message: str) -> None:
        with self._lock:
            record = self._records.get(key)
            if record is None or record.is_over:
                return
            if state in FINAL:
                self._under_way.discard(key)
            if (record.state, record.message) != (state, message):
                record.state, record.message, record.at = state, message, self._clock()
                self._write(record)

    def _clear_out(self) -> None:
        limit = self._clock() - KEPT_S
        for key, record in list(self._records.items()):
            if key not in self._asked_for and key not in self._under_way and record.at < limit:
                del self._records[key]
                self._path(key).unlink(missing_ok=True)

    # --- the files ----------------------------------------------------------------------------------------------------
    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _write(self, record: Record) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(record.order.id)
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(path)

    def _read_all(self) -> dict[str, Record]:
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=Record)
            except (OSError, msgspec.DecodeError) as error:
                logger.error("%s cannot be read (%s): if its order still stands, it is carried out anew", path, error)
                continue
            found[record.order.id] = record
        return found


def is_identity(text: str) -> bool:
    """It becomes the name of a file."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
