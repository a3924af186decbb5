"""Machines, as they reported themselves."""

from datetime import datetime
from typing import Any

from django.db.models import Exists, OuterRef, Prefetch
from django.http import HttpRequest
from ninja import Router, Schema

from portal.api.auth import user_of
from portal.api.gpus import GpuOut, gpu_rows
from portal.api.requests import allow_only
from portal.models import Allocation, Gpu, Node
from portal.services import access
from portal.services.capacity import offered, unavailable, with_room

router = Router()


class NodeOut(Schema):
    name: str
    state: str
    state_since: datetime
    schedulable: bool
    cordon_reason: str | None
    gpus_total: int
    gpus_free: int
    models: list[str]
    problem: str | None
    simulated: bool
    last_heartbeat_at: datetime | None


class NodeDetail(NodeOut):
    hostname: str | None
    agent_version: str | None
    driver: str | None
    cuda: str | None
    cpu_count: int | None
    memory_total_bytes: int | None
    nvswitch: bool
    boot_id: str | None
    links: list[list[str]]
    gpus: list[GpuOut]


class NodeList(Schema):
    nodes: list[NodeOut]


@router.get("", response=NodeList, url_name="node_list", summary="All nodes")
def list_nodes(request: HttpRequest) -> NodeList:
    allow_only(request)
    active = Allocation.objects.filter(gpu=OuterRef("pk"), released_at=None)
    gpus = Gpu.objects.present().annotate(held=Exists(active))
    nodes = with_room(Node.objects.all()).prefetch_related(Prefetch("gpus", gpus, to_attr="listed"))
    return NodeList(nodes=[_listed(node) for node in nodes])


@router.get("/{name}", response=NodeDetail, url_name="node", summary="One node with its GPUs and links")
def get_node(request: HttpRequest, name: str) -> NodeDetail:
    allow_only(request)
    user = user_of(request)
    node = access.get_node(user, name)
    rows = gpu_rows(user, node=node)
    units = [row for row in rows if not row.mig_enabled]
    return NodeDetail(
        **_summary(node, {row.model for row in units}, len(units), sum(row.free for row in units)),
        hostname=node.hostname or None,
        agent_version=node.agent_version or None,
        driver=node.driver or None,
        cuda=node.cuda or None,
        cpu_count=node.cpu_count,
        memory_total_bytes=node.memory_total_bytes,
        nvswitch=node.nvswitch,
        boot_id=node.boot_id or None,
        links=node.links,
        gpus=rows,
    )


def _listed(node: Any) -> NodeOut:
    units, open_ones = [gpu for gpu in node.listed if not gpu.mig_enabled], offered(node.listed)
    free = sum(1 for gpu in units if gpu.uuid in open_ones and not gpu.held)
    return NodeOut(**_summary(node, {gpu.model for gpu in units}, len(units), 0 if unavailable(node) else free))


def _summary(node: Node, models: set[str], total: int, free: int) -> dict[str, Any]:
    """What jobs can have is counted: a card that is cut is not one, each of its slices is."""
    return {
        "name": node.name,
        "state": node.state,
        "state_since": node.state_since,
        "schedulable": node.schedulable,
        "cordon_reason": node.cordon_reason or None,
        "gpus_total": total,
        "gpus_free": free,
        "models": sorted(models),
        "problem": node.problem or None,
        "simulated": node.simulated,
        "last_heartbeat_at": node.last_heartbeat_at,
    }
