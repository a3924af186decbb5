"""Machines and the GPUs in them, as their nodes reported them."""

from django.db import models
from django.utils import timezone

from wire.states import GpuState, NodeState


class Node(models.Model):
    """One machine. `state` is contact (observed); `schedulable` is permission. They never stand for each other."""

    name = models.CharField(max_length=63, unique=True)
    state = models.CharField(max_length=12, choices=[(s.value, s.value) for s in NodeState], default=NodeState.JOINING)
    state_since = models.DateTimeField(default=timezone.now)
    schedulable = models.BooleanField(default=True)
    cordon_reason = models.CharField(max_length=200, blank=True)
    enrolled_at = models.DateTimeField(auto_now_add=True)

    public_key = models.BinaryField(max_length=32)
    broker_password_sha256 = models.CharField(max_length=64)

    # From its inventory.
    inventory_digest = models.CharField(max_length=64, blank=True)
    hostname = models.CharField(max_length=253, blank=True)
    agent_version = models.CharField(max_length=40, blank=True)
    driver = models.CharField(max_length=40, blank=True)
    cuda = models.CharField(max_length=20, blank=True)
    cpu_count = models.PositiveIntegerField(null=True)
    memory_total_bytes = models.BigIntegerField(null=True)
    links = models.JSONField(default=list, blank=True)  # [[uuid, uuid, kind], …]
    nvswitch = models.BooleanField(default=False)
    nics = models.JSONField(default=list, blank=True)  # [wire.hardware.Nic as a dict]
    simulated = models.BooleanField(default=False)
    problem = models.CharField(max_length=400, blank=True)

    # From its heartbeats.
    boot_id = models.CharField(max_length=64, blank=True)
    last_heartbeat_at = models.DateTimeField(null=True)  # by the portal's clock
    heartbeat = models.JSONField(default=dict, blank=True)  # wire.reports.Heartbeat as a dict

    # The order for it.
    desired_serial = models.BigIntegerField(default=0)
    echo_nonce = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class GpuQuerySet(models.QuerySet["Gpu"]):
    def present(self) -> "GpuQuerySet":
        """What a node has now. A whole card that vanished stays in sight until it is back or somebody lets go of it."""
        missed = models.Q(parent_uuid="") & ~models.Q(state=GpuState.OK)
        return self.filter(models.Q(present=True) | missed)


class Gpu(models.Model):
    """A device or a MIG slice. Its identity is the UUID; index and PCI bus id are labels.

    Whether it is free is computed from the allocations, never stored.
    """

    uuid = models.CharField(max_length=80, unique=True)
    node = models.ForeignKey(Node, models.CASCADE, related_name="gpus")
    index = models.PositiveIntegerField()
    vendor = models.CharField(max_length=10)
    name = models.CharField(max_length=96)
    model = models.CharField(max_length=40)  # family as people write it: H100, A100, L40S, RTX-4090
    pci_bus_id = models.CharField(max_length=20, blank=True)
    memory_total_bytes = models.BigIntegerField(null=True)
    power_limit_mw = models.PositiveIntegerField(null=True)
    numa_node = models.IntegerField(null=True)
    parent_uuid = models.CharField(max_length=80, blank=True)
    mig_profile = models.CharField(max_length=20, blank=True)
    mig_enabled = models.BooleanField(default=False)  # then its slices are for jobs, not the GPU itself
    draining = models.CharField(
        max_length=200, blank=True
    )  # why it gets no new work for now, e.g. a change of its slices
    details = models.JSONField(default=dict, blank=True)  # the rest of wire.reports.GpuInfo
    hardware = models.JSONField(default=dict, blank=True)  # newest wire.hardware.GpuHardware as a dict
    state = models.CharField(max_length=12, choices=[(s.value, s.value) for s in GpuState], default=GpuState.OK)
    state_reason = models.CharField(max_length=200, blank=True)
    state_since = models.DateTimeField(default=timezone.now)
    present = models.BooleanField(default=True)  # in the newest inventory of its node
    latest = models.JSONField(default=dict, blank=True)  # newest wire.reports.GpuReading as a dict

    objects = GpuQuerySet.as_manager()

    class Meta:
        ordering = ["node__name", "index"]
        verbose_name = "GPU"

    def __str__(self) -> str:
        return f"{self.node.name} GPU {self.index}"
