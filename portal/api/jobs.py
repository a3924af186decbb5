"""Jobs: submit, list, look, cancel, and what happened to them."""

import uuid
from datetime import datetime
from typing import Any, Literal

from django.db.models import Prefetch, QuerySet
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status

from portal.api.auth import user_of
from portal.api.requests import allow_only, job_spec
from portal.models import JOB_ACTIVE, JOB_ENDED, Allocation, Attempt, Event, Job, JobState
from portal.services import access, jobs, samples
from portal.services.errors import Problem
from portal.services.specs import JobSpec

router = Router()
MAX_PAGE = 200
NAMED_STATES = {"active": JOB_ACTIVE, "ended": JOB_ENDED}


class Reason(Schema):
    """Why a job waits or why it ended: a code for programs, a sentence for people."""

    code: str
    message: str


class Times(Schema):
    submitted_at: datetime
    allocated_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    queued_s: float | None
    starting_s: float | None
    running_s: float | None


class JobOut(Schema):
    id: int
    name: str
    project: str
    owner: str
    state: JobState
    state_since: datetime
    reason: Reason | None
    gpus: int
    exit_code: int | None
    cancel_requested_at: datetime | None
    times: Times


class HeldGpu(Schema):
    rank: int
    node: str
    uuid: str
    index: int
    model: str
    released_at: datetime | None


class RankOut(Schema):
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None


class AttemptOut(Schema):
    id: uuid.UUID
    number: int
    state: str
    reason: str | None
    message: str | None
    exit_code: int | None
    signal: int | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    running_s: float | None
    nodes: list[str]
    ranks: list[RankOut]
    allocation: list[HeldGpu]


class JobDetail(JobOut):
    spec: dict[str, Any]
    world_size: int
    allocation: list[HeldGpu]
    attempts: list[AttemptOut]


class JobPage(Schema):
    jobs: list[JobOut]
    next_cursor: str | None


class EventOut(Schema):
    id: int
    at: datetime
    kind: str
    attempt: int | None
    node: str | None
    actor: str | None
    from_state: str | None
    to_state: str | None
    reason: str | None
    message: str | None


class EventPage(Schema):
    events: list[EventOut]
    next_cursor: str | None


class GpuSeries(Schema):
    uuid: str
    node: str
    index: int
    rank: int
    at: list[float]
    utilization_percent: list[float | None]
    memory_used_bytes: list[float | None]
    power_mw: list[float | None]
    temperature_c: list[float | None]
    memory_total_bytes: int | None
    power_limit_mw: int | None


class MetricsOut(Schema):
    attempt: int | None
    sample_count: int
    gpus: list[GpuSeries]


class JobFilter(Schema):
    state: JobState | Literal["active", "ended"] | None = None
    owner: str | None = None
    project: str | None = None
    name: str | None = None
    cursor: str | None = None
    limit: int = 50


@router.post(
    "", response={201: JobDetail, 200: JobDetail}, url_name="job_submit", summary="Submit a job",
    openapi_extra={"requestBody": {"required": True, "content": {
        "application/json": {"schema": JobSpec.model_json_schema()}, "application/yaml": {"schema": {"type": "string"}}}}},
)
def submit(request: HttpRequest, response: HttpResponse) -> Any:
    """201 with the new job. With an Idempotency-Key that was used before, 200 with the job it made then."""
    allow_only(request)
    key = request.headers.get("Idempotency-Key")
    submitted = jobs.submit(job_spec(request), actor=user_of(request), idempotency_key=key)
    response["Location"] = f"/api/v1/jobs/{submitted.job.pk}"
    if submitted.replayed:
        response["Idempotent-Replayed"] = "true"
        return Status(200, job_detail(submitted.job))
    return Status(201, job_detail(submitted.job))


@router.get("", response=JobPage, url_name="job_list", summary="List jobs, newest first")
def list_jobs(request: HttpRequest, filters: Query[JobFilter]) -> JobPage:
    allow_only(request, *JobFilter.model_fields)
    limit = max(1, min(filters.limit, MAX_PAGE))
    found = list(_filtered(Job.objects.visible_to(user_of(request)), filters)[: limit + 1])
    more = len(found) > limit
    page = found[:limit]
    return JobPage(jobs=[JobOut(**_summary(job)) for job in page], next_cursor=str(page[-1].pk) if more else None)


@router.get("/{int:job_id}", response=JobDetail, url_name="job", summary="One job")
def get_job(request: HttpRequest, job_id: int) -> JobDetail:
    allow_only(request)
    return job_detail(access.get_job(user_of(request), job_id))


@router.post("/{int:job_id}/cancel", response={200: JobDetail, 202: JobDetail}, url_name="job_cancel", summary="Cancel")
def cancel(request: HttpRequest, job_id: int) -> Any:
    """202 while it is being stopped, 200 once it has ended. Repeating it changes nothing."""
    allow_only(request)
    user = user_of(request)
    job = jobs.cancel(access.get_job(user, job_id), actor=user)
    return Status(200 if job.has_ended else 202, job_detail(job))


@router.get("/{int:job_id}/events", response=EventPage, url_name="job_events", summary="What happened to a job")
def events(request: HttpRequest, job_id: int, cursor: int = 0, limit: int = 100) -> EventPage:
    allow_only(request, "cursor", "limit")
    job = access.get_job(user_of(request), job_id)
    limit = max(1, min(limit, MAX_PAGE))
    rows = list(
        Event.objects.filter(job=job, id__gt=cursor).select_related("attempt", "node", "actor").order_by("id")[: limit + 1]
    )
    page = rows[:limit]
    return EventPage(
        events=[_event(row) for row in page], next_cursor=str(page[-1].pk) if len(rows) > limit else None
    )


