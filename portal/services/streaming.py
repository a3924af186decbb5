"""Server-sent events: what a browser or a program sees move.

Nobody holds a database connection while they wait: each look borrows one from a few threads and gives it back. Notices
only shorten the wait; every stream also looks by itself, so a broker that is down makes it slower, not wrong.

Events of all streams: `ping` (every few seconds, proves the connection), `revoked` (access was lost; the stream ends).
Log:     `log` {"offset", "data": base64}, `gap` {"from", "to"}, `complete` {"offset"}; the id is where to go on from.
Job:     notices by kind (`job`, `attempt`, `share`, `log` {"stream", "size"}), `metrics` {"at", "gpus": {uuid: {…}}},
         `changed` (look at everything again), `ended` (nothing more will come).
Cluster: `cell` {"at", "gpus": {uuid: [utilisation %, memory B, power mW, temperature °C]}}, notices by kind without
         data, `changed`.
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from django.db import connections
from django.utils import timezone

from portal.models import Allocation, Event, Gpu, Job, LogStream, User
from portal.services import access, live, logs
from portal.services.errors import Problem
from portal.services.gauges import LIVE_FIELDS, live_values
from portal.services.hub import Mailbox, News, Notice, hub
from portal.services.sse import ServerEvent
from portal.services.sse import sse_response as sse_response

PING_S = 10.0
LOOK_S = 5.0  # how often a stream looks by itself while notices work
LOOK_BLIND_S = 1.0  # and while they do not
ACCESS_S = 45.0
LIFE_S = 1800.0  # then the browser comes again, through the front door
TICK_S = 0.4
LOG_PAUSE_S = 0.1
LOG_PIECE_BYTES = 64 * 1024
AFTERGLOW_S = 30.0  # after the end, for the last log bytes

P = ParamSpec("P")
T = TypeVar("T")
LOOKERS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="look")


PING = ServerEvent(None, "ping")
REVOKED = ServerEvent(None, "revoked")
CHANGED = ServerEvent(None, "changed")
ENDED = ServerEvent(None, "ended")


@dataclass(frozen=True)
class JobLook:
    """What the database says of a job, as far as its watchers care."""

    fingerprint: tuple[Any, ...]
    uuids: frozenset[str]
    ended: bool
    over: bool  # and nothing more will be written of it


class Watch:
    """When one stream has to do what: look, ping, ask for access, end."""

    def __init__(self, check: Callable[[], object]) -> None:
        now = time.monotonic()
        self._check = check
        self._until = now + LIFE_S
        self._checked_at = self._spoke_at = self._looked_at = now

    @property
    def alive(self) -> bool:
        return time.monotonic() < self._until

    async def allowed(self) -> bool:
        if time.monotonic() - self._checked_at < ACCESS_S:
            return True
        self._checked_at = time.monotonic()
        try:
            await look(self._check)
        except Problem:
            return False
        return True

    def spoke(self) -> None:
        self._spoke_at = time.monotonic()

    def looked(self) -> None:
        self._looked_at = time.monotonic()

    @property
    def look_due(self) -> bool:
        return time.monotonic() - self._looked_at >= self.patience_s() - 0.05

    @property
    def ping_due(self) -> bool:
        return time.monotonic() - self._spoke_at >= PING_S

    @staticmethod
    def patience_s() -> float:
        return LOOK_S if hub().connected else LOOK_BLIND_S


# --- the three streams ------------------------------------------------------------------------------------------------
async def job_log(user_id: int, job_id: int, rank: int | str, offset: int) -> AsyncIterator[ServerEvent]:
    """Raises Problem at its first step."""
    async with hub().mailbox(live.job_channel(job_id)) as box:
        tail = await look(LogTail.open, user_id, job_id, rank)
        piece = await look(tail.read_near, offset)
        if piece.offset != offset:
            yield gap(offset, piece.offset)
        watch, position, looked_at = Watch(tail.check), piece.offset, time.monotonic()
        yield PING
        while watch.alive:
            if piece.offset > position:
                yield gap(position, piece.offset)
            if piece.data:
                yield log_event(piece)
                watch.spoke()
            position = piece.next_offset
            if piece.complete:
                yield ServerEvent(str(position), "complete", json.dumps({"offset": position}))
                return
            if not piece.data or position >= piece.size_bytes:
                await rest(box, tail.name, looked_at)
            if not await watch.allowed():
                yield REVOKED
                return
            if watch.ping_due:
                yield PING
                watch.spoke()
            looked_at = time.monotonic()
            piece = await look(tail.read, position)


async def job_events(user_id: int, job_id: int) -> AsyncIterator[ServerEvent]:
    """Raises Problem at its first step."""
    async with hub().mailbox(live.job_channel(job_id), live.CLUSTER) as box:
        check = checker(user_id, job_id)
        await look(check)
        seen = await look(job_look, job_id)
        yield CHANGED
        watch = Watch(check)
        while watch.alive and not seen.over:
            news = await box.wait(Watch.patience_s())
            if not await watch.allowed():
                yield REVOKED
                return
            for event in job_notices(job_id, news):
                yield event
            if values := {uuid: news.values[uuid] for uuid in seen.uuids & news.values.keys()}:
                yield metrics_event(values, news.values_at)
                watch.spoke()
            if watch.look_due or told(job_id, news, with_logs=seen.ended):
                watch.looked()
                before, seen = seen, await look(job_look, job_id)
                if before.fingerprint != seen.fingerprint:
                    yield CHANGED
            if watch.ping_due:
                yield PING
                watch.spoke()
        if seen.over:
            yield ENDED


async def cluster(user_id: int) -> AsyncIterator[ServerEvent]:
    """Raises Problem at its first step."""
    async with hub().mailbox(live.CLUSTER) as box:
        check = checker(user_id, None)
        await look(check)
        yield cell_event(await look(newest_values), time.time())
        yield CHANGED  # whatever moved since the page was made
        watch = Watch(check)
        while watch.alive:
            news = await box.wait(Watch.patience_s())
            if not await watch.allowed():
                yield REVOKED
                return
            for kind in dict.fromkeys(notice.kind for notice in news.notices):
                yield ServerEvent(None, kind)
            if news.missed:
                yield CHANGED
            if not hub().connected and watch.look_due:
                watch.looked()
                news.values, news.values_at = await look(newest_values), time.time()
            if news.values:
                yield cell_event(news.values, news.values_at)
                watch.spoke()
            if watch.ping_due:
                yield PING
                watch.spoke()
            await asyncio.sleep(TICK_S)  # gather what comes close together


# --- events -----------------------------------------------------------------------------------------------------------
def log_event(piece: logs.LogSlice) -> ServerEvent:
    data = {"offset": piece.offset, "data": base64.b64encode(piece.data).decode()}
    return ServerEvent(str(piece.next_offset), "log", json.dumps(data))


def gap(begin: int, end: int) -> ServerEvent:
    """Bytes that can never come, or a position that does not exist: reading goes on at `to`."""
    return ServerEvent(str(end), "gap", json.dumps({"from": begin, "to": end}))


def cell_event(values: dict[str, Any], at: float | None) -> ServerEvent:
    return ServerEvent(None, "cell", json.dumps({"at": at, "gpus": values}))


def metrics_event(values: dict[str, Any], at: float | None) -> ServerEvent:
    gpus = {uuid: dict(zip(LIVE_FIELDS, row, strict=True)) for uuid, row in values.items()}
    return ServerEvent(None, "metrics", json.dumps({"at": at, "gpus": gpus}))


def job_notices(job_id: int, news: News) -> list[ServerEvent]:
    """Of this job alone: the cluster's channel tells of others too."""
    events = []
    for notice in own_notices(job_id, news):
        if notice.kind == "log":
            sizes = notice.data.get("streams", {}).items()
            events += [ServerEvent(None, "log", json.dumps({"stream": name, "size": size})) for name, size in sizes]
        else:
            events.append(ServerEvent(None, notice.kind, json.dumps(notice.data)))
    return events


