"""What happened, in order: written in the same transaction as the change it tells of, never edited."""

from django.db import models
from django.utils import timezone

from portal.models.accounts import User
from portal.models.jobs import Attempt, Job
from portal.models.nodes import Gpu, Node


class Event(models.Model):
    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=40)  # job.state, attempt.state, node.state, gpu.state, node.rejected, …
    job = models.ForeignKey(Job, models.CASCADE, null=True, related_name="events")
    attempt = models.ForeignKey(Attempt, models.CASCADE, null=True, related_name="events")
    node = models.ForeignKey(Node, models.CASCADE, null=True, related_name="events")
    gpu = models.ForeignKey(Gpu, models.CASCADE, null=True, related_name="events")
    actor = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    from_state = models.CharField(max_length=12, blank=True)
    to_state = models.CharField(max_length=12, blank=True)
    reason = models.CharField(max_length=40, blank=True)
    message = models.CharField(max_length=600, blank=True)

    class Meta:
        ordering = ["id"]
        indexes = [
            models.Index(fields=["job", "id"], name="event_job"),
            models.Index(fields=["node", "id"], name="event_node"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.to_state}".strip()
