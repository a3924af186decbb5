"""How the GPUs were over time: of one GPU, of a node, or of a job."""

import re
import time
from dataclasses import replace
from datetime import UTC, datetime

from django.http import HttpRequest
from ninja import Router, Schema

from portal.api.auth import user_of
from portal.api.requests import allow_only
from portal.models import Gpu, Job, User
from portal.services import access, history
from portal.services.errors import field_problem
from portal.services.history import Window
from portal.services.samples import CLOCK_AHEAD_S, Span, spans_of

router = Router()
HOUR_S = 3600.0
STEP = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(s|m|h|d)?")
SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class GpuColumns(Schema):
    """Columns on the shared `at`; null is a gap. `total` is there for counters alone: what was used in the step."""

    uuid: str
    node: str
    index: int
    rank: int | None
    attempt: int | None
    min: list[float | None]
    mean: list[float | None]
    max: list[float | None]
    count: list[int]
    total: list[float | None] | None


class QueryOut(Schema):
    """`resolution_s`: what it was made from; 1 is every sample. A `step` below it was raised to it."""

    metric: str
    step_s: float
    resolution_s: float
    at: list[float]
    gpus: list[GpuColumns]


Asked = list[tuple[Span, int | None]]  # with the number of the attempt


@router.get("/query", response=QueryOut, url_name="metrics_query", summary="A metric of GPUs over time")
def query(
    request: HttpRequest, metric: str, gpu: str | None = None, node: str | None = None, job: int | None = None,
    step: str | None = None,
) -> QueryOut:  # fmt: skip
    """One of `gpu`, `node` and `job`. `from` and `to`: seconds since the epoch or ISO 8601, the last hour unless told
    otherwise, of a job its whole life. `step`: seconds, or such as 30s, 5m, 1h."""
    allow_only(request, "metric", "gpu", "node", "job", "step", "from", "to")
    asked = asked_of(user_of(request), gpu, node, job)
    window = window_of(request, asked if job is not None else [], step)
    spans = [
        replace(span, since=max(span.since, window.since), until=min(span.until, window.until)) for span, _ in asked
    ]
    answer = history.query(spans, metric, window)
    return QueryOut(
        metric=metric, step_s=answer.step_s, resolution_s=answer.resolution_s, at=answer.at,
        gpus=[columns(one, attempt) for one, (_, attempt) in zip(answer.spans, asked, strict=True)],
    )  # fmt: skip


def columns(one: history.SpanAnswer, attempt: int | None) -> GpuColumns:
    gpu = one.span.gpu
    return GpuColumns(
        uuid=gpu.uuid, node=gpu.node.name, index=gpu.index, rank=one.span.rank, attempt=attempt,
        min=one.least, mean=one.mean, max=one.most, count=one.count, total=one.total,
    )  # fmt: skip


# --- what is asked for ------------------------------------------------------------------------------------------------
def asked_of(user: User, gpu: str | None, node: str | None, job: int | None) -> Asked:
    if sum(one is not None for one in (gpu, node, job)) != 1:
        raise field_problem(400, "invalid", "gpu", "name exactly one of gpu, node and job.")
    if job is not None:
        return of_job(access.get_job(user, job))
    if gpu is not None:
        gpus = [access.get_gpu(user, gpu)]
    else:
        own = Gpu.objects.present().filter(node=access.get_node(user, node or ""))
        gpus = list(own.select_related("node"))
    return [(Span(one, 0.0, float("inf")), None) for one in gpus]


def of_job(job: Job) -> Asked:
    """Every attempt, each with the GPUs that it held while it held them."""
    return [(span, attempt.number) for attempt in job.attempts.order_by("number") for span in spans_of(attempt)]


def window_of(request: HttpRequest, job_spans: Asked, step: str | None) -> Window:
    now = time.time()
    since, until = moment(request, "from"), moment(request, "to")
    if until is None:
        until = max((span.until for span, _ in job_spans), default=now)
    until = min(until, now + CLOCK_AHEAD_S)
    if since is None:
        since = min((span.since for span, _ in job_spans), default=until - HOUR_S)
        until = max(until, since + 1) if job_spans else until  # a job that held its GPUs for no time at all
    return Window(since, until, step_of(step))


def moment(request: HttpRequest, name: str) -> float | None:
    text = request.GET.get(name)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        # A plus that was not encoded in the address arrives as a space.
        found = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    except ValueError:
        message = f"{text[:40]!r} is no time. Write seconds since the epoch or such as 2026-11-30T12:00:00Z."
        raise field_problem(400, "invalid", name, message) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def step_of(text: str | None) -> float | None:
    if text is None:
        return None
    found = STEP.fullmatch(text.strip())
    if not found:
        raise field_problem(400, "invalid", "step", f"{text[:40]!r} is no length of time. Write such as 30s, 5m or 1h.")
    return float(found[1]) * SECONDS[found[2]]
