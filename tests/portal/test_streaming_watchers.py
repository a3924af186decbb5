"""Who may watch, what many watchers cost, and what they see when something breaks."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis
from django.db import OperationalError, connection

from portal.models import Allocation, Attempt, Job, Node, User
from portal.services import live, logs, sse, streaming
from portal.services.errors import Problem
from portal.services.hub import Hub, Mailbox, Notice, hub
from portal.services.sse import ServerEvent
from portal.services.streaming import look
from tests.portal.conftest import Cast, make_node
from tests.portal.watching import bytes_of, chunk, named, run, subscribed, until, write
from wire.states import AttemptState


@pytest.fixture
def cast(transactional_db: None, cast: Cast, broker_url: str) -> Cast:
    """Streams look from threads of their own: they see only what is committed."""
    return cast


@pytest.fixture
def node(cast: Cast) -> Node:
    return make_node("n1", gpus=2)


@pytest.fixture
def attempt(cast: Cast, node: Node) -> Attempt:
    job = Job.objects.create(
        owner=cast.bob, project=cast.bob.personal_project, name="t", spec={}, gpu_count=1, state="running"
    )
    attempt = Attempt.objects.create(job=job, number=1, state=AttemptState.RUNNING)
    Allocation.objects.create(attempt=attempt, gpu=node.gpus.get(index=0), rank=0)
    return attempt


# --- who may watch ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("open_stream", [
    lambda user, job: streaming.job_log(user, job, 0, 0), lambda user, job: streaming.job_events(user, job),
])
def test_the_job_of_a_stranger_is_not_there(
    cast: Cast, attempt: Attempt, open_stream: Callable[[int, int], AsyncIterator[ServerEvent]]
) -> None:
    async def scenario() -> None:
        with pytest.raises(Problem) as refused:
            await anext(open_stream(cast.charlie.pk, attempt.job_id))
        assert refused.value.status == 404

    run(scenario())


def test_who_loses_access_in_between_is_told_and_let_go(
    cast: Cast, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "ACCESS_S", 0.0)

    async def scenario() -> list[ServerEvent]:
        events = streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0)
        seen = await until(events, named("ping"))
        reading = asyncio.create_task(until(events, named("revoked")))
        await look(lambda: User.objects.filter(pk=cast.bob.pk).update(is_active=False))
        await look(write, attempt, 0, b"secret\n")
        seen += await reading
        assert [event async for event in events] == []
        return seen

    assert b"secret" not in bytes_of(run(scenario()))


def test_the_twenty_first_stream_is_refused_and_a_closed_one_makes_room(
    cast: Cast, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        def opened() -> Awaitable[Any]:
            return sse.sse_response(cast.bob.pk, streaming.job_events(cast.bob.pk, attempt.job_id))

        responses = [await opened() for _ in range(sse.STREAMS_PER_USER)]
        with pytest.raises(Problem) as refused:
            await opened()
        assert refused.value.status == 429
        responses[0].close()  # never read: the reader had gone at once
        responses.append(await opened())
        for response in responses:
            response.close()
        while sse.SLOTS.count(cast.bob.pk) or hub()._listener:
            await asyncio.sleep(0.01)

    run(scenario())


def test_a_refused_stream_takes_no_place(cast: Cast, attempt: Attempt) -> None:
    async def scenario() -> None:
        with pytest.raises(Problem):
            await sse.sse_response(cast.charlie.pk, streaming.job_events(cast.charlie.pk, attempt.job_id))
        assert sse.SLOTS.count(cast.charlie.pk) == 0

    run(scenario())


def test_a_reader_who_takes_nothing_is_let_go(cast: Cast, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WRITE_S", 0.05)

    async def serve() -> None:
        response = await sse.sse_response(cast.bob.pk, streaming.job_events(cast.bob.pk, attempt.job_id))
        try:
            async for _chunk in response:
                await asyncio.Event().wait()  # the socket is full and stays so
        finally:
            response.close()

    async def scenario() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(serve())
        assert sse.SLOTS.count(cast.bob.pk) == 0

    run(scenario())


def test_a_database_that_goes_away_ends_the_stream_and_frees_its_place(cast: Cast) -> None:
    async def cut_off() -> AsyncIterator[ServerEvent]:
        yield ServerEvent(None, "ping")
        raise OperationalError("server closed the connection unexpectedly")

    async def scenario() -> list[bytes]:
        response = await sse.sse_response(cast.bob.pk, cut_off())
        seen = [chunk async for chunk in response]
        response.close()
        assert sse.SLOTS.count(cast.bob.pk) == 0
        return seen

    assert len(run(scenario())) == 1


def test_a_log_whose_file_is_gone_says_so(cast: Cast, attempt: Attempt) -> None:
    write(attempt, 0, b"12345")
    logs.path_of(attempt.pk, "rank-0").unlink()

    async def scenario() -> None:
        with pytest.raises(Problem) as refused:
            await anext(streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0))
        assert refused.value.status == 410

    run(scenario())


def idle_connections() -> int:
    """In the pool of this process, beside the one that the test itself holds; negative while others are lent out."""
    stats = connection.pool.get_stats()  # type: ignore[attr-defined]
    return int(stats["pool_available"] - (stats["pool_size"] - 1))


# --- costs and breakdowns ---------------------------------------------------------------------------------------------
def test_many_watchers_share_one_subscription_and_hold_no_database_connection(
    cast: Cast, attempt: Attempt, broker_url: str
) -> None:
    async def scenario() -> None:
        streams = [streaming.job_events(cast.bob.pk, attempt.job_id) for _ in range(60)]
        for events in streams:
            await until(events, named("changed"))
        waiting = [asyncio.create_task(until(events, named("job"))) for events in streams]
        await subscribed()
        with redis.Redis.from_url(broker_url) as client:
            assert client.pubsub_numpat() == 1
        while idle_connections() < 0:  # until each has had its look
            await asyncio.sleep(0.01)
        await look(live.notify, live.job_channel(attempt.job_id), "job", id=attempt.job_id, state="stopping")
        await asyncio.gather(*waiting)
        for events in streams:
            await events.aclose()
        assert hub()._listener is None

    run(scenario())


def test_without_a_broker_a_stream_looks_for_itself(cast: Cast, attempt: Attempt, settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"

    async def scenario() -> list[ServerEvent]:
        events = streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0)
        await until(events, named("ping"))
        reading = asyncio.create_task(until(events, named("log")))
        await look(logs.append, [chunk(attempt, 0, b"x")])
        seen = await reading
        await events.aclose()
        return seen

    started_at = time.monotonic()
    assert bytes_of(run(scenario())) == b"x"
    assert time.monotonic() - started_at < 5


def test_what_a_slow_watcher_has_not_read_yet_is_merged_and_bounded() -> None:
    async def scenario() -> None:
        box = Mailbox(frozenset({"live.job.1"}))
        for size in range(1000):
            box.put("live.job.1", {"kind": "log", "streams": {f"rank-{size % 2}": size}})
            box.put("live.job.1", {"kind": "gpus", "at": size, "values": {"GPU-a": [size]}})
        news = await box.wait(0)
        assert [notice.data for notice in news.notices] == [{"streams": {"rank-0": 998, "rank-1": 999}}]
        assert (news.values, news.values_at, news.missed) == ({"GPU-a": [999]}, 999, False)
        for number in range(10_000):
            box.put("live.cluster", {"kind": "job", "id": number + 1})
        flood = await box.wait(0)
        assert flood.missed and len(flood.notices) <= 500
        assert (await box.wait(0)).notices == []

    run(scenario())


def test_a_watcher_who_leaves_just_as_news_come_is_gone(cast: Cast) -> None:
    """Cancelling and waking in the same moment: the cancelling must win, or the stream would live on unread."""

    async def scenario() -> None:
        box = Mailbox(frozenset({"live.x"}))
        waiting = asyncio.create_task(box.wait(60))
        await asyncio.sleep(0)
        box.put("live.x", {"kind": "job"})
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        deadline = asyncio.create_task(box.wait(0.001))
        assert (await deadline).notices  # and the news is still there for the next look

    run(scenario())


def test_a_rank_that_writes_wakes_only_its_own_readers(cast: Cast, attempt: Attempt) -> None:
    looks = 0

    def counted(tail: streaming.LogTail, offset: int) -> logs.LogSlice:
        nonlocal looks
        looks += 1
        return tail._reader.read(offset, 100)

    async def scenario() -> None:
        events = streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0)
        await until(events, named("ping"))
        reading = asyncio.create_task(until(events, named("log")))
        await subscribed()
        for number in range(20):
            await look(live.notify, live.job_channel(attempt.job_id), "log", streams={"rank-1": number})
        await look(write, attempt, 0, b"mine\n")
        await reading
        await events.aclose()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streaming.LogTail, "read", counted)
        run(scenario())
    assert looks <= 4


def test_a_subscription_that_was_cut_comes_back_and_says_that_something_may_be_missing(
    cast: Cast, attempt: Attempt, broker_url: str
) -> None:
    async def scenario() -> None:
        own = Hub(broker_url)
        async with own.mailbox("live.x") as box:
            while not own.connected:
                await asyncio.sleep(0.01)
            await box.wait(0)
            with redis.Redis.from_url(broker_url) as client:
                client.client_kill_filter(_type="pubsub")
                assert (await box.wait(5)).missed
                while not own.connected:
                    await asyncio.sleep(0.01)
                await box.wait(0)
                client.publish("live.x", json.dumps({"kind": "job", "id": 1}))
                assert (await box.wait(5)).notices == [Notice("live.x", "job", {"id": 1})]

    run(scenario())
