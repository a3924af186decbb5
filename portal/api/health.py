"""How the GPUs feel, and what an administrator may do about it."""

from datetime import datetime

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import ConfigDict, Field

from portal.api.auth import user_of
from portal.api.requests import allow_only
from portal.models import Gpu, HardwareOrder, Health
from portal.services import access, health, orders

nodes = Router()
gpus = Router()


class Finding(Schema):
    """Open until `resolved_at`. `kind` is xid, ecc, row_remap, lost, hang, foreign, memory, preflight, …"""

    id: int
    gpu_uuid: str | None
    gpu_index: int | None
    at: datetime
    kind: str
    code: int | None
    severity: str
    message: str
    meaning: str | None
    advice: str | None
    source: str | None
    count: int
    resolved_at: datetime | None
    resolved_by: str | None


class GpuHealth(Schema):
    uuid: str
    index: int
    state: str
    state_reason: str | None
    state_since: datetime


class NodeHealth(Schema):
    node: str
    problem: str | None
    gpus: list[GpuHealth]
    findings: list[Finding]


class Order(Schema):
    id: str
    kind: str
    state: str
    message: str | None


class QuarantineIn(Schema):
    model_config = ConfigDict(extra="forbid")

    reason: str = Field(min_length=1, max_length=150)


class ReleaseDriverIn(Schema):
    model_config = ConfigDict(extra="forbid")

    seconds: float = 60.0


@nodes.get("/{name}/health", response=NodeHealth, url_name="node_health", summary="States and findings of its GPUs")
def node_health(request: HttpRequest, name: str) -> NodeHealth:
    allow_only(request)
    node = access.get_node(user_of(request), name)
    cards = [gpu_health(gpu) for gpu in node.gpus.present().order_by("index", "uuid")]
    findings = [finding(row) for row in health.listing(node)]
    return NodeHealth(node=node.name, problem=node.problem or None, gpus=cards, findings=findings)


@nodes.post("/{name}/release-driver", response=Order, url_name="release_driver", summary="Let go of the GPU driver")
def release_driver(request: HttpRequest, name: str, body: ReleaseDriverIn) -> Order:
    allow_only(request)
    user = user_of(request)
    access.require_admin(user)
    return order_out(orders.release_driver(access.get_node(user, name), body.seconds, actor=user))


@gpus.post("/{uuid}/release", response=GpuHealth, url_name="gpu_release", summary="Take a GPU back into service")
def release(request: HttpRequest, uuid: str) -> GpuHealth:
    allow_only(request)
    user = user_of(request)
    access.require_admin(user)
    return gpu_health(health.release(access.get_gpu(user, uuid), actor=user))


@gpus.post("/{uuid}/quarantine", response=GpuHealth, url_name="gpu_quarantine", summary="Take a GPU out of service")
def quarantine(request: HttpRequest, uuid: str, body: QuarantineIn) -> GpuHealth:
    allow_only(request)
    user = user_of(request)
    access.require_admin(user)
    return gpu_health(health.quarantine(access.get_gpu(user, uuid), body.reason, actor=user))


def gpu_health(gpu: Gpu) -> GpuHealth:
    return GpuHealth(uuid=gpu.uuid, index=gpu.index, state=str(gpu.state), state_reason=gpu.state_reason or None,
                     state_since=gpu.state_since)  # fmt: skip


def finding(row: Health) -> Finding:
    return Finding(
        id=row.pk,
        gpu_uuid=row.gpu.uuid if row.gpu else None,
        gpu_index=row.gpu.index if row.gpu else None,
        at=row.at,
        kind=row.kind,
        code=row.code,
        severity=row.severity,
        message=row.message,
        meaning=row.meaning or None,
        advice=row.advice or None,
        source=row.source or None,
        count=row.count,
        resolved_at=row.resolved_at,
        resolved_by=row.resolved_by.username if row.resolved_by else None,
    )


def order_out(order: HardwareOrder) -> Order:
    return Order(id=str(order.pk), kind=order.kind, state=str(order.state), message=order.message or None)
