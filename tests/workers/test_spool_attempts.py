"""The directory of an attempt: whole or not there, its events each once, its end written also on a full disk."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from yard import Yard, output

from wire.desired import Launch
from wire.reports import AttemptEvent
from wire.states import AttemptState, EndReason
from workers.spool import EPOCHS_KEPT, EVENTS, AttemptDir, Epochs, Spool, SpoolError


def launch(**fields: object) -> Launch:
    given = {"attempt": str(uuid.uuid4()), "job": 1, "epoch": 1, "name": "n", "user": "u", "launcher": "script",
             "command": "true"}
    return Launch(**(given | fields))


def event(order: Launch, seq: int, message: str | None = None) -> AttemptEvent:
    return AttemptEvent(attempt=order.attempt, job=order.job, epoch=order.epoch, seq=seq, at=1.0,
                        state=AttemptState.RUNNING, message=message)


def test_creating_twice_gives_the_same_directory(tmp_path: Path) -> None:
    spool, order = Spool(tmp_path / "spool"), launch()
    assert spool.create(order) is spool.create(order)
    again = Spool(tmp_path / "spool").create(order)
    assert again.launch == order
    assert (again.path.stat().st_mode & 0o777) == 0o700


def test_a_half_built_directory_is_swept_away(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    (spool.root / ".new-half").mkdir()
    (spool.root / ".new-half" / "launch.json").write_text("{")
    fresh = Spool(tmp_path / "spool")
    assert fresh.attempts() == []
    assert not (spool.root / ".new-half").exists()


def test_events_come_back_in_order_and_only_once(tmp_path: Path) -> None:
    order = launch()
    attempt = Spool(tmp_path / "spool").create(order)
    for seq in range(1, 4):
        attempt.append_event(event(order, seq))
    for wrong in (3, 5):
        with pytest.raises(ValueError, match=f"event {wrong} "):
            attempt.append_event(event(order, wrong))
    read = AttemptDir(attempt.path)
    assert [one.seq for one in read.events()] == [1, 2, 3]
    assert [one.seq for one in read.events(2)] == [3]
    assert read.events(-1) == attempt.events()


def test_a_torn_event_is_written_over(tmp_path: Path) -> None:
    order = launch()
    attempt = Spool(tmp_path / "spool").create(order)
    attempt.append_event(event(order, 1))
    attempt.append_event(event(order, 2, "the power fails in this one"))
    whole = (attempt.path / EVENTS).read_bytes()
    end = whole.index(b"\0")
    (attempt.path / EVENTS).write_bytes(whole[:end - 10] + bytes(len(whole) - end + 10))
    read = AttemptDir(attempt.path)
    assert [one.seq for one in read.events()] == [1]
    read.append_event(event(order, 2, "again"))
    assert [one.message for one in AttemptDir(attempt.path).events()] == [None, "again"]


def test_events_may_outgrow_what_was_reserved(tmp_path: Path) -> None:
    order = launch()
    attempt = Spool(tmp_path / "spool").create(order)
    for seq in range(1, 30):
        attempt.append_event(event(order, seq, "x" * 5000))
    assert [one.seq for one in AttemptDir(attempt.path).events()] == list(range(1, 30))


def test_a_spool_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="file/spool cannot be used: Not a directory"):
        Spool(tmp_path / "file" / "spool")


def test_the_fence_keeps_the_newest_of_each_job_and_forgets_the_oldest_jobs(tmp_path: Path) -> None:
    path = tmp_path / "epochs"
    path.write_text("".join(f"{job} 2 a-{job}\n" for job in range(2 * EPOCHS_KEPT + 1)) + "7 torn")
    fence = Epochs(path)
    assert len(path.read_text().splitlines()) == EPOCHS_KEPT
    last = 2 * EPOCHS_KEPT
    assert fence.refuses(launch(job=last, epoch=1)) is not None
    assert fence.refuses(launch(job=last, epoch=3)) is None
    assert fence.refuses(launch(job=0, epoch=1)) is None
    fence.take(launch(job=last, epoch=5))
    assert Epochs(path).refuses(launch(job=last, epoch=4)) is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False)
    if done.returncode != 0:
        pytest.skip("this machine does not let us mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_hides_no_end(small_disk: Path) -> None:
    """The job itself fills the disk; its end and the event of it are told all the same."""
    yard = Yard(small_disk)
    attempt = yard.start(f"{sys.executable} -c \"import os, sys\ntry:\n  while True: os.write(1, b'x' * 65536)\n"
                         "except OSError as error: sys.exit(error.errno)\"")
    end = yard.ended(attempt)
    assert (end.reason, end.exit_code) == (EndReason.EXIT_CODE, 28)
    assert end.log_sizes["rank-0"] > 1_000_000
    assert os.statvfs(small_disk).f_bavail == 0
    assert AttemptDir(attempt.path).events()[-1] == end
    with pytest.raises(SpoolError, match="No space left"):
        yard.supervisor.launch(yard.order("/bin/true"))
    yard.supervisor.forget(attempt.launch.attempt)
    assert yard.run("/bin/true").reason is EndReason.EXITED
    yard.clear()


def test_a_run_on_a_full_disk_can_still_be_stopped(small_disk: Path) -> None:
    yard = Yard(small_disk)
    attempt = yard.start("/bin/sh -c 'echo begun; exec sleep 600'")
    yard.until_output(attempt, "begun")
    yard.until(lambda: attempt.status() is not None)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    yard.stop(attempt)
    assert yard.ended(attempt).reason is EndReason.STOP_REQUESTED
    assert output(attempt) == "begun\n"
    yard.clear()


def test_what_a_run_left_in_its_own_directory_is_kept_for_a_while(tmp_path: Path) -> None:
    spool, order, idle = Spool(tmp_path / "spool"), launch(job=7, epoch=2), launch()
    (spool.create(order).path / "work" / "model.pt").write_text("weights")
    spool.create(idle)
    for attempt in (order, idle):
        spool.remove(attempt.attempt)
    assert spool.attempts() == []
    assert (spool.kept_root / "job-7-attempt-2" / "model.pt").read_text() == "weights"
    assert len(list(spool.kept_root.iterdir())) == 1
    now = time.time()
    spool.clear_kept(60.0, now)
    assert (spool.kept_root / "job-7-attempt-2").exists()
    spool.clear_kept(60.0, now + 61)
    assert list(spool.kept_root.iterdir()) == []
