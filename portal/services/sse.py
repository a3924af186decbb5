"""A stream of events as an HTTP answer: counted per person, closed when nobody reads it."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError, connections
from django.http import StreamingHttpResponse

from portal.services.errors import Problem

STREAMS_PER_USER = 20  # in this process
WRITE_S = 30.0  # a reader that takes nothing for so long is let go

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerEvent:
    id: str | None
    event: str
    data: str = "{}"  # one line of JSON, so nothing in it can pass for another event

    def encode(self) -> bytes:
        head = f"id: {self.id}\n" if self.id is not None else ""
        return f"{head}event: {self.event}\ndata: {self.data}\n\n".encode()


class Slots:
    """How many streams each person has open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[int] = Counter()
        self._lock = threading.Lock()

    def take(self, user_id: int) -> None:
        with self._lock:
            if self._taken[user_id] >= self._most:
                raise Problem(429, "too_many_streams", f"You have {self._most} live streams open, which is the most. "
                              "Close a window or a follower.", headers={"Retry-After": "5"})
            self._taken[user_id] += 1

    def free(self, user_id: int) -> None:
        with self._lock:
            self._taken[user_id] -= 1
            if self._taken[user_id] <= 0:
                del self._taken[user_id]

    def count(self, user_id: int) -> int:
        with self._lock:
            return self._taken.get(user_id, 0)


SLOTS = Slots(STREAMS_PER_USER)


async def sse_response(user_id: int, events: AsyncIterator[ServerEvent]) -> StreamingHttpResponse:
    """Raises what the first step of `events` raises: a Problem is still an ordinary answer then."""
    SLOTS.take(user_id)
    try:
        first = await anext(events, None)
        await sync_to_async(give_back_connections)()
    except BaseException:
        SLOTS.free(user_id)
        raise
    response = StreamingHttpResponse(EventStream(user_id, first, events), content_type="text/event-stream")
    response["Cache-Control"] = "no-store"
    response["X-Accel-Buffering"] = "no"
    return response


class EventStream:
    """Iterated by the server; `close` is called by the response whatever happens, from any thread."""

    def __init__(self, user_id: int, first: ServerEvent | None, events: AsyncIterator[ServerEvent]) -> None:
        self._user_id = user_id
        self._first = first
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._impatience: asyncio.TimerHandle | None = None
        self._closed = False

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        self._calm()
        if self._first is not None:
            event, self._first = self._first, None
            chunk = b"retry: 2000\n\n" + event.encode()
        else:
            chunk = (await self._next()).encode()
        # Until it is asked for more, the server is writing this to the reader.
        if task := asyncio.current_task():
            self._impatience = self._loop.call_later(WRITE_S, task.cancel)
        return chunk

    async def _next(self) -> ServerEvent:
        """A database that is away ends the stream; the reader comes again and is told so by an ordinary answer."""
        try:
            return await anext(self._events)
        except (OperationalError, InterfaceError) as error:
            log.warning("A live stream ends, the database cannot be reached: %s", error)
            raise StopAsyncIteration from error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            SLOTS.free(self._user_id)
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self._calm()
        generator = cast(Any, self._events)
        if not generator.ag_running:
            self._loop.create_task(generator.aclose())

    def _calm(self) -> None:
        if self._impatience:
            self._impatience.cancel()
            self._impatience = None


def give_back_connections() -> None:
    """What the session and the login borrowed: a stream may last for half an hour."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()
