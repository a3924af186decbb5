"""The pages of jobs, as three people see them."""

import json
import zlib
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.test import AsyncClient, Client
from django.utils import timezone

from portal.models import Allocation, Attempt, Gpu, Job, LogStream, Share
from portal.services import jobs, logs, scheduling, specs
from tests.portal.conftest import Cast, make_node
from wire.reports import LogChunk

pytestmark = pytest.mark.django_db


def submit(owner: Any, **fields: Any) -> Job:
    spec = {"name": "resnet", "launcher": "torchrun", "command": "train.py", "resources": {"gpus": 2}, **fields}
    return jobs.submit(specs.parse(spec), actor=owner).job


def started(owner: Any, **fields: Any) -> tuple[Job, Attempt]:
    """A job that a real scheduling cycle placed."""
    job = submit(owner, **fields)
    assert scheduling.run_cycle().started == [job.pk]
    job.refresh_from_db()
    return job, job.attempts.get()


def write_log(attempt: Attempt, stream: str, data: bytes, *, whole: bool = False) -> None:
    logs.append([LogChunk(attempt=str(attempt.pk), job=attempt.job_id, epoch=attempt.number, stream=stream, offset=0,
                          data=data, crc32=zlib.crc32(data))])
    if whole:
        LogStream.objects.filter(attempt=attempt, name=stream).update(final_bytes=len(data))


@pytest.fixture
def alice(cast: Cast, broker_url: str) -> Client:
    return signed_in(cast.alice)


@pytest.fixture
def bob(cast: Cast, broker_url: str) -> Client:
    return signed_in(cast.bob)


def signed_in(user: Any) -> Client:
    client = Client()
    client.force_login(user)
    return client


# --- the list ---------------------------------------------------------------------------------------------------------


def test_a_stranger_is_sent_to_sign_in(cast: Cast) -> None:
    answer = Client().get("/jobs/")
    assert answer.status_code == 302 and answer["Location"].startswith("/login/")


def test_the_list_shows_my_jobs_with_why_they_wait(cast: Cast, bob: Client) -> None:
    make_node(gpus=1)
    make_node("n2", gpus=2, schedulable=False)
    job = submit(cast.bob)
    scheduling.run_cycle()
    job.refresh_from_db()
    page = bob.get("/jobs/").content.decode()
    assert f"#{job.pk}" in page and "Waiting" in page and job.hold_message in page and job.hold_message


def test_each_filter_of_the_address_narrows_the_list(cast: Cast, alice: Client) -> None:
    make_node()
    mine, bobs = submit(cast.alice, name="mine"), submit(cast.bob, name="bobs")
    jobs.cancel(bobs, actor=cast.bob)

    def found(query: str) -> set[int]:
        return {row.job.pk for row in alice.get(f"/jobs/?{query}").context["list"].rows}

    assert found("") == {mine.pk}
    assert found("who=all") == {mine.pk, bobs.pk}
    assert found("who=bob") == {bobs.pk}
    assert found("who=all&state=stopped") == {bobs.pk}
    assert found("who=all&q=MIN") == {mine.pk}
    assert found(f"who=all&q=%23{bobs.pk}") == {bobs.pk}


@pytest.mark.parametrize("query", ["q=%00", "before=99999999999999999999", "before=-1", "q=%23%23", "state=nonsense",
                                   "who=%00x", "q=" + "9" * 19, "before=①"])
def test_no_address_breaks_the_list(query: str, alice: Client) -> None:
    assert alice.get(f"/jobs/?{query}").status_code == 200


def test_paging_shows_every_job_once(cast: Cast, bob: Client) -> None:
    make_node()
    Job.objects.bulk_create(Job(owner=cast.bob, project=cast.bob.personal_project, name=f"j{n}", spec={"command": "x"},
                                gpu_count=1) for n in range(120))
    seen: list[int] = []
    before: int | None = None
    while True:
        page = bob.get(f"/jobs/?before={before or ''}").context["list"]
        seen += [row.job.pk for row in page.rows]
        before = page.next_before
        if before is None:
            break
    assert len(seen) == 120 and seen == sorted(set(seen), reverse=True)


