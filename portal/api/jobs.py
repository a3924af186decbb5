"""Jobs: submit, list, look, cancel, and what happened to them."""

from typing import Any, Literal

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status

from portal.api.auth import user_of
from portal.api.job_answers import (
    EventPage,
    JobDetail,
    JobOut,
    JobPage,
    MetricsOut,
    event_out,
    gpu_series,
    job_detail,
    summary,
)
from portal.api.requests import allow_only, job_spec
from portal.models import JOB_ACTIVE, JOB_ENDED, Event, Job, JobState
from portal.services import access, jobs, samples
from portal.services.errors import Problem
from portal.services.specs import JobSpec

router = Router()
MAX_PAGE = 200
NAMED_STATES = {"active": JOB_ACTIVE, "ended": JOB_ENDED}


class JobFilter(Schema):
    state: JobState | Literal["active", "ended"] | None = None
    owner: str | None = None
    project: str | None = None
    name: str | None = None
    cursor: str | None = None
    limit: int = 50


@router.post(
    "",
    response={201: JobDetail, 200: JobDetail},
    url_name="job_submit",
    summary="Submit a job",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": JobSpec.model_json_schema()},
                "application/yaml": {"schema": {"type": "string"}},
            },
        }
    },
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
    return JobPage(jobs=[JobOut(**summary(job)) for job in page], next_cursor=str(page[-1].pk) if more else None)


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
        Event.objects.filter(job=job, id__gt=cursor)
        .select_related("attempt", "node", "actor")
        .order_by("id")[: limit + 1]
    )
    page = rows[:limit]
    return EventPage(
        events=[event_out(row) for row in page], next_cursor=str(page[-1].pk) if len(rows) > limit else None
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
    return MetricsOut(attempt=attempt.number, sample_count=samples.counts(attempt), gpus=gpu_series(attempt, series))


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
        raise Problem(
            400,
            "invalid_cursor",
            "cursor: take it from next_cursor of the page before.",
            errors=[{"field": "cursor", "message": "not a cursor"}],
        )
    return int(text)
