"""What nodes report of an attempt, and what becomes of the job: in order, repeated, reordered, late, and by gangs."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.models import Allocation, Attempt, Event, Job, JobState, LogStream, Share
from portal.services import attempts, jobs, scheduling
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import (
    FAILED,
    LOST,
    RUNNING,
    STARTING,
    STOPPED,
    SUCCEEDED,
    event,
    fresh,
    report,
    started,
    submitted,
)
from wire.reports import RankExit
from wire.states import AttemptState, EndReason


def held_gpus() -> int:
    return Allocation.objects.filter(released_at=None).count()


def after(attempt: Attempt) -> tuple[str, str, str]:
    job = fresh(attempt.job)
    return job.state, job.end_code, job.end_message


def test_a_job_starts_runs_and_succeeds(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob, gpus=4)
    share = attempt.shares.get()
    report(share, STARTING)
    assert fresh(attempt.job).state == JobState.STARTING
    report(share, RUNNING, first_seq=2)
    running = fresh(attempt.job)
    assert running.state == JobState.RUNNING and running.started_at and held_gpus() == 4
    report(share, SUCCEEDED, first_seq=3, exit_code=0, log_sizes={"rank-0": 0}, monotonic_s=2.5)
    job, attempt = fresh(attempt.job), Attempt.objects.get(pk=attempt.pk)
    assert (job.state, job.end_code, job.exit_code, held_gpus()) == (JobState.SUCCEEDED, "end_exited", 0, 0)
    assert job.submitted_at <= job.allocated_at <= job.started_at <= job.ended_at  # type: ignore[operator]
    assert attempt.state == "succeeded" and 0 <= attempt.running_s <= 2.5  # type: ignore[operator]


@pytest.mark.parametrize(("end", "fields", "state", "sentence"), [
    (FAILED, {"exit_code": 3, "message": "ValueError: no file"}, "failed", "Exited with code 3: ValueError: no file."),
    ((AttemptState.FAILED, EndReason.SIGNAL), {"signal": 9}, "failed", "Killed by signal 9 (SIGKILL)."),
    ((AttemptState.FAILED, EndReason.LAUNCH_FAILED), {"message": "train.py is not there"}, "failed",
     "Could not be started on n1: train.py is not there."),
    ((AttemptState.FAILED, EndReason.TIME_LIMIT), {}, "failed", "Ended after its time limit of 1h."),
    ((AttemptState.FAILED, EndReason.OUT_OF_MEMORY), {}, "failed",
     "n1 ran out of memory and the kernel ended a process of this job."),
    (LOST, {}, "failed", "The process that watched over it on n1 died; everything it had started was ended."),
    ((AttemptState.LOST, EndReason.NODE_REBOOT), {}, "failed", "n1 restarted while the job ran there."),
    ((AttemptState.FAILED, None), {"message": "?"}, "failed", "n1 reported the end as failed, without a reason: ?"),
])  # fmt: skip
def test_an_end_is_told_in_a_sentence(cast: Cast, end: Any, fields: dict[str, Any], state: str, sentence: str) -> None:
    make_node()
    attempt = started(cast.bob, time_limit="1h")
    report(attempt.shares.get(), STARTING, RUNNING, end, **fields)
    assert (after(attempt)[0], after(attempt)[2], held_gpus()) == (state, sentence, 0)


def test_the_rank_that_failed_first_is_named_and_the_others_only_followed(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob, gpus=4, launcher="torchrun")
    ranks = [
        RankExit(rank=0, signal=15, ended_at=12.0),
        RankExit(rank=2, exit_code=1, message="RuntimeError: CUDA out of memory", ended_at=10.0),
        RankExit(rank=1, signal=15, ended_at=11.0),
    ]
    report(attempt.shares.get(), STARTING, RUNNING, FAILED, exit_code=1, ranks=ranks)
    why = "Rank 2 exited with code 1: RuntimeError: CUDA out of memory. The other 3 ranks stopped because of it."
    assert after(attempt)[2] == why


def test_the_reason_outranks_a_state_that_contradicts_it(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    report(attempt.shares.get(), (AttemptState.SUCCEEDED, EndReason.EXIT_CODE), exit_code=2)
    assert after(attempt)[0] == JobState.FAILED


def test_repeats_change_nothing_and_gaps_are_not_taken(cast: Cast) -> None:
    make_node()
    share = started(cast.bob).shares.get()
    assert attempts.apply(share.node, event(share, 2, *RUNNING)) is False
    report(share, STARTING, RUNNING)
    count = Event.objects.count()
    assert attempts.apply(share.node, event(share, 1, *STARTING)) is True
    assert attempts.apply(share.node, event(share, 2, *FAILED, exit_code=1)) is True
    assert (Event.objects.count(), fresh(share.attempt.job).state) == (count, JobState.RUNNING)


def test_an_event_of_another_node_epoch_or_job_is_not_taken(cast: Cast) -> None:
    make_node(gpus=1)
    other = make_node("n2", gpus=1, schedulable=False)
    share = started(cast.bob).shares.get()
    good = event(share, 1, *STARTING)
    assert attempts.apply(other, good) is False
    for field, wrong in (("epoch", 2), ("job", good.job + 1), ("attempt", "no uuid"), ("attempt", "0" * 32)):
        bad = event(share, 1, *STARTING)
        setattr(bad, field, wrong)
        assert attempts.apply(share.node, bad) is False
    assert Share.objects.get(pk=share.pk).event_seq == 0


def test_what_comes_after_the_end_is_kept_as_evidence_only(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    share = attempt.shares.get()
    report(share, STARTING, FAILED, exit_code=1)
    report(share, SUCCEEDED, first_seq=3)
    assert after(attempt)[0] == JobState.FAILED and Event.objects.filter(kind="attempt.late").count() == 1


@pytest.mark.parametrize("before", [(), (STARTING,), (STARTING, RUNNING)])
def test_a_cancel_at_any_moment_orders_the_stop_and_ends_as_stopped(cast: Cast, before: tuple[Any, ...]) -> None:
    make_node()
    attempt = started(cast.bob, gpus=2)
    share = attempt.shares.get()
    report(share, *before)
    assert jobs.cancel(attempt.job, actor=cast.bob).state == JobState.STOPPING
    assert held_gpus() == 2, "the GPUs are not free before the processes are gone"
    for late in (STARTING, RUNNING)[len(before) :]:
        report(share, late, first_seq=share_seq(share) + 1)
    report(share, STOPPED, first_seq=share_seq(share) + 1)
    assert (after(attempt), held_gpus()) == (("stopped", "end_stop_requested", "Stopped by bob."), 0)


def test_a_run_that_ended_before_the_stop_reached_it_keeps_its_result(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    share = attempt.shares.get()
    report(share, STARTING, RUNNING)
    jobs.cancel(attempt.job, actor=cast.bob)
    report(share, SUCCEEDED, first_seq=3)
    assert after(attempt)[0] == JobState.SUCCEEDED and held_gpus() == 0


def test_a_gang_ends_together_and_the_first_failure_is_the_reason(cast: Cast) -> None:
    make_node("n1", gpus=4), make_node("n2", gpus=4)
    attempt = started(cast.bob, gpus=8, nodes=2, launcher="torchrun")
    one, two = attempt.shares.order_by("node_rank")
    report(one, STARTING, RUNNING), report(two, STARTING, RUNNING)
    report(two, FAILED, first_seq=3, exit_code=7, message="boom")
    one.refresh_from_db()
    assert one.stop_requested_at is not None and held_gpus() == 8 and after(attempt)[0] == JobState.RUNNING
    report(one, STOPPED, first_seq=3)
    state, code, message = after(attempt)
    assert (state, code, held_gpus()) == (JobState.FAILED, "end_exit_code", 0) and message.startswith(
        "Exited with code 7: boom"
    )


def test_a_cancelled_gang_is_stopped_even_if_one_node_had_finished(cast: Cast) -> None:
    make_node("n1", gpus=4), make_node("n2", gpus=4)
    attempt = started(cast.bob, gpus=8, nodes=2)
    one, two = attempt.shares.order_by("node_rank")
    report(one, STARTING, RUNNING), report(two, STARTING, RUNNING)
    jobs.cancel(attempt.job, actor=cast.alice)
    report(one, STOPPED, first_seq=3), report(two, SUCCEEDED, first_seq=3)
    assert after(attempt) == ("stopped", "end_stop_requested", "Stopped by alice.")


def test_a_lost_attempt_is_tried_again_as_often_as_was_asked(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    make_node()
    first = started(cast.bob, retries=1)
    report(first.shares.get(), STARTING, RUNNING, LOST)
    job = fresh(first.job)
    assert (job.state, job.hold_code, job.started_at, held_gpus()) == (JobState.WAITING, "wait_retry", None, 0)
    assert "Try 2 of 2 follows." in job.hold_message and scheduling.run_cycle().started == []
    monkeypatch.setattr(scheduling, "RETRY_AFTER_S", 0.0)
    assert scheduling.run_cycle().started == [job.pk]
    second = job.attempts.get(number=2)
    assert second.shares.get().launch["epoch"] == 2
    report(second.shares.get(), STARTING, RUNNING, LOST)
    assert after(second)[0] == JobState.FAILED


def test_a_failure_of_the_job_itself_is_not_tried_again(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob, retries=3)
    report(attempt.shares.get(), STARTING, RUNNING, FAILED, exit_code=1)
    assert after(attempt)[0] == JobState.FAILED


def test_a_cancelled_job_that_is_lost_is_stopped_and_not_tried_again(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob, retries=3)
    share = attempt.shares.get()
    report(share, STARTING, RUNNING)
    jobs.cancel(attempt.job, actor=cast.bob)
    report(share, LOST, first_seq=3)
    assert after(attempt)[::2] == ("stopped", "Stopped by bob.")


def test_released_gpus_go_to_the_next_job(cast: Cast) -> None:
    make_node(gpus=2)
    first, second = started(cast.bob, gpus=2), submitted(cast.charlie, gpus=2)
    assert scheduling.run_cycle().started == []
    report(first.shares.get(), STARTING, RUNNING, SUCCEEDED)
    assert scheduling.run_cycle().started == [second.pk]
    assert attempts.release(first) == 0, "again"
    assert held_gpus() == 2


def test_a_share_is_forgotten_once_its_end_and_its_logs_are_whole(cast: Cast) -> None:
    make_node()
    share = started(cast.bob).shares.get()
    sizes = {"rank-0": 10, "launcher": 0, "../../etc": 5, "rank-1": -1}
    report(share, STARTING, RUNNING, SUCCEEDED, log_sizes=sizes)
    assert dict(LogStream.objects.values_list("name", "final_bytes")) == {"rank-0": 10, "launcher": 0}
    share.refresh_from_db()
    assert not attempts.forget_if_whole(share)
    LogStream.objects.filter(name="rank-0").update(size_bytes=10)
    assert attempts.forget_if_whole(share) and attempts.forget_if_whole(share)


def test_a_rank_that_never_wrote_has_a_whole_empty_log(cast: Cast) -> None:
    make_node()
    share = started(cast.bob, gpus=2, launcher="torchrun").shares.get()
    report(share, (AttemptState.FAILED, EndReason.LAUNCH_FAILED), message="x\x00y")
    assert {stream.name: stream.complete for stream in LogStream.objects.all()} == {"rank-0": True, "rank-1": True}
    assert Share.objects.get(pk=share.pk).forgotten_at is not None


def test_times_of_a_node_whose_clock_is_wrong_stay_in_order(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    share = attempt.shares.get()
    for seq, (step, at) in enumerate([(STARTING, -1.0), (RUNNING, 1e300), (SUCCEEDED, 5.0)], 1):
        told = event(share, seq, *step)
        told.at = at
        assert attempts.apply(share.node, told)
    job = fresh(attempt.job)
    assert job.allocated_at <= job.started_at <= job.ended_at  # type: ignore[operator]


PATHS = [
    (STARTING, RUNNING, SUCCEEDED),
    (STARTING, RUNNING, FAILED),
    (STARTING, FAILED),
    (STARTING, RUNNING, STOPPED),
    (LOST,),
]


@given(st.sampled_from(PATHS), st.lists(st.integers(0, 3), max_size=12), st.none() | st.integers(0, 12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_in_any_order_and_number_end_like_those_in_order(
    cast: Cast, path: tuple[Any, ...], arrivals: list[int], cancel_at: int | None
) -> None:
    """The node sends on until all is acknowledged; whatever arrives when, the end is one that the path allows."""
    if not Share.objects.exists():
        make_node()
    share = started(cast.bob).shares.get()
    told = [event(share, seq, *step) for seq, step in enumerate(path, 1)]
    for moment, number in enumerate([*arrivals, *range(len(path))]):
        if moment == cancel_at:
            jobs.cancel(share.attempt.job, actor=cast.bob)
        attempts.apply(share.node, told[number % len(told)])
    assert share_seq(share) == len(path)
    job, last = fresh(share.attempt.job), path[-1][0]
    expected = {"succeeded": "succeeded", "failed": "failed", "stopped": "stopped", "lost": "failed"}[last.value]
    asked = job.cancel_requested_at is not None
    assert job.state == ("stopped" if asked and last == AttemptState.LOST else expected)
    assert not Allocation.objects.filter(attempt=share.attempt, released_at=None).exists()
    ends = Event.objects.filter(job=job, kind="job.state", to_state__in=["succeeded", "failed", "stopped"])
    assert ends.count() == 1 and Job.objects.get(pk=job.pk).ended_at is not None


def share_seq(share: Share) -> int:
    return Share.objects.get(pk=share.pk).event_seq
