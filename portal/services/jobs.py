"""Submitting and cancelling: what people do with jobs."""

import hashlib
import json
from dataclasses import dataclass
from functools import partial

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from portal.models import JOB_ENDED, IdempotencyKey, Job, JobState, Project, User
from portal.services import access, attempts, events, live, scheduling, transitions
from portal.services.errors import Problem, field_problem
from portal.services.retrying import on_deadlock
from portal.services.specs import JobSpec, check_satisfiable

MAX_KEY = 200
RETRY_AFTER_S = "60"


@dataclass(frozen=True)
class Submitted:
    job: Job
    replayed: bool  # the key was used before: this is the job it made then


def submit(spec: JobSpec, *, actor: User, idempotency_key: str | None = None) -> Submitted:
    """Raises Problem. With a key, the same request makes one job however often and however concurrently it is sent."""
    if idempotency_key is None:
        return Submitted(create(spec, actor, None), replayed=False)
    check_key(idempotency_key)
    known = replay(spec, actor, idempotency_key)
    if known is not None:
        return known
    try:
        return Submitted(create(spec, actor, idempotency_key), replayed=False)
    except IntegrityError:
        known = replay(spec, actor, idempotency_key)  # somebody sent the same at the same time and was first
        if known is None:
            raise
        return known


def cancel(job: Job, *, actor: User | None) -> Job:
    """Legal in every state, and repeatable. A run that ends by itself before the stop reaches it keeps its result."""
    return on_deadlock(partial(cancel_once, job.pk, actor))


# --- helpers ----------------------------------------------------------------------------------------------------------


@transaction.atomic
def create(spec: JobSpec, actor: User, key: str | None) -> Job:
    project = project_for(spec, actor)
    check_satisfiable(spec)
    check_pending(actor)
    stored = spec.stored()
    job = Job.objects.create(
        owner=actor, project=project, name=spec.title, spec=stored, gpu_count=spec.resources.gpus
    )
    if key is not None:
        IdempotencyKey.objects.create(user=actor, key=key, body_sha256=digest(spec), job=job)
    events.record("job.submitted", job=job, actor=actor, to_state=JobState.WAITING)
    live.notify_all([live.CLUSTER, live.job_channel(job.pk)], "job", id=job.pk, state=JobState.WAITING.value)
    scheduling.wake()
    return job


@transaction.atomic
def cancel_once(job_id: int, actor: User | None) -> Job:
    job = Job.objects.select_for_update(of=("self",)).select_related("owner", "project").get(pk=job_id)
    if JobState(job.state) in JOB_ENDED or job.cancel_requested_at is not None:
        return job
    asked = {"cancel_requested_at": timezone.now(), "cancelled_by": actor}
    message = f"Stopped by {actor.username if actor else 'the portal'}."
    if job.state == JobState.WAITING:
        ended = {"ended_at": timezone.now(), "end_code": "end_stop_requested", "end_message": message}
        transitions.move(
            job, JobState.STOPPED, reason="end_stop_requested", message=message, actor=actor,
            hold_code="", hold_message="", **asked, **ended,
        )
    else:
        transitions.move(job, JobState.STOPPING, reason="stop_requested", message=message, actor=actor, **asked)
        attempt = job.attempts.order_by("-number").first()
        if attempt is not None:
            attempts.request_stop(attempt)
    scheduling.wake()
    return job


def check_key(key: str) -> None:
    if not 0 < len(key) <= MAX_KEY or not key.isprintable():
        raise field_problem(400, "invalid", "Idempotency-Key", f"between 1 and {MAX_KEY} printable characters.")


def replay(spec: JobSpec, actor: User, key: str) -> Submitted | None:
    known = IdempotencyKey.objects.select_related("job__owner", "job__project").filter(user=actor, key=key).first()
    if known is None:
        return None
    if known.body_sha256 != digest(spec):
        detail = f"This Idempotency-Key already made job {known.job_id} from another request. Use a new key."
        raise Problem(422, "idempotency_key_reused", detail)
    return Submitted(known.job, replayed=True)


def digest(spec: JobSpec) -> str:
    """Two ways to write the same specification count as the same request."""
    return hashlib.sha256(json.dumps(spec.stored(), sort_keys=True).encode()).hexdigest()


def project_for(spec: JobSpec, actor: User) -> Project:
    if spec.project is None:
        return actor.personal_project
    try:
        return access.get_project(actor, spec.project)
    except Problem as problem:
        mine = ", ".join(Project.objects.visible_to(actor).values_list("name", flat=True)[:10])
        message = f"you are in no project of this name, only in: {mine}."
        raise field_problem(400, "invalid_spec", "project", message) from problem


def check_pending(actor: User) -> None:
    limit = settings.MAX_PENDING_JOBS_PER_USER
    if Job.objects.waiting().filter(owner=actor).count() >= limit:
        detail = f"You already have {limit} waiting jobs, which is the limit. Submit again when some have started."
        raise Problem(429, "pending_limit", detail, headers={"Retry-After": RETRY_AFTER_S})
