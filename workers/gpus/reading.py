"""The process that reads the GPUs: `python -m workers.gpus.reading KIND`. It writes frames to its standard output.

It has no secrets and no network, and ends when its standard input does, that is with the worker that started it.
"""

import argparse
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from wire.reports import GpuProcess, GpuReading
from workers.gpus import DriverUnavailable, GpuDriver, GpuList, load, procfs

ATTEMPT_VARIABLE = "GPUYARD_ATTEMPT_ID"
LIST_EVERY_S = 30.0
AGAIN_AFTER_S = 30.0
LOOK_EVERY_S = 0.1
HEADER = struct.Struct("<I")


class Listed(msgspec.Struct, tag="listed"):
    gpus: GpuList
    unavailable: bool = False


class Read(msgspec.Struct, tag="read"):
    """Also without readings, as a sign of life."""

    readings: list[GpuReading]


class Stuck(msgspec.Struct, tag="stuck"):
    """The driver has not answered in time; this process can only be killed."""

    gpu: int | None


Frame = Listed | Read | Stuck
T = TypeVar("T")


def pack(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return HEADER.pack(len(body)) + body


class Unpacker:
    """Bytes in, frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            frames.append(msgspec.msgpack.decode(self._buffer[HEADER.size:end], type=Frame))
            del self._buffer[:end]
        return frames


@dataclass(frozen=True, slots=True)
class Pace:
    interval_s: float
    deadline_s: float
    start_deadline_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """The newest call into the driver; `deadline_s` is None when it has returned."""

    number: int
    deadline_s: float | None


class Patience:
    """How long a call has lasted by looks at it: the time in which this whole process stood still does not count."""

    def __init__(self) -> None:
        self._number = -1
        self._lasted_s = 0.0
        self._looked_at = 0.0

    def is_over(self, call: Call, now: float) -> bool:
        if call.number != self._number:
            self._number, self._lasted_s = call.number, 0.0
        else:
            self._lasted_s += min(now - self._looked_at, 2 * LOOK_EVERY_S)
        self._looked_at = now
        return call.deadline_s is not None and self._lasted_s > call.deadline_s


class Reading:
    def __init__(self, driver: GpuDriver, pace: Pace, send: Callable[[Frame], None]) -> None:
        self._driver, self._pace, self._send = driver, pace, send
        self._silent: set[str] = set()
        self._call = Call(0, None)

    def run(self) -> None:
        """Reads for as long as the driver is there. When it is not, says so, and ends a while later.

        Another try needs another process: the library of a driver that was upgraded stays loaded in this one.
        """
        try:
            self._within(self._pace.start_deadline_s, self._driver.start)
            self._list(self._pace.start_deadline_s)
            self._read_on()
        except DriverUnavailable as error:
            self._send(Listed(GpuList(problem=str(error)), unavailable=True))
            self._idle(AGAIN_AFTER_S)

    @property
    def call(self) -> Call:
        return self._call

    def _read_on(self) -> None:
        """Returns never; raises DriverUnavailable."""
        listed_at = time.monotonic()
        while True:
            began = time.monotonic()
            readings = self._within(self._pace.deadline_s, self._driver.read)
            self._send(Read([owned(reading) for reading in readings]))
            silent = {reading.uuid for reading in readings if "gpu" in reading.missing}
            if silent != self._silent or began - listed_at >= LIST_EVERY_S:
                self._list(self._pace.deadline_s)
                self._silent, listed_at = silent, began
            time.sleep(max(0.0, began + self._pace.interval_s - time.monotonic()))

    def _list(self, deadline_s: float) -> None:
        self._send(Listed(self._within(deadline_s, self._driver.enumerate)))

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


def owned(reading: GpuReading) -> GpuReading:
    for process in reading.processes or []:
        describe(process)
    return reading


def describe(process: GpuProcess) -> None:
    """Whose it is. In a container the pids are those of the host: then nothing is known of them here."""
    process.user = procfs.user(process.pid)
    process.command = procfs.command(process.pid)
    environment = procfs.environment(process.pid)
    process.attempt = procfs.variable(environment, ATTEMPT_VARIABLE) if environment else None


def watch(reading: Reading, driver: GpuDriver, send: Callable[[Frame], None]) -> None:
    """Ends this process with its parent, and tells the parent when the driver hangs."""
    told, patience = False, Patience()
    while True:
        readable, _, _ = select.select([0], [], [], LOOK_EVERY_S)
        if readable and not os.read(0, 4096):
            os._exit(0)
        if patience.is_over(reading.call, time.monotonic()) and not told:
            told = True
            send(Stuck(driver.at_work))


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
    return parser.parse_args()


def main() -> None:
    options, send = arguments(), sender()
    try:
        driver = load(options.kind, topology=options.topology, node=options.node, skip=options.skip)
    except DriverUnavailable as error:
        sys.exit(str(error))
    reading = Reading(driver, Pace(options.interval, options.deadline, options.start_deadline), send)
    threading.Thread(target=watch, args=(reading, driver, send), daemon=True).start()
    try:
        reading.run()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
