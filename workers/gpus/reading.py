"""The process that reads the GPUs: `python -m workers.gpus.reading KIND`. It writes frames to its standard output.

It has no secrets and no network, takes orders from its standard input, and ends when that does, that is with the worker
that started it.
"""

import argparse
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from wire.hardware import GpuHardware, HealthEvent, MigOrder, OrderResult, ReleaseOrder
from wire.reports import GpuReading
from workers.gpus import DriverUnavailable, GpuDriver, GpuList, load
from workers.gpus.base import OrderFailed
from workers.gpus.frames import Command, Detailed, Frame, Listed, Noticed, Outcome, Read, Stuck, commands, pack
from workers.gpus.owners import Owners
from workers.gpus.symptoms import Symptoms

LIST_EVERY_S = 30.0
LIST_SOON_S = 2.0
"""After a GPU fell silent; each time it still is, the next look is twice as far away."""

TELL_DETAILS_EVERY_S = 30.0
AGAIN_AFTER_S = 30.0
LOOK_EVERY_S = 0.1
SIGN_OF_LIFE_EVERY_S = 1.0
MIG_DEADLINE_S = 60.0
RELEASE_MOST_S = 3600.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pace:
    interval_s: float
    deadline_s: float
    start_deadline_s: float
    details_every_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Call:
    """The newest call into the driver; `deadline_s` is None when it has returned."""

    number: int
    deadline_s: float | None


class Patience:
    """How long a call has lasted by looks at it: the time in which this whole process stood still does not count.

    A call that goes on to the next GPU has the deadline anew: sixteen slow ones are not one that hangs.
    """

    def __init__(self) -> None:
        self._at: tuple[int, int | None] = (-1, None)
        self._lasted_s = 0.0
        self._looked_at = 0.0

    def is_over(self, call: Call, now: float, gpu: int | None = None) -> bool:
        if (call.number, gpu) != self._at:
            self._at, self._lasted_s = (call.number, gpu), 0.0
        else:
            self._lasted_s += min(now - self._looked_at, 2 * LOOK_EVERY_S)
        self._looked_at = now
        return call.deadline_s is not None and self._lasted_s > call.deadline_s


class Reading:
    def __init__(self, driver: GpuDriver, pace: Pace, send: Callable[[Frame], None]) -> None:
        self._driver, self._pace, self._send = driver, pace, send
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._owners = Owners()
        self._symptoms = Symptoms()
        self._gpus = GpuList()
        self._silent: set[str] = set()
        self._list_after_s = LIST_EVERY_S
        self._details = News()
        self._listed_at = self._details_at = float("-inf")
        self._call = Call(0, None)

    def run(self) -> None:
        """Reads for as long as the driver is there. When it is not, says so, and ends a while later.

        Another try needs another process: the library of a driver that was upgraded stays loaded in this one.
        """
        try:
            self._within(self._pace.start_deadline_s, self._driver.start)
            self._list(self._pace.start_deadline_s)
            while True:
                began = time.monotonic()
                self._turn(began)
                self._obey_until(began + self._pace.interval_s)
        except DriverUnavailable as error:
            self._send(Listed(GpuList(problem=str(error)), unavailable=True))
            self._idle(AGAIN_AFTER_S)

    @property
    def call(self) -> Call:
        return self._call

    def order(self, command: Command) -> None:
        """From another thread."""
        self._commands.put(command)

    def _turn(self, began: float) -> None:
        readings = self._within(self._pace.deadline_s, self._driver.read)
        took_s = time.monotonic() - began
        told = self._within(self._pace.deadline_s, self._driver.events)
        self._notice(told)  # before the library is opened anew, which forgets them
        if self._list_if_due(readings, began):
            # A slice that was cut away is no GPU that was lost, and one bad moment is none either.
            readings = self._within(self._pace.deadline_s, self._driver.read)
            self._silent = silent_among(readings)
        self._send(Read([self._owners.named(reading) for reading in readings], took_s))
        events = self._symptoms.of_readings(readings)
        if told or events or began - self._details_at >= self._pace.details_every_s:
            events += self._look_closely()
        self._notice(events)

    def _list_if_due(self, readings: list[GpuReading], now: float) -> bool:
        """-> whether GPUs fell silent or came back. If it is the driver that has gone, then no GPU is to blame."""
        silent = silent_among(readings)
        changed = silent != self._silent
        if changed or now - self._listed_at >= self._list_after_s:
            self._list_after_s = LIST_SOON_S if changed and silent else min(2 * self._list_after_s, LIST_EVERY_S)
            self._within(self._pace.start_deadline_s, self._driver.renew)
            self._list(self._pace.deadline_s)
        return changed

    def _notice(self, events: list[HealthEvent]) -> None:
        if events:
            self._send(Noticed(events))

    def _list(self, deadline_s: float) -> None:
        self._gpus = self._within(deadline_s, self._driver.enumerate)
        self._listed_at = time.monotonic()
        self._send(Listed(self._gpus))

    def _look_closely(self) -> list[HealthEvent]:
        found = self._within(self._pace.deadline_s, self._driver.hardware)
        self._details_at = time.monotonic()
        if self._details.are_news(found, self._details_at):
            self._send(Detailed(time.time(), found))
        return self._symptoms.of_hardware(found, time.time())

    def _obey_until(self, due: float) -> None:
        while True:
            try:
                command = self._commands.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                return
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, MigOrder):
            self._cut(command)
        else:
            self._release(command)

    def _cut(self, order: MigOrder) -> None:
        self._tell(order.id, "running")
        try:
            self._within(MIG_DEADLINE_S, lambda: self._driver.set_mig(order))
        except OrderFailed as error:
            outcome = ("undone" if error.undone else "failed", str(error))
        else:
            outcome = ("done", f"GPU {order.gpu_uuid} is cut as ordered.")
        self._list(self._pace.start_deadline_s)
        self._notice(self._look_closely())
        self._tell(order.id, *outcome)

    def _release(self, order: ReleaseOrder) -> None:
        duration_s = min(order.duration_s, RELEASE_MOST_S)
        self._within(self._pace.deadline_s, self._driver.release)
        self._tell(order.id, "running", f"The driver's library is released for {duration_s:.0f} s.")
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            self._send(Read([released(info.uuid) for info in self._gpus.infos]))
            time.sleep(min(self._pace.interval_s, max(0.0, end - time.monotonic())))
        try:
            self._within(self._pace.start_deadline_s, self._driver.start)
        except DriverUnavailable as error:
            self._tell(order.id, "failed", f"After the release: {error}")
            raise
        self._list(self._pace.start_deadline_s)
        self._tell(order.id, "done", "The driver's library is in use again.")

    def _tell(self, order: str, state: str, message: str = "") -> None:
        self._send(Outcome(OrderResult(id=order, at=time.time(), state=state, message=message)))

    def _idle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._send(Read([]))
            time.sleep(self._pace.interval_s)

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        self._call = Call(self._call.number + 1, seconds)
        try:
            return call()
        finally:
            self._call = Call(self._call.number, None)


