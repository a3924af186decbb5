"""Log bytes arrive cut, doubled, late and in any order; what is stored is what the rank wrote."""

import itertools
import uuid
import zlib
from pathlib import Path

import pytest
from django.conf import settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from portal.models import Attempt, Job, LogStream
from portal.services import logs
from portal.services.errors import Problem
from tests.portal.conftest import Cast
from wire.reports import LogChunk
from wire.states import AttemptState


@pytest.fixture
def job(cast: Cast) -> Job:
    return Job.objects.create(
        owner=cast.bob, project=cast.bob.personal_project, name="j", spec={}, gpu_count=2, state="running"
    )


@pytest.fixture
def attempt(job: Job) -> Attempt:
    return Attempt.objects.create(job=job, number=1, state=AttemptState.RUNNING)


def chunk(attempt: Attempt, offset: int, data: bytes, *, stream: str = "rank-0", dropped: int = 0) -> LogChunk:
    return LogChunk(
        attempt=str(attempt.pk), job=attempt.job_id, epoch=attempt.number, stream=stream, offset=offset, data=data,
        crc32=zlib.crc32(data), dropped_bytes=dropped,
    )


def size_of(attempt: Attempt, stream: str = "rank-0") -> int:
    return LogStream.objects.get(attempt=attempt, name=stream).size_bytes


def everything(job: Job, rank: int | str = 0) -> bytes:
    data, offset = b"", 0
    while piece := logs.read(job, rank, offset, 7):
        if not piece.data and piece.next_offset == offset:
            return data
        data, offset = data + piece.data, piece.next_offset
    return data


def test_a_repeated_chunk_changes_nothing(job: Job, attempt: Attempt) -> None:
    for _ in range(2):
        logs.append([chunk(attempt, 0, b"epoch 1\n")])
    assert everything(job) == b"epoch 1\n"
    assert LogStream.objects.get(attempt=attempt).line_count == 1


def test_an_overlapping_chunk_adds_only_its_new_end(job: Job, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"abcdef")])
    logs.append([chunk(attempt, 3, b"defghi")])
    assert everything(job) == b"abcdefghi"


def test_stored_bytes_are_never_rewritten(job: Job, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"the truth\n")])
    logs.append([chunk(attempt, 0, b"a lie....\nand more\n")])
    assert everything(job) == b"the truth\nand more\n"


def test_a_chunk_after_a_gap_waits_for_what_is_missing(job: Job, attempt: Attempt) -> None:
    batch = logs.append([chunk(attempt, 4, b"late")])
    assert batch.refused == {"gap": 1}
    assert not LogStream.objects.filter(size_bytes__gt=0).exists()
    logs.append([chunk(attempt, 0, b"soon"), chunk(attempt, 4, b"late")])
    assert everything(job) == b"soonlate"


def test_a_damaged_chunk_is_refused(job: Job, attempt: Attempt) -> None:
    damaged = chunk(attempt, 0, b"hello")
    damaged.data = b"jello"
    assert logs.append([damaged]).refused == {"bad_crc": 1}
    assert everything(job) == b""


@pytest.mark.parametrize("stream", ["../../etc/x", "rank--1", "rank-01", "rank-0\n", "rank-1000000", "", "Launcher"])
def test_a_stream_of_another_name_is_refused(attempt: Attempt, stream: str) -> None:
    assert logs.append([chunk(attempt, 0, b"x", stream=stream)]).refused == {"bad_stream": 1}


@pytest.mark.parametrize("offset", [-1, 1 << 62])
def test_an_impossible_offset_is_refused(attempt: Attempt, offset: int) -> None:
    assert logs.append([chunk(attempt, offset, b"x")]).refused == {"bad_offset": 1}


def test_bytes_cut_from_a_flood_leave_a_marked_hole(job: Job, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"head"), chunk(attempt, 1_000_004, b"tail", dropped=1_000_000)])
    stream = LogStream.objects.get(attempt=attempt)
    assert (stream.size_bytes, stream.dropped) == (1_000_008, [[4, 1_000_004]])
    head = logs.read(job, 0, 0, 100)
    tail = logs.read(job, 0, head.next_offset, 100)
    assert (head.data, head.next_offset) == (b"head", 4)
    assert (tail.offset, tail.data, tail.next_offset) == (1_000_004, b"tail", 1_000_008)


def test_what_a_crash_left_behind_the_acknowledged_size_is_neither_read_nor_kept(job: Job, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"safe ")])
    with logs.path_of(attempt.pk, "rank-0").open("ab") as file:
        file.write(b"half writ")
    assert everything(job) == b"safe "
    logs.append([chunk(attempt, 5, b"whole\n")])
    assert everything(job) == b"safe whole\n"


def test_two_ranks_do_not_share_a_file(job: Job, attempt: Attempt) -> None:
    for stream, data in (("rank-0", b"zero"), ("rank-1", b"one"), ("launcher", b"up")):
        logs.append([chunk(attempt, 0, data, stream=stream)])
    assert (everything(job, 0), everything(job, 1), everything(job, "launcher")) == (b"zero", b"one", b"up")
    assert [stream.name for stream in logs.streams(job)] == ["rank-0", "rank-1", "launcher"]


