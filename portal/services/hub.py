"""Live notices to whoever is watching in this process: one subscription for all of them, a mailbox for each.

A mailbox merges what it has not given out yet, so a slow watcher costs a bounded amount of memory and sees the newest.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import redis.asyncio
from django.conf import settings

PATTERN = "live.*"
LISTEN_S = 5.0
SILENCE_S = 15.0  # a subscription that answers no ping for so long is dead, whatever its socket says
RETRY_S = 1.0
NEWS_MOST = 500

log = logging.getLogger(__name__)


@dataclass
class News:
    """What came since the last look. `missed`: there may have been more, so look for yourself."""

    values: dict[str, Any] = field(default_factory=dict)  # GPU uuid -> newest live values
    values_at: float | None = None
    notices: list["Notice"] = field(default_factory=list)  # each subject once, its newest data
    missed: bool = False


@dataclass
class Notice:
    channel: str
    kind: str
    data: dict[str, Any]


class Mailbox:
    def __init__(self, channels: frozenset[str]) -> None:
        self.channels = channels
        self._filled = asyncio.Event()
        self._values: dict[str, Any] = {}
        self._values_at: float | None = None
        self._notices: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._missed = False

    def put(self, channel: str, message: dict[str, Any]) -> None:
        kind = str(message.pop("kind", ""))
        if kind == "gpus":
            self._values.update(message.get("values", {}))
            self._values_at = message.get("at")
        elif len(self._notices) < NEWS_MOST:
            key = (channel, kind, str(message.get("id") or message.get("name") or message.get("uuid") or ""))
            merge(self._notices.setdefault(key, {}), message)
        else:
            self._missed = True
        self._filled.set()

    def miss(self) -> None:
        self._missed = True
        self._filled.set()

    async def wait(self, timeout_s: float) -> News:
        with contextlib.suppress(TimeoutError):
            # Not wait_for: it forgets a cancellation that comes together with the news, and the stream would live on.
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._filled.wait()
        self._filled.clear()
        notices = [Notice(channel, kind, data) for (channel, kind, _), data in self._notices.items()]
        news = News(self._values, self._values_at, notices, self._missed)
        self._values, self._values_at, self._notices, self._missed = {}, None, {}, False
        return news


class Hub:
    def __init__(self, url: str) -> None:
        self.connected = False
        self._url = url
        self._boxes: set[Mailbox] = set()
        self._listener: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def mailbox(self, *channels: str) -> AsyncIterator[Mailbox]:
        box = Mailbox(frozenset(channels))
        self._boxes.add(box)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen())
        try:
            yield box
        finally:
            self._boxes.discard(box)
            if not self._boxes and self._listener:
                self._listener.cancel()
                self._listener = None

    async def _listen(self) -> None:
        try:
            while not leaving():
                try:
                    await self._subscribe()
                except (redis.RedisError, OSError) as error:
                    log.warning("Live notices are interrupted, watchers ask the database instead: %s", error)
                except Exception:
                    log.exception("Listening for live notices failed, watchers ask the database instead.")
                self._lost()
                if not leaving():
                    await asyncio.sleep(RETRY_S)
        finally:
            self._lost()

    def _lost(self) -> None:
        self.connected = False
        for box in self._boxes:
            box.miss()

    async def _subscribe(self) -> None:
        client = redis.asyncio.Redis.from_url(
            self._url, socket_connect_timeout=settings.BROKER_TIMEOUT_S, socket_keepalive=True, protocol=2
        )
        async with client, client.pubsub() as pubsub:
            async with asyncio.timeout(settings.BROKER_TIMEOUT_S):
                await pubsub.psubscribe(PATTERN)
            heard_at = time.monotonic()
            while time.monotonic() - heard_at < SILENCE_S and not leaving():
                message = await pubsub.get_message(timeout=LISTEN_S)
                if message is None:
                    async with asyncio.timeout(settings.BROKER_TIMEOUT_S):
                        await pubsub.ping()
                    continue
                heard_at = time.monotonic()
                self._heard(message)
        if not leaving():
            log.warning("The broker says nothing any more; live notices are subscribed to anew.")

    def _heard(self, message: dict[str, Any]) -> None:
        if message["type"] == "psubscribe":
            self.connected = True
            for box in self._boxes:
                box.miss()  # whatever was told before this moment
        elif message["type"] == "pmessage":
            channel = message["channel"].decode()
            boxes = [box for box in self._boxes if channel in box.channels]
            for box in boxes:
                box.put(channel, json.loads(message["data"]))


def leaving() -> bool:
    """Whether this task was cancelled. A client library may take the cancellation for its own time-out and go on."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def merge(known: dict[str, Any], news: dict[str, Any]) -> None:
    """The newest of each, one level deep: sizes of two logs do not replace each other."""
    for name, value in news.items():
        if isinstance(value, dict) and isinstance(known.get(name), dict):
            known[name].update(value)
        else:
            known[name] = value


HUBS: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """Of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in HUBS:
        HUBS[loop] = Hub(settings.REDIS_URL)
    return HUBS[loop]
