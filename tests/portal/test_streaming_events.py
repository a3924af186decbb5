"""What a watcher sees: every byte once and in order, at once; nothing of others; nothing while it may not."""

import asyncio
import json
import time

import pytest

from portal.models import Allocation, Attempt, Gpu, Job, Node
from portal.services import live, logs, streaming
from portal.services.sse import ServerEvent
from portal.services.streaming import look
from tests.portal.conftest import Cast, make_node
from tests.portal.watching import bytes_of, chunk, finish_log, named, run, subscribed, until, write
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
