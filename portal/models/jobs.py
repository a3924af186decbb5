"""What people asked for, the tries at it, and what those tries hold."""

import uuid

from django.db import models
from django.utils import timezone

from portal.models.accounts import Project, User
from portal.models.nodes import Gpu, Node
from wire.states import ATTEMPT_ENDED, AttemptState


class JobState(models.TextChoices):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


_J = JobState
JOB_MOVES: dict[JobState, frozenset[JobState]] = {
    _J.WAITING: frozenset({_J.STARTING, _J.STOPPED, _J.FAILED}),
    # Back to waiting: the attempt was lost or could not start, and a retry is left.
    _J.STARTING: frozenset({_J.RUNNING, _J.STOPPING, _J.SUCCEEDED, _J.FAILED, _J.STOPPED, _J.WAITING}),
    _J.RUNNING: frozenset({_J.STOPPING, _J.SUCCEEDED, _J.FAILED, _J.STOPPED, _J.WAITING}),
    _J.STOPPING: frozenset({_J.SUCCEEDED, _J.FAILED, _J.STOPPED}),
    _J.SUCCEEDED: frozenset(),
    _J.FAILED: frozenset(),
    _J.STOPPED: frozenset(),
}
JOB_ENDED = frozenset(state for state, moves in JOB_MOVES.items() if not moves)
JOB_ACTIVE = frozenset({_J.STARTING, _J.RUNNING, _J.STOPPING})


class JobQuerySet(models.QuerySet["Job"]):
    def visible_to(self, user: User) -> "JobQuerySet":
        """Own jobs, and those of the projects one is a member of; an admin sees all."""
        if user.is_superuser:
            return self
        return self.filter(models.Q(owner=user) | models.Q(project__memberships__user=user)).distinct()

    def waiting(self) -> "JobQuerySet":
        return self.filter(state=JobState.WAITING)

    def active(self) -> "JobQuerySet":
        return self.filter(state__in=JOB_ACTIVE)

    def ended(self) -> "JobQuerySet":
        return self.filter(state__in=JOB_ENDED)


class Job(models.Model):
    """What a person asked for; lives through retries. `spec` is the validated request, as services.specs wrote it."""

    owner = models.ForeignKey(User, models.PROTECT, related_name="jobs")
    project = models.ForeignKey(Project, models.PROTECT, related_name="jobs")
    name = models.CharField(max_length=200)
    spec = models.JSONField()
    gpu_count = models.PositiveIntegerField()
    state = models.CharField(max_length=12, choices=JobState.choices, default=JobState.WAITING)
    state_since = models.DateTimeField(default=timezone.now)

    # Why it waits (wait_…) or why it ended (end_…): a code for programs, a sentence for people.
    hold_code = models.CharField(max_length=40, blank=True)
    hold_message = models.CharField(max_length=400, blank=True)
    end_code = models.CharField(max_length=40, blank=True)
    end_message = models.CharField(max_length=600, blank=True)
    exit_code = models.IntegerField(null=True)

    submitted_at = models.DateTimeField(default=timezone.now)
    allocated_at = models.DateTimeField(null=True)  # of the newest attempt
    started_at = models.DateTimeField(null=True)  # its first process existed
    ended_at = models.DateTimeField(null=True)
    cancel_requested_at = models.DateTimeField(null=True)
    cancelled_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")

    objects = JobQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["state", "id"], name="job_state"),
            models.Index(fields=["owner", "state", "-id"], name="job_owner"),
            models.Index(fields=["project", "state", "-id"], name="job_project"),
        ]

    def __str__(self) -> str:
        return f"{self.name} #{self.pk}"

    @property
    def has_ended(self) -> bool:
        return JobState(self.state) in JOB_ENDED


class Attempt(models.Model):
    """One try on fixed GPUs. `number` is the fencing number: it only grows within a job."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    job = models.ForeignKey(Job, models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    state = models.CharField(
        max_length=12, choices=[(s.value, s.value) for s in AttemptState], default=AttemptState.PENDING
    )
    state_since = models.DateTimeField(default=timezone.now)
    created_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    reason = models.CharField(max_length=30, blank=True)  # wire.states.EndReason
    exit_code = models.IntegerField(null=True)
    signal = models.IntegerField(null=True)
    message = models.CharField(max_length=600, blank=True)
    running_s = models.FloatField(null=True)  # by the node's monotonic clock

    class Meta:
        ordering = ["job", "number"]
        constraints = [models.UniqueConstraint(fields=["job", "number"], name="attempt_number_once")]

    def __str__(self) -> str:
        return f"job {self.job_id} attempt {self.number}"

    @property
    def has_ended(self) -> bool:
        return AttemptState(self.state) in ATTEMPT_ENDED


class Share(models.Model):
    """One node's part of an attempt: what it is told to launch and what it reported."""

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="shares")
    node = models.ForeignKey(Node, models.PROTECT, related_name="shares")
    node_rank = models.PositiveIntegerField(default=0)
    first_rank = models.PositiveIntegerField(default=0)
    rank_count = models.PositiveIntegerField(default=1)
    launch = models.JSONField()  # wire.desired.Launch as a dict
    state = models.CharField(
        max_length=12, choices=[(s.value, s.value) for s in AttemptState], default=AttemptState.PENDING
    )
    event_seq = models.PositiveIntegerField(default=0)  # durable high-water mark of its events
    reason = models.CharField(max_length=30, blank=True)
    exit_code = models.IntegerField(null=True)
    signal = models.IntegerField(null=True)
    message = models.CharField(max_length=600, blank=True)
    ranks = models.JSONField(default=list, blank=True)  # [wire.reports.RankExit as a dict]
    stop_requested_at = models.DateTimeField(null=True)
    forgotten_at = models.DateTimeField(null=True)  # the node was told that it may delete its spool

    class Meta:
        ordering = ["attempt", "node_rank"]
        constraints = [models.UniqueConstraint(fields=["attempt", "node"], name="share_node_once")]
        indexes = [models.Index(fields=["node", "forgotten_at"], name="share_open")]

    def __str__(self) -> str:
        return f"{self.attempt} on {self.node}"


class Allocation(models.Model):
    """A GPU held by an attempt, from when to when. Two active ones for a GPU cannot exist, whatever the code does."""

    gpu = models.ForeignKey(Gpu, models.PROTECT, related_name="allocations")
    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="allocations")
    rank = models.PositiveIntegerField()
    allocated_at = models.DateTimeField(default=timezone.now)
    released_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["attempt", "rank"]
        constraints = [
            models.UniqueConstraint(
                fields=["gpu"], condition=models.Q(released_at__isnull=True), name="one_active_allocation_per_gpu"
            ),
            models.UniqueConstraint(fields=["attempt", "gpu"], name="gpu_once_per_attempt"),
        ]

    def __str__(self) -> str:
        return f"{self.gpu} for {self.attempt}"


class IdempotencyKey(models.Model):
    """One submit by one user under one key, so that a repeated request finds the job it made."""

    user = models.ForeignKey(User, models.CASCADE, related_name="+")
    key = models.CharField(max_length=200)
    body_sha256 = models.CharField(max_length=64)
    job = models.ForeignKey(Job, models.CASCADE, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "key"], name="idempotency_key_once")]

    def __str__(self) -> str:
        return self.key
