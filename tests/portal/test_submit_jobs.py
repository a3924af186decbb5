"""Submitting and cancelling, also by many at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection

from portal.models import Allocation, Event, IdempotencyKey, Job, JobState, Membership, Project
from portal.scheduler.decisions import Placement, Start
from portal.services import accounts, jobs, scheduling
from portal.services.errors import Problem
from tests.portal.conftest import Cast, gpu_uuid, make_node
from tests.portal.orders import fresh, spec, submitted


def at_once(count: int, act: Callable[[int], Any]) -> list[Any]:
    """`act` in `count` threads that all begin at the same moment, each with a database connection of its own."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        try:
            barrier.wait(timeout=20)
            return act(number)
        finally:
            connection.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_a_job_belongs_to_its_owners_project_unless_it_names_another(cast: Cast) -> None:
    make_node()
    team = Project.objects.create(name="vision")
    accounts.join(team, cast.bob, Membership.Role.MEMBER)
    assert submitted(cast.bob).project.name == "bob"
    assert submitted(cast.bob, project="vision").project == team
    with pytest.raises(Problem, match="project: you are in no project of this name, only in: charlie"):
        submitted(cast.charlie, project="vision")


def test_a_submit_leaves_an_event_and_waits(cast: Cast) -> None:
    make_node()
    job = submitted(cast.bob, gpus=4, name="resnet")
    assert (job.state, job.name, job.gpu_count) == (JobState.WAITING, "resnet", 4)
    found = Event.objects.get(job=job)
    assert (found.kind, found.actor, found.to_state) == ("job.submitted", cast.bob, "waiting")


def test_what_can_never_start_leaves_no_row(cast: Cast) -> None:
    make_node()
    with pytest.raises(Problem) as caught:
        jobs.submit(spec(gpus=9), actor=cast.bob, idempotency_key="k")
    assert caught.value.code == "unsatisfiable"
    assert not Job.objects.exists() and not Event.objects.filter(kind="job.submitted").exists()
    assert not IdempotencyKey.objects.exists()


def test_a_key_makes_one_job_and_belongs_to_one_request_of_one_person(cast: Cast) -> None:
    make_node()
    first = jobs.submit(spec(), actor=cast.bob, idempotency_key="k")
    again = jobs.submit(spec(), actor=cast.bob, idempotency_key="k")
    others = jobs.submit(spec(), actor=cast.charlie, idempotency_key="k")
    assert (first.replayed, again.replayed, others.replayed) == (False, True, False)
    assert again.job.pk == first.job.pk != others.job.pk
    with pytest.raises(Problem) as caught:
        jobs.submit(spec(gpus=2), actor=cast.bob, idempotency_key="k")
    assert (caught.value.status, caught.value.code) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("key", ["", "x" * 201, "a\nb", "a\x00b"])
def test_a_key_is_short_and_printable(cast: Cast, key: str) -> None:
    with pytest.raises(Problem, match="Idempotency-Key"):
        jobs.submit(spec(), actor=cast.bob, idempotency_key=key)


def test_waiting_jobs_are_limited_per_person(cast: Cast, settings: Any) -> None:
    make_node()
    settings.MAX_PENDING_JOBS_PER_USER = 2
    submitted(cast.bob), submitted(cast.bob)
    with pytest.raises(Problem) as caught:
        submitted(cast.bob)
    assert (caught.value.status, caught.value.code) == (429, "pending_limit") and caught.value.headers["Retry-After"]
    assert submitted(cast.charlie).state == JobState.WAITING


def test_cancelling_a_waiting_job_ends_it_at_once_and_it_never_starts(cast: Cast) -> None:
    make_node()
    job = jobs.cancel(submitted(cast.bob), actor=cast.alice)
    assert (job.state, job.end_message, job.ended_at is not None) == (JobState.STOPPED, "Stopped by alice.", True)
    count = Event.objects.count()
    again = jobs.cancel(job, actor=cast.bob)
    assert (again.state, again.cancelled_by_id, Event.objects.count()) == (JobState.STOPPED, cast.alice.pk, count)
    assert scheduling.run_cycle().started == [] and not job.attempts.exists()


@pytest.mark.django_db(transaction=True)
def test_twenty_equal_submits_under_one_key_at_once_make_one_job() -> None:
    make_node()
    bob = accounts.create_user("bob", "correct-horse-battery")
    found = at_once(20, lambda _: jobs.submit(spec(), actor=bob, idempotency_key="k"))
    assert len({one.job.pk for one in found}) == 1 == Job.objects.count()
    assert [one.replayed for one in found].count(False) == 1


@pytest.mark.django_db(transaction=True)
def test_the_first_accounts_at_once_make_one_admin() -> None:
    people = at_once(6, lambda number: accounts.create_user(f"user{number}", "correct-horse-battery"))
    assert sum(person.is_superuser for person in people) == 1
    assert sorted(Project.objects.values_list("name", flat=True)) == [f"user{number}" for number in range(6)]


@pytest.mark.django_db(transaction=True)
def test_twenty_cycles_at_once_never_give_a_gpu_twice() -> None:
    for name in ("n1", "n2"):
        make_node(name, gpus=4)
    bob = accounts.create_user("bob", "correct-horse-battery")
    made = [submitted(bob, gpus=gpus) for gpus in (2, 1, 3, 1, 4, 2, 1)]
    results = at_once(20, lambda _: scheduling.run_cycle())
    while not all(fresh(job).state != JobState.WAITING or fresh(job).hold_code for job in made):
        results.append(scheduling.run_cycle())
    begun = [pk for result in results for pk in result.started]
    held = [row for job in made for row in job.attempts.values_list("allocations__gpu_id", flat=True)]
    assert len(begun) == len(set(begun)) and len(held) == len(set(held)) == 2 + 1 + 3 + 1
    assert all(job.attempts.count() <= 1 for job in made)


@pytest.mark.django_db(transaction=True)
def test_decisions_of_cycles_that_saw_the_same_free_gpu_cannot_both_be_carried_out() -> None:
    """As after a paused leader woke up: the lock is gone, the constraint holds."""
    make_node(gpus=2)
    bob = accounts.create_user("bob", "correct-horse-battery")
    made = [submitted(bob) for _ in range(8)]
    decisions = [Start(job.pk, (Placement("n1", (gpu_uuid("n1", number % 2),)),)) for number, job in enumerate(made)]
    done = at_once(8, lambda number: scheduling.carry_out(decisions[number]))
    assert done.count(True) == 2 == Allocation.objects.filter(released_at=None).count()
    assert Job.objects.filter(state=JobState.STARTING).count() == 2 and Job.objects.waiting().count() == 6


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("round_", range(8))
def test_a_cancel_that_races_with_the_start_ends_it_either_way(round_: int) -> None:
    make_node(gpus=1)
    bob = accounts.create_user("bob", "correct-horse-battery")
    job = submitted(bob)
    acts: list[Callable[[], object]] = [lambda: jobs.cancel(job, actor=bob), scheduling.run_cycle]
    at_once(2, lambda number: acts[(number + round_) % 2]())
    after, attempt = fresh(job), job.attempts.first()
    if attempt is None:
        assert after.state == JobState.STOPPED
    else:
        assert after.state == JobState.STOPPING and attempt.shares.get().stop_requested_at is not None
    assert scheduling.run_cycle().started == []
