"""What the API says of a job: shapes, and how they are filled from rows."""

import uuid
from datetime import datetime
from typing import Any

from django.db.models import Prefetch
from ninja import Schema

from portal.models import Allocation, Attempt, Event, Job, JobState
from portal.services import samples


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


def job_detail(job: Job) -> JobDetail:
    attempts = list(
        job.attempts.order_by("number").prefetch_related(
            "shares__node", Prefetch("allocations", Allocation.objects.select_related("gpu__node").order_by("rank"))
        )
    )
    newest = attempts[-1] if attempts else None
    gpus = [_held(allocation) for allocation in newest.allocations.all()] if newest else []
    return JobDetail(
        **summary(job),
        spec=job.spec,
        world_size=max(1, job.gpu_count),
        allocation=gpus,
        attempts=[_attempt(attempt) for attempt in attempts],
    )


def summary(job: Job) -> dict[str, Any]:
    return {
        "id": job.pk,
        "name": job.name,
        "project": job.project.name,
        "owner": job.owner.username,
        "state": job.state,
        "state_since": job.state_since,
        "reason": _reason(job),
        "gpus": job.gpu_count,
        "exit_code": job.exit_code,
        "cancel_requested_at": job.cancel_requested_at,
        "times": _times(job),
    }


def _reason(job: Job) -> Reason | None:
    code, message = (job.end_code, job.end_message) if job.has_ended else (job.hold_code, job.hold_message)
    return Reason(code=code, message=message) if code else None


def _times(job: Job) -> Times:
    def between(start: datetime | None, end: datetime | None) -> float | None:
        return round((end - start).total_seconds(), 3) if start and end else None

    return Times(
        submitted_at=job.submitted_at,
        allocated_at=job.allocated_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        queued_s=between(job.submitted_at, job.allocated_at),
        starting_s=between(job.allocated_at, job.started_at),
        running_s=between(job.started_at, job.ended_at),
    )


def _attempt(attempt: Attempt) -> AttemptOut:
    shares = list(attempt.shares.all())
    ranks = [
        RankOut(**{name: rank.get(name) for name in RankOut.model_fields}) for share in shares for rank in share.ranks
    ]
    return AttemptOut(
        id=attempt.pk,
        number=attempt.number,
        state=attempt.state,
        reason=attempt.reason or None,
        message=attempt.message or None,
        exit_code=attempt.exit_code,
        signal=attempt.signal,
        created_at=attempt.created_at,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        running_s=attempt.running_s,
        nodes=[share.node.name for share in shares],
        ranks=ranks,
        allocation=[_held(allocation) for allocation in attempt.allocations.all()],
    )


def _held(allocation: Allocation) -> HeldGpu:
    gpu = allocation.gpu
    return HeldGpu(
        rank=allocation.rank,
        node=gpu.node.name,
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        released_at=allocation.released_at,
    )


def event_out(event: Event) -> EventOut:
    return EventOut(
        id=event.pk,
        at=event.at,
        kind=event.kind,
        attempt=event.attempt.number if event.attempt else None,
        node=event.node.name if event.node else None,
        actor=event.actor.username if event.actor else None,
        from_state=event.from_state or None,
        to_state=event.to_state or None,
        reason=event.reason or None,
        message=event.message or None,
    )


def gpu_series(attempt: Attempt, series: samples.Series) -> list[GpuSeries]:
    held = attempt.allocations.select_related("gpu__node").order_by("rank")
    means = {gpu.uuid: gpu.mean for gpu in series.gpus}
    columns = ("utilization_percent", "memory_used_bytes", "power_mw", "temperature_c")
    return [
        GpuSeries(
            uuid=item.gpu.uuid,
            node=item.gpu.node.name,
            index=item.gpu.index,
            rank=item.rank,
            memory_total_bytes=item.gpu.memory_total_bytes,
            power_limit_mw=item.gpu.power_limit_mw,
            at=series.at,
            **{name: means[item.gpu.uuid][name] for name in columns},
        )
        for item in held
    ]