def test_a_disk_that_refuses_stores_nothing_and_claims_nothing(job: Job, attempt: Attempt) -> None:
    folder = Path(settings.LOG_ROOT) / str(attempt.pk)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("a file where the folder should be")
    batch = logs.append([chunk(attempt, 0, b"x"), chunk(attempt, 1, b"y")])
    assert batch.refused == {"disk": 1}
    assert not LogStream.objects.filter(size_bytes__gt=0).exists()
    folder.unlink()
    logs.append([chunk(attempt, 0, b"x"), chunk(attempt, 1, b"y")])
    assert everything(job) == b"xy"


def test_another_writer_in_between_makes_the_size_stay(job: Job, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"ab")])
    batch = logs.write([chunk(attempt, 2, b"cd")])
    LogStream.objects.filter(attempt=attempt).update(size_bytes=3)
    assert batch.save() == []
    assert size_of(attempt) == 3


def test_a_log_is_complete_once_every_byte_of_the_ended_rank_is_there(job: Job, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"12345")])
    assert not logs.read(job, 0, 0, 100).complete
    LogStream.objects.filter(attempt=attempt).update(final_bytes=8)
    assert not logs.read(job, 0, 0, 100).complete
    logs.append([chunk(attempt, 5, b"678")])
    assert not logs.read(job, 0, 0, 3).complete  # more comes after this piece
    assert logs.read(job, 0, 3, 100).complete


def test_a_rank_that_never_wrote_is_complete_when_the_attempt_has_ended(job: Job, attempt: Attempt) -> None:
    assert not logs.read(job, 1, 0, 100).complete
    Attempt.objects.filter(pk=attempt.pk).update(state=AttemptState.FAILED)
    piece = logs.read(job, 1, 0, 100)
    assert (piece.data, piece.next_offset, piece.complete) == (b"", 0, True)


def test_a_job_cancelled_before_any_attempt_has_a_complete_empty_log(job: Job) -> None:
    assert not logs.read(job, 0, 0, 10).complete
    Job.objects.filter(pk=job.pk).update(state="stopped")
    assert logs.read(Job.objects.get(pk=job.pk), 0, 0, 10).complete


def test_the_newest_attempt_is_the_one_that_is_read(job: Job, attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"first try")])
    second = Attempt.objects.create(job=job, number=2)
    logs.append([chunk(second, 0, b"second try")])
    assert everything(job) == b"second try"


@pytest.mark.parametrize(("offset", "status"), [(-1, 400), (6, 400), (5, 0)])
def test_an_offset_outside_of_the_log_is_refused(job: Job, attempt: Attempt, offset: int, status: int) -> None:
    logs.append([chunk(attempt, 0, b"12345")])
    if status == 0:
        assert logs.read(job, 0, offset, 10).data == b""
        return
    with pytest.raises(Problem) as refused:
        logs.read(job, 0, offset, 10)
    assert refused.value.status == status


@pytest.mark.parametrize("rank", [2, -1, 10**30, "leader"])
def test_a_rank_that_does_not_exist_is_named(job: Job, rank: int | str) -> None:
    with pytest.raises(Problem, match="2 ranks"):
        logs.read(job, rank, 0, 10)


def test_the_last_line_is_shown_without_its_colours(attempt: Attempt) -> None:
    logs.append([chunk(attempt, 0, b"start\n 10%\r 20%\r\x1b[31mloss 0.1\x1b[0m\n\n")])
    assert logs.last_line(LogStream.objects.get(attempt=attempt)) == "loss 0.1"


ORDINARY_INPUT = st.one_of(st.binary(max_size=300), st.just(b"\x00\xff\r\n" * 40), st.just("héllo\n".encode() * 30))


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), text=ORDINARY_INPUT)
def test_any_cutting_doubling_and_reordering_ends_in_the_same_bytes(job: Job, data: st.DataObject, text: bytes) -> None:
    """The node's side of the contract: it sends on, and goes back to what was acknowledged when nothing moves."""
    number = Attempt.objects.filter(job=job).count() + 1
    attempt = Attempt.objects.create(pk=uuid.uuid4(), job=job, number=number)
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=12))})
    pieces = list(itertools.pairwise(cuts))
    storm = data.draw(st.lists(st.sampled_from(pieces), max_size=30)) if pieces else []
    for batch in (storm[start : start + 4] for start in range(0, len(storm), 4)):
        logs.append([chunk(attempt, begin, text[begin:end]) for begin, end in batch])
    acknowledged = LogStream.objects.filter(attempt=attempt).values_list("size_bytes", flat=True).first() or 0
    width = data.draw(st.integers(1, 64))
    logs.append([chunk(attempt, at, text[at : at + width]) for at in range(acknowledged, len(text), width)])
    assert everything(job) == text
    assert LogStream.objects.filter(attempt=attempt, size_bytes=len(text)).exists() or not text