def own_notices(job_id: int, news: News) -> list[Notice]:
    return [notice for notice in news.notices if notice.channel == live.job_channel(job_id)]


def told(job_id: int, news: News, *, with_logs: bool) -> bool:
    """Is there news of which only the database knows the whole?"""
    return news.missed or any(with_logs or notice.kind != "log" for notice in own_notices(job_id, news))


def resume_offset(last_event_id: str | None, offset: int) -> int:
    """Where a log reader goes on: after the last event it had. -1, so at the nearest place, if that id is no offset."""
    if last_event_id is None or last_event_id == "":
        return offset
    return int(last_event_id) if last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19 else -1


# --- looking ----------------------------------------------------------------------------------------------------------
async def look(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in one of a few threads; its database connection goes back to the pool at once."""

    def borrowed() -> T:
        try:
            return function(*args, **kwargs)
        finally:
            connections.close_all()

    return await asyncio.get_running_loop().run_in_executor(LOOKERS, borrowed)


async def rest(box: Mailbox, stream: str, looked_at: float) -> None:
    """Until there is news of it. A first line travels at once, lines that follow it closely travel together."""
    until = time.monotonic() + Watch.patience_s()
    while only_of_others(stream, await box.wait(until - time.monotonic())) and time.monotonic() < until:
        pass
    await asyncio.sleep(max(0.0, looked_at + LOG_PAUSE_S - time.monotonic()))


def only_of_others(stream: str, news: News) -> bool:
    """Other ranks wrote, this one did not."""
    return bool(news.notices) and not news.missed and all(
        notice.kind == "log" and stream not in notice.data.get("streams", {}) for notice in news.notices
    )


def active_user(user_id: int) -> User:
    user = User.objects.filter(pk=user_id, is_active=True).first()
    if user is None:
        raise Problem(401, "not_authenticated", "This account is not active any more.")
    return user


def checker(user_id: int, job_id: int | None) -> Callable[[], object]:
    def check() -> None:
        user = active_user(user_id)
        if job_id is not None:
            access.get_job(user, job_id)

    return check


class LogTail:
    """One rank's log of a job, for one reader."""

    def __init__(self, user_id: int, job: Job, rank: int | str) -> None:
        self.check = checker(user_id, job.pk)
        self.name = logs.stream_name(job, rank)
        self._reader = logs.Reader(job.pk, self.name)

    @classmethod
    def open(cls, user_id: int, job_id: int, rank: int | str) -> "LogTail":
        return cls(user_id, access.get_job(active_user(user_id), job_id), rank)

    def read(self, offset: int) -> logs.LogSlice:
        return self._reader.read(offset, LOG_PIECE_BYTES)

    def read_near(self, offset: int) -> logs.LogSlice:
        """From the nearest place that exists."""
        return self._reader.read(min(max(0, offset), self._reader.size()), LOG_PIECE_BYTES)


def job_look(job_id: int) -> JobLook:
    job = Job.objects.get(pk=job_id)
    newest = job.attempts.order_by("-number").first()
    last_event = Event.objects.filter(job=job).order_by("-id").values_list("id", flat=True).first()
    held = Allocation.objects.filter(attempt=newest, released_at=None) if newest else Allocation.objects.none()
    return JobLook(
        fingerprint=(job.state, job.hold_message, last_event),
        uuids=frozenset(held.values_list("gpu__uuid", flat=True)),
        ended=job.has_ended,
        over=job.has_ended and silent(job, newest),
    )


def silent(job: Job, newest: Any) -> bool:
    """The end is told, and the last bytes of its logs are in, or overdue."""
    if newest is None or (timezone.now() - job.state_since).total_seconds() > AFTERGLOW_S:
        return True
    return all(stream.complete for stream in LogStream.objects.filter(attempt=newest))


def newest_values() -> dict[str, Any]:
    rows = Gpu.objects.present().filter(node__state="ready").values_list("uuid", "latest")
    return {uuid: live_values(latest) for uuid, latest in rows if latest}
