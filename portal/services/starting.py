"""Carrying out the decision to start: attempt, shares, allocations and the order to the nodes, all or nothing."""

from dataclasses import dataclass
from typing import Any

import msgspec
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, Subquery
from django.utils import timezone

from portal.models import Allocation, Attempt, Gpu, Job, JobState, Node, Share
from portal.scheduler.decisions import Placement, Start
from portal.services import desired, specs, transitions
from portal.services.capacity import BROKEN
from portal.services.transitions import Conflict
from wire.desired import GpuSlot, Launch
from wire.states import GpuState, NodeState

FIRST_PORT, PORTS = 20_000, 10_000
"""Where the ranks of several nodes meet. Below the range that the kernel gives to outgoing connections."""


@dataclass(frozen=True)
class Part:
    """One node's part of a start."""

    node: Node
    gpus: list[Gpu]
    node_rank: int
    first_rank: int
    rank_count: int


@transaction.atomic
def start(decision: Start) -> bool:
    """-> True. Raises Conflict or IntegrityError if the job, a node or a GPU is no longer free to take."""
    newest = Attempt.objects.filter(job=OuterRef("pk")).order_by("-number").values("number")[:1]
    rows = Job.objects.select_for_update(of=("self",)).select_related("owner").annotate(newest=Subquery(newest))
    job = rows.get(pk=decision.job)
    if job.state != JobState.WAITING:
        raise Conflict(f"job {job.pk} is {job.state}")
    spec = specs.parse(job.spec)
    parts = parts_of(spec, decision.placements)
    now = timezone.now()
    attempt = Attempt.objects.create(job=job, number=(job.newest or 0) + 1, state_since=now, created_at=now)
    Share.objects.bulk_create(share_of(job, attempt, spec, parts, part) for part in parts)
    Allocation.objects.bulk_create(
        Allocation(gpu=gpu, attempt=attempt, rank=rank_of(spec, part, local), allocated_at=now)
        for part in parts for local, gpu in enumerate(part.gpus)
    )
    transitions.move(
        job, JobState.STARTING, message=where(parts), allocated_at=now, started_at=None, hold_code="", hold_message=""
    )
    desired.change([part.node for part in parts])
    return True


def parts_of(spec: specs.JobSpec, placements: tuple[Placement, ...]) -> list[Part]:
    nodes, gpus = taken(placements)
    parts: list[Part] = []
    first_rank = 0
    for node_rank, placement in enumerate(placements):
        rank_count = 1 if spec.launcher == "script" else max(1, len(placement.gpus))
        held = [gpus[uuid] for uuid in placement.gpus]
        parts.append(Part(nodes[placement.node], held, node_rank, first_rank, rank_count))
        first_rank += rank_count
    return parts


def taken(placements: tuple[Placement, ...]) -> tuple[dict[str, Node], dict[str, Gpu]]:
    """The nodes, locked, and the GPUs; as the snapshot saw them or Conflict."""
    names = [placement.node for placement in placements]
    uuids = [uuid for placement in placements for uuid in placement.gpus]
    ready = Node.objects.select_for_update().filter(name__in=names, schedulable=True, state=NodeState.READY)
    nodes = {node.name: node for node in ready.only("name", "hostname", "state", "desired_serial").order_by("name")}
    cards = Gpu.objects.filter(uuid__in=uuids, node__in=nodes.values(), mig_enabled=False, present=True)
    cut_from = Gpu.objects.filter(node=OuterRef("node"), uuid=OuterRef("parent_uuid"))
    closed = cut_from.filter(~Q(draining="") | Q(state__in=BROKEN))
    free = cards.filter(~Exists(closed), draining="", state=GpuState.OK)
    gpus = {gpu.uuid: gpu for gpu in free.only("uuid", "index", "vendor", "node_id", "mig_profile", "state_since")}
    if len(nodes) < len(names) or len(gpus) < len(uuids):
        raise Conflict("a node or a GPU went away since the snapshot")
    return nodes, gpus


def rank_of(spec: specs.JobSpec, part: Part, local: int) -> int:
    """A script is one rank with all the GPUs of its node; other launchers start one rank per GPU."""
    return part.first_rank if spec.launcher == "script" else part.first_rank + local


def share_of(job: Job, attempt: Attempt, spec: specs.JobSpec, parts: list[Part], part: Part) -> Share:
    launch = launch_of(job, attempt, spec, parts, part)
    return Share(
        attempt=attempt, node=part.node, node_rank=part.node_rank, first_rank=part.first_rank,
        rank_count=part.rank_count, launch=msgspec.to_builtins(launch),
    )


def launch_of(job: Job, attempt: Attempt, spec: specs.JobSpec, parts: list[Part], part: Part) -> Launch:
    together: dict[str, Any] = meeting_point(attempt, parts) if len(parts) > 1 else {}
    return Launch(
        attempt=str(attempt.pk),
        job=job.pk,
        epoch=attempt.number,
        name=job.name,
        user=job.owner.username,
        launcher=spec.launcher,
        command=spec.command,
        env=spec.env,
        runtime=spec.runtime.kind,
        workdir=spec.source.path if spec.source else None,
        gpus=[GpuSlot(gpu.uuid, gpu.index, gpu.vendor, gpu.state_since.timestamp()) for gpu in part.gpus],
        node_rank=part.node_rank,
        node_count=len(parts),
        first_rank=part.first_rank,
        world_size=sum(part.rank_count for part in parts),
        layout=spec.layout.model_dump() if spec.layout else {},
        time_limit_s=spec.time_limit,
        **together,
    )


def meeting_point(attempt: Attempt, parts: list[Part]) -> dict[str, Any]:
    """Different attempts meet on different ports, so that two jobs of one node do not clash."""
    head = parts[0].node
    return {"master_address": head.hostname or head.name, "master_port": FIRST_PORT + attempt.pk.int % PORTS}


def where(parts: list[Part]) -> str:
    """-> "On n1: GPU 0, 1, 2, 3."."""
    return "; ".join(f"On {part.node.name}" + (f": {cards(part)}" if part.gpus else "") for part in parts) + "."


def cards(part: Part) -> str:
    listed = f"GPU {', '.join(str(gpu.index) for gpu in part.gpus)}"
    profiles = {gpu.mig_profile for gpu in part.gpus if gpu.mig_profile}
    return f"slice {profiles.pop()} of {listed}" if profiles else listed
