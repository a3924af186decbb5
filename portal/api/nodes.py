"""Machines, as they reported themselves."""

from datetime import datetime
from typing import Any

from django.db.models import Count, Q
from django.http import HttpRequest
from ninja import Router, Schema

from portal.api.auth import user_of
from portal.api.gpus import GpuOut, gpu_rows
from portal.api.requests import allow_only
from portal.models import Node
from portal.services import access

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
    held = Count(
        "gpus",
        filter=Q(gpus__present=True, gpus__allocations__released_at=None, gpus__allocations__isnull=False),
        distinct=True,
    )
    nodes = Node.objects.prefetch_related("gpus").annotate(held=held)
    return NodeList(nodes=[NodeOut(**_summary(node, node.held)) for node in nodes])


@router.get("/{name}", response=NodeDetail, url_name="node", summary="One node with its GPUs and links")
def get_node(request: HttpRequest, name: str) -> NodeDetail:
    allow_only(request)
    user = user_of(request)
    node = access.get_node(user, name)
    rows = gpu_rows(user, node=node)
    held = sum(1 for row in rows if row.holder is not None)
    return NodeDetail(
        **_summary(node, held),
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


def _summary(node: Node, held: int) -> dict[str, Any]:
    gpus = [gpu for gpu in node.gpus.all() if gpu.present]
    healthy = sum(1 for gpu in gpus if gpu.state == "ok")
    return {
        "name": node.name,
        "state": node.state,
        "state_since": node.state_since,
        "schedulable": node.schedulable,
        "cordon_reason": node.cordon_reason or None,
        "gpus_total": len(gpus),
        "gpus_free": max(0, healthy - held) if node.schedulable and node.state == "ready" else 0,
        "models": sorted({gpu.model for gpu in gpus}),
        "problem": node.problem or None,
        "simulated": node.simulated,
        "last_heartbeat_at": node.last_heartbeat_at,
    }
