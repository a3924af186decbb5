"""Orders on their way to the reading process, and what became of them."""

import threading
import time
from collections import deque
from collections.abc import Callable

from wire.hardware import MigOrder, OrderResult
from workers.gpus.frames import Command

WAITS_MOST_S = 60.0
FINAL = {"done", "failed", "undone"}


class Errands:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, Command]] = deque()  # since when
        self._handed_over: dict[str, Command] = {}
        self._begun: set[str] = set()
        self._results: list[OrderResult] = []

    def take(self, order: Command) -> None:
        with self._lock:
            self._waiting.append((self._clock(), order))

    def results(self) -> list[OrderResult]:
        with self._lock:
            results, self._results = self._results, []
        return results

    @property
    def are_under_way(self) -> bool:
        return bool(self._handed_over)

    def send(self, carry: Callable[[Command], None]) -> None:
        with self._lock:
            while self._waiting:
                _, order = self._waiting.popleft()
                self._handed_over[order.id] = order
                carry(order)

    def note(self, result: OrderResult) -> None:
        with self._lock:
            self._results.append(result)
            self._begun.add(result.id)
            if result.state in FINAL:
                self._begun.discard(result.id)
                self._handed_over.pop(result.id, None)

    def carrier_ended(self) -> None:
        """What had not begun waits for the next process; of the rest nobody knows how far it came."""
        with self._lock:
            for order in self._handed_over.values():
                if order.id in self._begun:
                    self._fail(order, unfinished(order))
                else:
                    self._waiting.append((self._clock(), order))
            self._handed_over.clear()
            self._begun.clear()

    def give_up(self, why: str) -> None:
        with self._lock:
            while self._waiting and self._clock() - self._waiting[0][0] > WAITS_MOST_S:
                _, order = self._waiting.popleft()
                self._fail(order, f"The GPU reader on this node did not take the order ({why}).")

    def _fail(self, order: Command, sentence: str) -> None:
        self._results.append(OrderResult(id=order.id, at=time.time(), state="failed", message=sentence))


def unfinished(order: Command) -> str:
    if isinstance(order, MigOrder):
        return (f"The driver did not come back while it was cutting GPU {order.gpu_uuid}: "
                "look at the slices that it lists now before giving another order.")
    return "The GPU reader ended while the driver's library was released; it is opened again."
