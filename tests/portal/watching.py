"""A watcher of live streams, and what ingest would tell it."""

import asyncio
import base64
import json
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from portal.models import Attempt, LogStream
from portal.services import live, logs
from portal.services.hub import hub
from portal.services.sse import ServerEvent
from wire.reports import LogChunk

T = TypeVar("T")
DEADLINE_S = 20.0


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


def chunk(attempt: Attempt, offset: int, data: bytes, *, dropped: int = 0) -> LogChunk:
    return LogChunk(attempt=str(attempt.pk), job=attempt.job_id, epoch=1, stream="rank-0", offset=offset, data=data,
                    crc32=zlib.crc32(data), dropped_bytes=dropped)


def write(attempt: Attempt, offset: int, data: bytes) -> None:
    """As ingest does."""
    logs.append([chunk(attempt, offset, data)])
    live.notify(live.job_channel(attempt.job_id), "log", streams={"rank-0": offset + len(data)})


def finish_log(attempt: Attempt, size: int) -> None:
    LogStream.objects.update_or_create(attempt=attempt, name="rank-0", defaults={"final_bytes": size})
    live.notify(live.job_channel(attempt.job_id), "log", streams={"rank-0": size})


async def until(events: AsyncIterator[ServerEvent], wanted: Callable[[ServerEvent], bool]) -> list[ServerEvent]:
    """The events up to and with the wanted one."""
    seen = []
    async for event in events:
        seen.append(event)
        if wanted(event):
            return seen
    raise AssertionError(f"the stream ended after {[event.event for event in seen]}")


def named(name: str) -> Callable[[ServerEvent], bool]:
    return lambda event: event.event == name


def bytes_of(events: list[ServerEvent]) -> bytes:
    return b"".join(base64.b64decode(json.loads(event.data)["data"]) for event in events if event.event == "log")


async def subscribed() -> None:
    while not hub().connected:
        await asyncio.sleep(0.01)
