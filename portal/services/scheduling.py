"""The only caller of the scheduler: reads a snapshot, lets it decide, and carries each decision out by itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from django.db import DatabaseError, IntegrityError, connection, transaction
from django.utils import timezone

from portal.celery import CONTROL_QUEUE, CYCLE_TASK, sender
from portal.models import Job, JobState
from portal.scheduler.cycle import decide
from portal.scheduler.decisions import Decision, Hold, Start
from portal.scheduler.snapshot import JobRequest, Snapshot
from portal.services import broker, capacity, live, specs, starting
from portal.services.errors import Problem
from portal.services.retrying import on_deadlock
from portal.services.transitions import Conflict

CYCLE_LOCK = 7_305_002
"""Advisory lock of PostgreSQL: one cycle at a time, whoever runs it. It ends with its holder's connection."""

WAKE_KEY = "control.wake"
WAKE_LASTS_MS = 2000
RETRY_AFTER_S = 5.0
REMEMBERED = 50_000
COLUMNS = ("spec", "submitted_at", "state", "state_since", "hold_code", "hold_message")

log = logging.getLogger(__name__)
REQUESTS: dict[tuple[int, datetime], JobRequest] = {}
"""What a job asks for never changes, and reading a specification is the dearest part of a snapshot."""


@dataclass
class CycleResult:
    busy: bool = False  # another cycle was running
    started: list[int] = field(default_factory=list)
    held: int = 0  # jobs that still wait
    changed: int = 0  # of them, those whose reason is a new one


def run_cycle() -> CycleResult:
    with cycle_lock() as mine:
        if not mine:
            return CycleResult(busy=True)
        now = timezone.now()
        waiting = {job.pk: job for job in Job.objects.waiting().order_by("pk").only(*COLUMNS)}
        result = CycleResult()
        if not waiting:
            return result
        decisions = decide(snapshot(waiting), now.timestamp())
        result.started = [one.job for one in decisions if isinstance(one, Start) and carry_out(one)]
        holds = [one for one in decisions if isinstance(one, Hold)]
        result.held, result.changed = len(holds), store(holds, waiting)
        return result


def wake() -> None:
    """Once this transaction has committed, a cycle should look. Many wakes at once become one."""
    transaction.on_commit(partial(broker.attempt, "a wake-up of the scheduler", send_wake), robust=True)


def woken() -> None:
    """A cycle begins: whoever commits from here on must wake it again."""
    broker.attempt("the end of a wake-up", partial(broker.client().delete, WAKE_KEY))


def would_start(spec: specs.JobSpec) -> Decision:
    """What would happen to this draft if it were submitted now: behind all who wait already."""
    waiting = {job.pk: job for job in Job.objects.waiting().order_by("pk").only(*COLUMNS)}
    seen = snapshot(waiting)
    draft = Snapshot((*seen.jobs, spec.request(0)), seen.nodes)
    return decide(draft, timezone.now().timestamp())[-1]


# --- helpers ----------------------------------------------------------------------------------------------------------


def send_wake() -> None:
    if broker.client().set(WAKE_KEY, 1, nx=True, px=WAKE_LASTS_MS):
        sender.send_task(CYCLE_TASK, queue=CONTROL_QUEUE, retry=False, ignore_result=True)


@contextmanager
def cycle_lock() -> Iterator[bool]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [CYCLE_LOCK])
        mine = bool(cursor.fetchone()[0])
    try:
        yield mine
    finally:
        if mine:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [CYCLE_LOCK])


def snapshot(waiting: dict[int, Job]) -> Snapshot:
    requests = [request for job in waiting.values() if (request := request_of(job)) is not None]
    return Snapshot(tuple(requests), tuple(capacity.node_views()))


def request_of(job: Job) -> JobRequest | None:
    """-> what it asks for. None if this version cannot read its specification: one bad row must not stop the queue."""
    key = (job.pk, job.submitted_at)
    if key not in REQUESTS:
        if len(REQUESTS) >= REMEMBERED:
            REQUESTS.clear()
        try:
            REQUESTS[key] = specs.parse(job.spec).request(job.pk)
        except Problem as problem:
            log.error("Job %s cannot be scheduled, its specification is not understood: %s", job.pk, problem.detail)
            return None
    return postponed(job, REQUESTS[key])


def postponed(job: Job, request: JobRequest) -> JobRequest:
    """A job that was lost waits a moment before its next try."""
    if job.hold_code != "wait_retry":
        return request
    return replace(request, not_before=job.state_since.timestamp() + RETRY_AFTER_S)


def carry_out(start: Start) -> bool:
    """-> whether it was started. Whoever was faster (a cancel, another cycle, a cordon) wins."""
    try:
        return on_deadlock(partial(starting.start, start))
    except (IntegrityError, Conflict) as error:
        log.info("Job %s was not started: %s", start.job, error)
    except (DatabaseError, Problem):
        log.exception("Job %s could not be started.", start.job)
    return False


def store(holds: list[Hold], waiting: dict[int, Job]) -> int:
    """«Why is it waiting» is data. Written only where it changed, in one statement."""
    changed = []
    for hold in holds:
        job = waiting[hold.job]
        if (job.hold_code, job.hold_message) != (hold.code, hold.message[:400]):
            job.hold_code, job.hold_message = hold.code, hold.message[:400]
            changed.append(job)
    if changed:
        Job.objects.filter(state=JobState.WAITING).bulk_update(changed, ["hold_code", "hold_message"], batch_size=5000)
        live.notify_all([live.CLUSTER, *(live.job_channel(job.pk) for job in changed)], "hold")
    return len(changed)
