"""What passes between the reading process and the worker that started it: frames up, commands down."""

import struct
from typing import Any, Generic, TypeVar

import msgspec

from wire.hardware import GpuHardware, HealthEvent, MigOrder, OrderResult, ReleaseOrder
from wire.reports import GpuReading
from workers.gpus.base import GpuList

HEADER = struct.Struct("<I")


class Listed(msgspec.Struct, tag="listed"):
    gpus: GpuList
    unavailable: bool = False


class Read(msgspec.Struct, tag="read"):
    """Also without readings, as a sign of life."""

    readings: list[GpuReading]
    took_s: float | None = None


class Detailed(msgspec.Struct, tag="detailed"):
    at: float
    gpus: list[GpuHardware]


class Noticed(msgspec.Struct, tag="noticed"):
    events: list[HealthEvent]


class Outcome(msgspec.Struct, tag="outcome"):
    result: OrderResult


class Stuck(msgspec.Struct, tag="stuck"):
    """The driver has not answered in time; this process can only be killed."""

    gpu: int | None


Frame = Listed | Read | Detailed | Noticed | Outcome | Stuck
Command = MigOrder | ReleaseOrder
T = TypeVar("T")


def pack(frame: Frame | Command) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return HEADER.pack(len(body)) + body


class Stream(Generic[T]):
    """Bytes in, messages out."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        self._buffer += data
        messages: list[T] = []
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[HEADER.size:end]))
            del self._buffer[:end]
        return messages


def frames() -> Stream[Frame]:
    return Stream(Frame)


def commands() -> Stream[Command]:
    return Stream(Command)
