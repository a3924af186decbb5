"""Where the log bytes of an attempt are. The bytes themselves lie in files, never in the database."""

from django.db import models

from portal.models.jobs import Attempt


class LogStream(models.Model):
    """One rank's output. The file is `{LOG_ROOT}/{attempt}/{name}.log`; `size_bytes` of it are durable."""

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="log_streams")
    name = models.CharField(max_length=40)  # rank-<n> or launcher
    size_bytes = models.BigIntegerField(default=0)
    final_bytes = models.BigIntegerField(null=True)  # known once the node reported the end
    dropped = models.JSONField(default=list, blank=True)  # [[from, to], …] bytes that can never come
    line_count = models.BigIntegerField(default=0)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["attempt", "name"]
        constraints = [models.UniqueConstraint(fields=["attempt", "name"], name="log_stream_once")]

    def __str__(self) -> str:
        return f"{self.attempt} {self.name}"

    @property
    def complete(self) -> bool:
        return self.final_bytes is not None and self.size_bytes >= self.final_bytes
