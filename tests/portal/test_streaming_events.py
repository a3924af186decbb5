"""What a watcher sees: every byte once and in order, at once; nothing of others; nothing while it may not."""

import asyncio
import base64
import json
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest
import redis
from django.db import OperationalError, connection

from portal.models import Allocation, Attempt, Gpu, Job, LogStream, Node, User
from portal.services import live, logs, sse, streaming
from portal.services.errors import Problem
from portal.services.hub import Hub, Notice, hub
from portal.services.sse import ServerEvent
from portal.services.streaming import look
from tests.portal.conftest import Cast, make_node
from wire.reports import LogChunk
from wire.states import AttemptState

T = TypeVar("T")
DEADLINE_S = 20.0


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


# --- logs -------------------------------------------------------------------------------------------------------------
def test_a_log_is_followed_from_its_beginning_to_its_end(cast: Cast, attempt: Attempt) -> None:
    text = b"".join(b"line %d \x00\xff\xf0\x9f\x98\x80\r\n" % number for number in range(9000))
    write(attempt, 0, text[:1000])

    async def scenario() -> list[ServerEvent]:
        events = streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0)
        first = await until(events, named("log"))
        await look(write, attempt, 1000, text[1000:])
        await look(finish_log, attempt, len(text))
        return first + await until(events, named("complete"))

    seen = run(scenario())
    assert bytes_of(seen) == text
    assert seen[-1].id == str(len(text))
    assert all(json.loads(event.data)["offset"] + len(bytes_of([event])) == int(event.id or -1)
               for event in seen if event.event == "log")


def test_resuming_leaves_no_gap_and_repeats_nothing(cast: Cast, attempt: Attempt) -> None:
    text = bytes(range(256)) * 2000
    write(attempt, 0, text)
    finish_log(attempt, len(text))

    async def scenario() -> list[ServerEvent]:
        seen: list[ServerEvent] = []
        last_id: str | None = None
        while not seen or seen[-1].event != "complete":
            start = streaming.resume_offset(last_id, 0)
            events = streaming.job_log(cast.bob.pk, attempt.job_id, 0, start)
            seen += await until(events, lambda event: event.event in {"log", "complete"})  # and then the line breaks
            await events.aclose()
            last_id = seen[-1].id
        return seen

    seen = run(scenario())
    assert bytes_of(seen) == text
    assert len([event for event in seen if event.event == "log"]) > 5


def test_a_line_reaches_its_reader_within_three_tenths_of_a_second(cast: Cast, attempt: Attempt) -> None:
    async def scenario() -> list[float]:
        events = streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0)
        await until(events, named("ping"))
        waits, size = [], 0
        for _ in range(5):
            reading = asyncio.create_task(until(events, named("log")))
            await subscribed()
            started_at = time.monotonic()
            await look(write, attempt, size, b"step\n")
            size += 5
            await reading
            waits.append(time.monotonic() - started_at)
        await events.aclose()
        return waits

    waits = run(scenario())
    print("line to reader, s:", [round(wait, 3) for wait in waits])
    assert sorted(waits)[2] < 0.3, waits


@pytest.mark.parametrize(("last_id", "begin", "end"), [
    ("-1", -1, 0), ("1" + "0" * 30, -1, 0), ("text", -1, 0), ("9" * 15, 10**15 - 1, 5), ("٣", -1, 0),
])
def test_a_place_that_does_not_exist_becomes_the_nearest_with_a_gap(
    cast: Cast, attempt: Attempt, last_id: str, begin: int, end: int
) -> None:
    write(attempt, 0, b"12345")
    finish_log(attempt, 5)
    start = streaming.resume_offset(last_id, 0)

    async def scenario() -> list[ServerEvent]:
        return await until(streaming.job_log(cast.bob.pk, attempt.job_id, 0, start), named("complete"))

    seen = run(scenario())
    assert json.loads(seen[0].data) == {"from": begin, "to": end}
    assert bytes_of(seen) == b"12345"[end:]


def test_bytes_cut_on_the_node_are_a_gap_in_the_stream(cast: Cast, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"head"), chunk(attempt, 104, b"tail", dropped=100)])
    finish_log(attempt, 108)

    async def scenario() -> list[ServerEvent]:
        return await until(streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0), named("complete"))

    seen = run(scenario())
    assert [event.event for event in seen if event.event != "ping"] == ["log", "gap", "log", "complete"]
    assert bytes_of(seen) == b"headtail"


