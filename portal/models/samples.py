"""Telemetry. One row holds a stretch of time of a whole node: never a row per sample."""

from django.db import models

from portal.models.nodes import Node


class SampleBlock(models.Model):
    """Samples of a node's GPUs between two moments.

    `payload` is msgpack of {gpu uuid: {"at": [s], "utilization_percent": [%|None], "memory_used_bytes": [B|None],
    "power_mw": [mW|None], "temperature_c": [°C|None], "sm_clock_mhz": [MHz|None]}}, the lists of one GPU equally long.
    """

    node = models.ForeignKey(Node, models.CASCADE, related_name="sample_blocks")
    started_at = models.FloatField()  # seconds since the epoch, the node's clock
    ended_at = models.FloatField()
    payload = models.BinaryField()

    class Meta:
        ordering = ["node", "started_at"]
        indexes = [models.Index(fields=["node", "ended_at", "started_at"], name="sample_block_time")]

    def __str__(self) -> str:
        return f"{self.node} {self.started_at:.0f}–{self.ended_at:.0f}"