def test_the_list_takes_the_same_number_of_queries_for_any_length(
    cast: Cast, bob: Client, django_assert_max_num_queries: Any
) -> None:
    make_node(gpus=8)
    started(cast.bob)
    bob.get("/jobs/")
    with django_assert_max_num_queries(9) as few:
        bob.get("/jobs/")
    for _ in range(3):
        submit(cast.bob)
    scheduling.run_cycle()
    with django_assert_max_num_queries(9) as many:
        bob.get("/jobs/")
    assert len(few) == len(many)


def test_a_fragment_of_the_list_is_the_list_without_its_frame(cast: Cast, bob: Client) -> None:
    make_node()
    submit(cast.bob)
    part = bob.get("/jobs/?part=rows").content.decode()
    assert 'id="job-rows"' in part and "<html" not in part


# --- one job ----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_running_job_names_its_ranks_and_gpus(cast: Cast, bob: Client) -> None:
    make_node(gpus=4)
    job, attempt = started(cast.bob, layout={"data": 2}, time_limit="2h")
    page = bob.get(f"/jobs/{job.pk}/").content.decode()
    for allocation in attempt.allocations.select_related("gpu"):
        assert f'data-gpu="{allocation.gpu.uuid}"' in page
    assert "2× H100" in page and "NV18" in page and "data 2" in page and "2 h 00 m" in page and "Starting" in page


def test_a_script_is_one_rank_with_all_its_gpus(cast: Cast, bob: Client) -> None:
    make_node(gpus=4)
    job, _ = started(cast.bob, launcher="script", resources={"gpus": 4})
    page = bob.get(f"/jobs/{job.pk}/")
    assert [(rank.rank, rank.leading) for rank in page.context["detail"].ranks] == [(0, True)] + [(0, False)] * 3
    assert [stream["name"] for stream in page.context["streams"]] == ["rank-0"]


def test_unknown_figures_read_n_a_with_their_reason_and_never_zero(cast: Cast, bob: Client) -> None:
    make_node(gpus=2)
    job, _ = started(cast.bob)
    Gpu.objects.update(latest={"utilization_percent": None, "missing": {"utilization_percent": "no_permission"}})
    ranks = bob.get(f"/jobs/{job.pk}/?part=live").content.decode()
    assert 'title="no permission"' in ranks and "no reading yet" in ranks and "0%" not in ranks


def test_a_failed_job_says_which_rank_fell_first(cast: Cast, bob: Client) -> None:
    make_node(gpus=2)
    job, attempt = started(cast.bob)
    Share.objects.filter(attempt=attempt).update(state="failed", ranks=[
        {"rank": 0, "exit_code": None, "signal": 15, "ended_at": 20.0},
        {"rank": 1, "exit_code": 3, "signal": None, "message": "ValueError: <b>NaN</b>", "ended_at": 10.0},
    ])
    Attempt.objects.update(state="failed", ended_at=timezone.now(), exit_code=3)
    Allocation.objects.update(released_at=timezone.now())
    Job.objects.update(state="failed", ended_at=timezone.now(), exit_code=3, end_message="Rank 1 exited with code 3.")
    page = bob.get(f"/jobs/{job.pk}/")
    text = page.content.decode()
    assert "Rank 1 failed first" in text and "exit code 3" in text and "Rank 1 exited with code 3." in text
    assert "ValueError: &lt;b&gt;NaN&lt;/b&gt;" in text and "<b>NaN</b>" not in text
    assert [rank.state for rank in page.context["detail"].ranks] == ["stopped", "failed"]
    assert len(page.context["events"]) > 1 and not [one for one in page.context["events"] if one.kind == "share.state"]
    assert "stop-dialog\"><i" not in text, "an ended job offers no stop"


@pytest.mark.parametrize("path", ["", "log/?at=", "log/?raw=rank-0"])
def test_somebody_elses_job_is_not_there(path: str, cast: Cast, bob: Client) -> None:
    make_node()
    job = submit(cast.charlie)
    assert bob.get(f"/jobs/{job.pk}/{path}").status_code == 404
    assert bob.post(f"/jobs/{job.pk}/stop/").status_code == 404
    job.refresh_from_db()
    assert job.state == "waiting"


def test_an_id_beyond_every_number_is_not_there(alice: Client) -> None:
    assert alice.get("/jobs/99999999999999999999999/").status_code == 404


