"""Orders may come twice, late, in the wrong order, or for something that is gone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from yard import Yard, alive, output, states

from wire.desired import Stop
from wire.states import EndReason
from workers.spool import SpoolError


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.clear()


def test_the_same_launch_again_starts_nothing(yard: Yard) -> None:
    attempt = yard.start("/bin/echo once")
    for _ in range(5):
        yard.supervisor.launch(attempt.launch)
    yard.ended(attempt)
    yard.supervisor.launch(attempt.launch)
    assert output(attempt) == "once\n"
    assert states(attempt) == ["starting", "running", "succeeded"]


def test_a_stop_before_its_launch_ends_it_at_once(yard: Yard) -> None:
    launch = yard.order("/bin/echo never")
    yard.supervisor.stop(Stop(attempt=launch.attempt, job=launch.job, epoch=1))
    attempt = yard.spool.find(launch.attempt)
    assert attempt is not None
    assert [(event.seq, event.reason, event.job, event.epoch) for event in attempt.events()] == [
        (1, EndReason.STOP_REQUESTED, launch.job, 1)]
    yard.supervisor.launch(launch)
    yard.supervisor.poll()
    assert states(attempt) == ["stopped"]
    assert not attempt.streams()


def test_a_launch_after_stop_and_forget_starts_nothing(yard: Yard) -> None:
    launch = yard.order("/bin/echo never")
    yard.supervisor.stop(Stop(attempt=launch.attempt, job=launch.job, epoch=1))
    yard.supervisor.forget(launch.attempt)
    yard.supervisor.launch(launch)
    attempt = yard.spool.find(launch.attempt)
    assert attempt is not None
    assert attempt.events()[-1].reason is EndReason.UNKNOWN_EPOCH
    assert not attempt.streams()


def test_an_older_attempt_of_a_job_is_refused_also_by_a_new_worker(yard: Yard) -> None:
    yard.run("/bin/true", job=7, epoch=3)
    yard.supervisor.close()
    yard.restart_worker()
    yard.supervisor.recover()
    late = yard.order("/bin/echo late", job=7, epoch=2)
    yard.supervisor.launch(late)
    attempt = yard.spool.find(late.attempt)
    assert attempt is not None
    end = attempt.events()[-1]
    assert end.reason is EndReason.UNKNOWN_EPOCH
    assert "older than attempt 3" in (end.message or "")
    assert not attempt.streams()
    assert yard.run("/bin/true", job=7, epoch=4).reason is EndReason.EXITED
    assert yard.run("/bin/true", job=8, epoch=1).reason is EndReason.EXITED


def test_a_forgotten_attempt_does_not_run_again(yard: Yard) -> None:
    attempt = yard.start("/bin/true")
    yard.ended(attempt)
    yard.supervisor.forget(attempt.launch.attempt)
    assert not attempt.path.exists()
    yard.supervisor.close()
    yard.restart_worker()
    yard.supervisor.launch(attempt.launch)
    again = yard.spool.find(attempt.launch.attempt)
    assert again is not None
    assert states(again) == ["failed"]
    assert "already run here" in (again.events()[0].message or "")


def test_a_live_attempt_cannot_be_forgotten(yard: Yard) -> None:
    attempt = yard.start("/bin/sleep 600")
    yard.until(lambda: "running" in states(attempt))
    yard.supervisor.forget(attempt.launch.attempt)
    assert attempt.path.exists()
    assert alive(attempt)
    yard.supervisor.forget("never-heard-of")


def test_an_id_that_is_a_path_is_refused(yard: Yard) -> None:
    for attempt in ("../elsewhere", "a/b", "", ".hidden"):
        with pytest.raises(SpoolError):
            yard.supervisor.launch(yard.order("/bin/true", attempt=attempt))
    assert not yard.spool.attempts()


def test_attempts_run_side_by_side_and_are_stopped_one_by_one(yard: Yard) -> None:
    attempts = [yard.start("/bin/sleep 600") for _ in range(6)]
    yard.until(lambda: all("running" in states(attempt) for attempt in attempts))
    for index, attempt in enumerate(attempts):
        yard.stop(attempt)
        assert yard.ended(attempt).reason is EndReason.STOP_REQUESTED
        assert all(alive(other) for other in attempts[index + 1:])
    assert yard.supervisor.active() == []