class News:
    """Details are worth telling when they are others than before, and now and then for their counters."""

    def __init__(self) -> None:
        self._told: list[GpuHardware] = []
        self._told_at = float("-inf")

    def are_news(self, found: list[GpuHardware], now: float) -> bool:
        settled = [without_counters(one) for one in found]
        if settled == self._told and now - self._told_at < TELL_DETAILS_EVERY_S:
            return False
        self._told, self._told_at = settled, now
        return True


def without_counters(hardware: GpuHardware) -> GpuHardware:
    links = [msgspec.structs.replace(link, transmitted_bytes=None, received_bytes=None) for link in hardware.links]
    # The generation of the PCIe link follows the load.
    return msgspec.structs.replace(hardware, links=links, pcie_generation=None)


def silent_among(readings: list[GpuReading]) -> set[str]:
    return {reading.uuid for reading in readings if "gpu" in reading.missing}


def released(uuid: str) -> GpuReading:
    return GpuReading(uuid=uuid, at=time.time(), missing={"gpu": "released"})


def watch(reading: Reading, driver: GpuDriver, send: Callable[[Frame], None]) -> None:
    """Takes orders, ends this process with its parent, and tells the parent when the driver hangs."""
    told, patience, orders = False, Patience(), commands()
    alive_at = time.monotonic()
    while True:
        readable, _, _ = select.select([0], [], [], LOOK_EVERY_S)
        if readable:
            data = os.read(0, 1 << 16)
            if not data:
                os._exit(0)
            for command in orders.feed(data):
                reading.order(command)
        now, call = time.monotonic(), reading.call
        if patience.is_over(call, now, driver.at_work):
            if not told:
                send(Stuck(driver.at_work))
            told = True
        elif call.deadline_s is not None and now - alive_at >= SIGN_OF_LIFE_EVERY_S:
            send(Read([]))  # a change may take long, and the parent wants to hear something
            alive_at = now


def sender() -> Callable[[Frame], None]:
    """Frames go to what was the standard output; stray prints of a library go to the standard error instead."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(frame: Frame) -> None:
        data = memoryview(pack(frame))
        with lock:
            while data:
                data = data[os.write(descriptor, data):]

    return send


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.gpus.reading")
    parser.add_argument("kind")
    parser.add_argument("--topology")
    parser.add_argument("--node", default="")
    parser.add_argument("--skip", type=int, action="append", default=[], help="index of a GPU never to ask")
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--deadline", type=float, default=3.0)
    parser.add_argument("--start-deadline", type=float, default=60.0)
    parser.add_argument("--details-every", type=float, default=10.0)
    return parser.parse_args()


def main() -> None:
    options, send = arguments(), sender()
    try:
        driver = load(options.kind, topology=options.topology, node=options.node, skip=options.skip)
    except DriverUnavailable as error:
        sys.exit(str(error))
    pace = Pace(options.interval, options.deadline, options.start_deadline, options.details_every)
    reading = Reading(driver, pace, send)
    threading.Thread(target=watch, args=(reading, driver, send), daemon=True).start()
    try:
        reading.run()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