def test_stopping_needs_a_post_with_its_csrf_token(cast: Cast, broker_url: str) -> None:
    make_node()
    job = submit(cast.bob)
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(cast.bob)
    assert strict.get(f"/jobs/{job.pk}/stop/").status_code == 405
    assert strict.post(f"/jobs/{job.pk}/stop/").status_code == 403
    page = strict.get(f"/jobs/{job.pk}/")
    token = page.context["csrf_token"]
    assert strict.post(f"/jobs/{job.pk}/stop/", {"csrfmiddlewaretoken": str(token)}).status_code == 302
    job.refresh_from_db()
    assert job.state == "stopped" and job.cancelled_by == cast.bob
    assert "Stopped by bob" in strict.get(f"/jobs/{job.pk}/").content.decode()


# --- its log ----------------------------------------------------------------------------------------------------------


def test_the_log_is_pulled_from_where_one_is(cast: Cast, bob: Client) -> None:
    make_node(gpus=2)
    job, attempt = started(cast.bob)
    write_log(attempt, "rank-0", b"one\ntwo\n")
    write_log(attempt, "rank-1", b"\xff\x00three\n")
    first = bob.get(f"/jobs/{job.pk}/log/?at=rank-0:4,rank-1:0").json()
    assert [(part["name"], part["offset"], part["next_offset"]) for part in first["streams"]] == [
        ("rank-0", 4, 8), ("rank-1", 0, 8)]
    assert first["streams"][0]["data"] == "dHdvCg==" and first["bytes"] == 16 and not first["complete"]
    again = bob.get(f"/jobs/{job.pk}/log/?at=rank-0:8,rank-1:8").json()
    assert [part["data"] for part in again["streams"]] == ["", ""] and not again["more"]


@pytest.mark.parametrize("at", ["x", "rank-0", "rank-0:-1", "../../etc/passwd:0", "rank-0:1e9", "rank-0:" + "9" * 30])
def test_a_bad_position_is_refused_in_a_sentence(at: str, cast: Cast, bob: Client) -> None:
    make_node()
    job, _ = started(cast.bob)
    answer = bob.get(f"/jobs/{job.pk}/log/", {"at": at})
    assert answer.status_code == 400 and "at=rank-0:0" in answer.content.decode()


def test_the_raw_log_is_every_byte_as_a_file(cast: Cast, broker_url: str) -> None:
    data = bytes(range(256)) * 9000  # more than one piece
    job = prepare_raw(cast, data)
    answer, body = async_to_sync(downloaded)(cast.bob, f"/jobs/{job.pk}/log/?raw=rank-0")
    assert answer["Content-Disposition"] == f'attachment; filename="job-{job.pk}-rank-0.log"'
    assert answer["X-Content-Type-Options"] == "nosniff" and answer["Content-Type"].startswith("text/plain")
    assert body == data


async def downloaded(user: Any, path: str) -> tuple[Any, bytes]:
    client = AsyncClient()
    await client.aforce_login(user)
    answer = await client.get(path)
    return answer, b"".join([piece async for piece in answer.streaming_content])


def prepare_raw(cast: Cast, data: bytes) -> Job:
    make_node(gpus=2)
    job, attempt = started(cast.bob)
    for offset in range(0, len(data), 1 << 20):
        piece = data[offset : offset + (1 << 20)]
        logs.append([LogChunk(attempt=str(attempt.pk), job=job.pk, epoch=1, stream="rank-0", offset=offset, data=piece,
                              crc32=zlib.crc32(piece))])
    return job


@pytest.mark.parametrize("name", ["rank-99", "launcher", "../secret", "%00", ""])
def test_a_raw_log_that_does_not_exist_is_not_there(name: str, cast: Cast, bob: Client) -> None:
    make_node()
    job, _ = started(cast.bob)
    assert bob.get(f"/jobs/{job.pk}/log/?raw={name}").status_code == 404


def test_what_the_page_starts_with_is_data_and_no_script(cast: Cast, bob: Client) -> None:
    make_node(gpus=2)
    job, _ = started(cast.bob, name="</script><img src=x onerror=alert(1)>")
    text = bob.get(f"/jobs/{job.pk}/").content.decode()
    assert "<img src=x" not in text
    start = text.index('id="chart-data" type="application/json">') + len('id="chart-data" type="application/json">')
    assert len(json.loads(text[start : text.index("</script>", start)])["gpus"]) == 2