@router.get("/{int:job_id}/metrics", response=MetricsOut, url_name="job_metrics", summary="Telemetry of its GPUs")
def metrics(request: HttpRequest, job_id: int, since: float | None = None, points: int = 600) -> MetricsOut:
    """Columns per GPU of the newest attempt. A missing value is null, never zero."""
    allow_only(request, "since", "points")
    job = access.get_job(user_of(request), job_id)
    attempt = job.attempts.order_by("-number").first()
    if attempt is None:
        return MetricsOut(attempt=None, sample_count=0, gpus=[])
    series = samples.for_attempt(attempt, since=since, points=max(2, min(points, 5000)))
    return MetricsOut(attempt=attempt.number, sample_count=samples.counts(attempt), gpus=_series(attempt, series))


def job_detail(job: Job) -> JobDetail:
    attempts = list(job.attempts.order_by("number").prefetch_related(
        "shares__node", Prefetch("allocations", Allocation.objects.select_related("gpu__node").order_by("rank"))
    ))
    newest = attempts[-1] if attempts else None
    gpus = [_held(allocation) for allocation in newest.allocations.all()] if newest else []
    return JobDetail(
        **_summary(job), spec=job.spec, world_size=max(1, job.gpu_count), allocation=gpus,
        attempts=[_attempt(attempt) for attempt in attempts],
    )


def _filtered(found: QuerySet[Job], filters: JobFilter) -> QuerySet[Job]:
    if filters.state:
        found = found.filter(state__in=NAMED_STATES.get(filters.state, {filters.state}))
    if filters.owner:
        found = found.filter(owner__username=filters.owner)
    if filters.project:
        found = found.filter(project__name=filters.project)
    if filters.name:
        found = found.filter(name__icontains=filters.name)
    if filters.cursor:
        found = found.filter(pk__lt=_cursor(filters.cursor))
    return found.select_related("owner", "project").order_by("-pk")


def _cursor(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Problem(400, "invalid_cursor", "cursor: take it from next_cursor of the page before.",
                      errors=[{"field": "cursor", "message": "not a cursor"}])
    return int(text)


def _summary(job: Job) -> dict[str, Any]:
    return {
        "id": job.pk, "name": job.name, "project": job.project.name, "owner": job.owner.username, "state": job.state,
        "state_since": job.state_since, "reason": _reason(job), "gpus": job.gpu_count, "exit_code": job.exit_code,
        "cancel_requested_at": job.cancel_requested_at, "times": _times(job),
    }


def _reason(job: Job) -> Reason | None:
    code, message = (job.end_code, job.end_message) if job.has_ended else (job.hold_code, job.hold_message)
    return Reason(code=code, message=message) if code else None


def _times(job: Job) -> Times:
    def between(start: datetime | None, end: datetime | None) -> float | None:
        return round((end - start).total_seconds(), 3) if start and end else None

    return Times(
        submitted_at=job.submitted_at, allocated_at=job.allocated_at, started_at=job.started_at, ended_at=job.ended_at,
        queued_s=between(job.submitted_at, job.allocated_at), starting_s=between(job.allocated_at, job.started_at),
        running_s=between(job.started_at, job.ended_at),
    )


def _attempt(attempt: Attempt) -> AttemptOut:
    shares = list(attempt.shares.all())
    ranks = [RankOut(**{name: rank.get(name) for name in RankOut.model_fields}) for share in shares for rank in share.ranks]
    return AttemptOut(
        id=attempt.pk, number=attempt.number, state=attempt.state, reason=attempt.reason or None,
        message=attempt.message or None, exit_code=attempt.exit_code, signal=attempt.signal,
        created_at=attempt.created_at, started_at=attempt.started_at, ended_at=attempt.ended_at,
        running_s=attempt.running_s, nodes=[share.node.name for share in shares], ranks=ranks,
        allocation=[_held(allocation) for allocation in attempt.allocations.all()],
    )


def _held(allocation: Allocation) -> HeldGpu:
    gpu = allocation.gpu
    return HeldGpu(rank=allocation.rank, node=gpu.node.name, uuid=gpu.uuid, index=gpu.index, model=gpu.model,
                   released_at=allocation.released_at)


def _event(event: Event) -> EventOut:
    return EventOut(
        id=event.pk, at=event.at, kind=event.kind, attempt=event.attempt.number if event.attempt else None,
        node=event.node.name if event.node else None, actor=event.actor.username if event.actor else None,
        from_state=event.from_state or None, to_state=event.to_state or None, reason=event.reason or None,
        message=event.message or None,
    )


def _series(attempt: Attempt, series: samples.Series) -> list[GpuSeries]:
    held = attempt.allocations.select_related("gpu__node").order_by("rank")
    means = {gpu.uuid: gpu.mean for gpu in series.gpus}
    columns = ("utilization_percent", "memory_used_bytes", "power_mw", "temperature_c")
    return [
        GpuSeries(
            uuid=item.gpu.uuid, node=item.gpu.node.name, index=item.gpu.index, rank=item.rank,
            memory_total_bytes=item.gpu.memory_total_bytes, power_limit_mw=item.gpu.power_limit_mw,
            at=series.at, **{name: means[item.gpu.uuid][name] for name in columns},
        )
        for item in held
    ]
