"""Anything in any order: submits, cancels, cycles, reports, silence. What must hold is checked after every step."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.models import JOB_ENDED, Allocation, Attempt, Event, Job, JobState, Node, Share
from portal.services import attempts, jobs, nodes, overdue, scheduling
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
from wire.states import AttemptState

ENDED_JOBS = [state.value for state in JOB_ENDED]
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["cancel", "advance", "succeed", "fail", "lose", "silence"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["cycle", "cycle", "beat", "sweep", "note"]), st.just(0)),
)


def take(step: str, number: int, cast: Cast) -> None:
    open_shares = Share.objects.exclude(state__in=["succeeded", "failed", "stopped", "lost"]).order_by("pk")
    share = open_shares[number % len(open_shares)] if open_shares else None
    told: dict[str, Any] = {"succeed": SUCCEEDED, "fail": FAILED, "lose": LOST}
    match step:
        case "submit":
            submitted(cast.bob, gpus=number, nodes=2 if number == 4 else 1, retries=number % 2)
        case "cycle":
            scheduling.run_cycle()
        case "cancel" if Job.objects.exists():
            jobs.cancel(Job.objects.order_by("pk")[number % Job.objects.count()], actor=cast.bob)
        case "advance" if share:
            end = (
                STOPPED
                if share.stop_requested_at
                else {"pending": STARTING, "starting": RUNNING}.get(share.state, SUCCEEDED)
            )
            attempts.apply(share.node, event(share, share.event_seq + 1, *end))
        case "succeed" | "fail" | "lose" if share:
            attempts.apply(share.node, event(share, share.event_seq + 1, *told[step], exit_code=1))
        case "silence":
            Node.objects.filter(name=f"n{number % 2}").update(last_heartbeat_at=timezone.now() - timedelta(minutes=1))
        case "beat":
            Node.objects.update(last_heartbeat_at=timezone.now())
        case "sweep":
            nodes.sweep()
        case "note":
            overdue.note()


def check() -> None:
    held = list(Allocation.objects.filter(released_at=None).values_list("gpu_id", "attempt__state"))
    assert len({gpu for gpu, _ in held}) == len(held), "a GPU is held once"
    assert not {state for _, state in held} & {"succeeded", "failed", "stopped", "lost"}, (
        "an ended attempt holds nothing"
    )
    for job in Job.objects.prefetch_related("attempts__shares", "attempts__allocations"):
        active = [one for one in job.attempts.all() if not one.has_ended]
        assert len(active) == (1 if job.state in ("starting", "running", "stopping") else 0)
        for attempt in active:
            holding = [one for one in attempt.allocations.all() if one.released_at is None]
            assert len(holding) == job.gpu_count, "all GPUs of a gang or none"
        assert (job.ended_at is not None) == (job.state in ENDED_JOBS)
        numbers = [one.number for one in job.attempts.all()]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= job.spec.get("retries", 0) + 1
        ends = Event.objects.filter(job=job, kind="job.state", to_state__in=ENDED_JOBS).count()
        assert ends == (1 if job.state in ENDED_JOBS else 0), "an end is written once"


@given(st.lists(STEPS, max_size=25))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_life_keeps_the_rules_and_comes_to_an_end(cast: Cast, steps: list[tuple[str, int]]) -> None:
    Job.objects.all().delete()
    Node.objects.all().delete()
    for name in ("n0", "n1"):
        make_node(name, gpus=3)
    for step, number in steps:
        take(step, number, cast)
        check()
    Node.objects.update(last_heartbeat_at=timezone.now(), state="ready")
    for _ in range(10 * (len(steps) + 1)):
        if not Job.objects.exclude(state__in=ENDED_JOBS).exists():
            break
        Job.objects.filter(hold_code="wait_retry").update(state_since=timezone.now() - timedelta(minutes=1))
        scheduling.run_cycle()
        for number in range(Share.objects.count()):
            take("advance", number, cast)
        check()
    assert not Job.objects.exclude(state__in=ENDED_JOBS).exists(), "every job comes to an end"
    assert not Allocation.objects.filter(released_at=None).exists()


# --- what is shown while a node owes an answer ------------------------------------------------------------------------


def noted(attempt: Attempt, later: timedelta = timedelta(0)) -> tuple[str, str]:
    overdue.note(timezone.now() + later)
    job = fresh(attempt.job)
    return job.hold_code, job.hold_message


def test_a_node_that_is_silent_is_named_with_since_when_and_nothing_is_stopped(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    report(attempt.shares.get(), STARTING, RUNNING)
    assert noted(attempt) == ("", "")
    Node.objects.update(last_heartbeat_at="2026-01-02T03:04:05Z")
    nodes.sweep()
    sentence = "No contact with n1 since 03:04:05 UTC. The job probably still runs there. Nothing of it is stopped."
    assert noted(attempt) == ("node_silent", sentence)
    assert fresh(attempt.job).state == JobState.RUNNING
    Node.objects.update(state="ready")
    assert noted(attempt) == ("", "") and overdue.note() == 0


@pytest.mark.parametrize(("after_s", "code"), [(5, ""), (60, "start_overdue")])
def test_a_start_that_nobody_confirms_is_shown(cast: Cast, after_s: int, code: str) -> None:
    make_node()
    assert noted(started(cast.bob), timedelta(seconds=after_s))[0] == code


@pytest.mark.parametrize(("after_s", "code"), [(40, ""), (120, "stop_overdue")])
def test_a_stop_that_nobody_confirms_is_shown(cast: Cast, after_s: int, code: str) -> None:
    make_node()
    attempt = started(cast.bob)
    report(attempt.shares.get(), STARTING, RUNNING)
    jobs.cancel(attempt.job, actor=cast.bob)
    assert noted(attempt, timedelta(seconds=after_s))[0] == code
    assert Share.objects.get().state == AttemptState.STOPPING
