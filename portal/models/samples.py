"""Telemetry. One row holds a stretch of time of a whole node: never a row per sample."""

from django.db import models

from portal.models.nodes import Node


class SampleBlock(models.Model):
    """Samples of a node's GPUs between two moments, as they were read: raw, for a quarter of an hour.

    `payload` is msgpack of {gpu uuid: [row, …]}, a row being what `services.raw.Sample` names, in its order.
    """

    node = models.ForeignKey(Node, models.CASCADE, related_name="sample_blocks")
    started_at = models.FloatField()  # seconds since the epoch, the node's clock
    ended_at = models.FloatField()
    payload = models.BinaryField()

    class Meta:
        ordering = ["node", "started_at"]
        indexes = [
            models.Index(fields=["node", "ended_at", "started_at"], name="sample_block_time"),
            models.Index(fields=["started_at"], name="sample_block_age"),
        ]

    def __str__(self) -> str:
        return f"{self.node} {self.started_at:.0f}–{self.ended_at:.0f}"


class Rollup(models.Model):
    """What became of the samples: buckets of `step_s`, a row per node and span. `services.rollups` reads the payload.

    The table is partitioned by step and time, so that what is past its time goes as a whole partition.
    """

    pk = models.CompositePrimaryKey("step_s", "node_id", "started_at")
    step_s = models.PositiveIntegerField()
    # No constraint: every new partition would otherwise lock the table of nodes.
    node = models.ForeignKey(Node, models.CASCADE, related_name="rollups", db_constraint=False, db_index=False)
    started_at = models.BigIntegerField()  # seconds since the epoch
    payload = models.BinaryField()

    def __str__(self) -> str:
        return f"{self.node} {self.step_s} s from {self.started_at}"