def test_output_cannot_pass_for_an_event(cast: Cast, attempt: Attempt) -> None:
    write(attempt, 0, "\n\nevent: complete\ndata: {}\r\rid: 7\n\n\u2028<img src=x onerror=alert(1)>".encode())

    async def scenario() -> bytes:
        events = streaming.job_log(cast.bob.pk, attempt.job_id, 0, 0)
        seen = await until(events, named("log"))
        await events.aclose()
        return seen[-1].encode()

    lines = run(scenario()).split(b"\n")
    assert [line.split(b":")[0] for line in lines] == [b"id", b"event", b"data", b"", b""]
    assert b"\r" not in b"".join(lines)


def test_a_log_that_never_comes_ends_with_the_job(cast: Cast) -> None:
    job = Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="t", spec={}, gpu_count=1)
    Job.objects.filter(pk=job.pk).update(state="stopped")

    async def scenario() -> list[ServerEvent]:
        return await until(streaming.job_log(cast.bob.pk, job.pk, 0, 0), named("complete"))

    assert bytes_of(run(scenario())) == b""


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


# --- jobs and the cluster ---------------------------------------------------------------------------------------------
def show(gpus: list[Gpu], use: float) -> None:
    live.notify(live.CLUSTER, "gpus", at=1.5, values={gpu.uuid: [use, None, 300_000, 61] for gpu in gpus})


def test_a_job_stream_tells_its_states_and_the_figures_of_its_gpus_alone(
    cast: Cast, node: Node, attempt: Attempt
) -> None:
    async def scenario() -> list[ServerEvent]:
        events = streaming.job_events(cast.bob.pk, attempt.job_id)
        seen = await until(events, named("changed"))
        reading = asyncio.create_task(until(events, named("metrics")))
        await subscribed()
        await look(lambda: show(list(node.gpus.all()), 88.0))
        seen += await reading
        await look(live.notify, live.CLUSTER, "job", id=attempt.job_id + 1, state="failed")
        await look(live.notify, live.job_channel(attempt.job_id), "job", id=attempt.job_id, state="stopping")
        seen += await until(events, named("job"))
        await events.aclose()
        return seen

    seen = run(scenario())
    own = node.gpus.get(index=0).uuid
    assert json.loads(next(event.data for event in seen if event.event == "metrics")) == {"at": 1.5, "gpus": {own: {
        "utilization_percent": 88.0, "memory_used_bytes": None, "power_mw": 300_000, "temperature_c": 61,
    }}}
    assert json.loads(seen[-1].data) == {"id": attempt.job_id, "state": "stopping"}


def test_a_job_stream_ends_when_the_job_has_ended_and_its_log_is_whole(cast: Cast, attempt: Attempt) -> None:
    def end() -> None:
        Job.objects.filter(pk=attempt.job_id).update(state="succeeded")
        write(attempt, 0, b"done\n")
        finish_log(attempt, 5)
        live.notify(live.job_channel(attempt.job_id), "job", id=attempt.job_id, state="succeeded")

    async def scenario() -> list[ServerEvent]:
        events = streaming.job_events(cast.bob.pk, attempt.job_id)
        seen = await until(events, named("changed"))
        reading = asyncio.create_task(until(events, named("ended")))
        await subscribed()
        await look(end)
        return seen + await reading

    names = [event.event for event in run(scenario())]
    assert {"job", "changed"} & set(names[1:]), names


def test_the_cluster_stream_gives_figures_and_names_no_job(cast: Cast, node: Node, attempt: Attempt) -> None:
    gpus = list(node.gpus.all())
    Gpu.objects.filter(pk=gpus[0].pk).update(latest={"utilization_percent": 12.0, "power_mw": None})

    async def scenario() -> list[ServerEvent]:
        events = streaming.cluster(cast.charlie.pk)
        seen = await until(events, named("changed"))
        reading = asyncio.create_task(until(events, named("job")))
        await subscribed()
        await look(show, gpus, 77.0)
        await look(live.notify, live.CLUSTER, "job", id=attempt.job_id, state="failed")
        seen += await reading
        await events.aclose()
        return seen

    seen = run(scenario())
    assert json.loads(seen[0].data)["gpus"] == {gpus[0].uuid: [12.0, None, None, None]}
    assert [event.data for event in seen if event.event == "job"] == ["{}"]


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
        stats = connection.pool.get_stats()  # type: ignore[attr-defined]
        assert stats["pool_available"] >= stats["pool_size"] - 1  # the test's own
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
