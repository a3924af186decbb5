"""What happened to the hardware, and what nodes are told to do with it."""

import uuid

from django.db import models
from django.utils import timezone

from portal.models.accounts import User
from portal.models.nodes import Gpu, Node


class Health(models.Model):
    """A health event of a GPU or a node, with what it means. Open until it is resolved."""

    class Severity(models.TextChoices):
        INFO = "info"
        WARNING = "warning"
        CRITICAL = "critical"

    node = models.ForeignKey(Node, models.CASCADE, related_name="health")
    gpu = models.ForeignKey(Gpu, models.CASCADE, null=True, related_name="health")
    key = models.CharField(max_length=120)  # the same key is the same event
    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=20)
    code = models.IntegerField(null=True)
    severity = models.CharField(max_length=10, choices=Severity.choices)
    message = models.CharField(max_length=400)
    meaning = models.CharField(max_length=400, blank=True)
    advice = models.CharField(max_length=400, blank=True)
    source = models.CharField(max_length=20, blank=True)
    count = models.PositiveIntegerField(default=1)
    resolved_at = models.DateTimeField(null=True)
    resolved_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")

    class Meta:
        ordering = ["-at"]
        verbose_name_plural = "health events"
        constraints = [models.UniqueConstraint(fields=["node", "key"], name="health_event_once")]
        indexes = [models.Index(fields=["node", "-at"], name="health_node")]

    def __str__(self) -> str:
        return self.message


class HardwareOrder(models.Model):
    """Something a node is told to do with its hardware, carried out once."""

    class State(models.TextChoices):
        WAITING = "waiting"  # for the GPU to be free of jobs
        SENT = "sent"  # stands in the node's desired state
        RUNNING = "running"
        DONE = "done"
        FAILED = "failed"
        UNDONE = "undone"  # failed, and what was before is back
        CANCELLED = "cancelled"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(Node, models.CASCADE, related_name="orders")
    gpu = models.ForeignKey(Gpu, models.CASCADE, null=True, related_name="orders")
    kind = models.CharField(max_length=20)  # mig | release | stop_foreign
    order = models.JSONField()  # wire.hardware.Order as a dict
    state = models.CharField(max_length=10, choices=State.choices, default=State.WAITING)
    message = models.CharField(max_length=400, blank=True)
    requested_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    requested_at = models.DateTimeField(default=timezone.now)
    sent_at = models.DateTimeField(null=True)
    answered_at = models.DateTimeField(null=True)  # the node said how it went
    finished_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-requested_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["gpu"], condition=models.Q(kind="mig", finished_at=None), name="one_open_mig_order_per_gpu"
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} on {self.node}"
