"""GPUs: what they are, who holds them, how they feel."""

from typing import Any

from django.db.models import Prefetch
from django.http import HttpRequest
from ninja import Router, Schema

from portal.api.auth import user_of
from portal.api.requests import allow_only
from portal.models import Allocation, Gpu, Job, Node, User
from portal.services.capacity import offered, unavailable, with_room

router = Router()


class Holder(Schema):
    """Who holds it. The job is named only to those who may see it."""

    owner: str
    job: int | None
    job_name: str | None


class Reading(Schema):
    """The newest sample. A missing value is null, its reason in `missing`."""

    at: float | None = None
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    missing: dict[str, str] = {}


class GpuOut(Schema):
    uuid: str
    node: str
    index: int
    vendor: str
    model: str
    name: str
    pci_bus_id: str | None
    memory_total_bytes: int | None
    power_limit_mw: int | None
    mig_enabled: bool
    mig_profile: str | None
    parent_uuid: str | None
    state: str
    state_reason: str | None
    draining: str | None
    free: bool
    holder: Holder | None
    latest: Reading


class GpuList(Schema):
    gpus: list[GpuOut]


@router.get("", response=GpuList, url_name="gpu_list", summary="All GPUs")
def list_gpus(
    request: HttpRequest, node: str | None = None, model: str | None = None, free: bool | None = None
) -> GpuList:
    allow_only(request, "node", "model", "free")
    rows = gpu_rows(user_of(request))
    return GpuList(
        gpus=[
            row
            for row in rows
            if (node is None or row.node == node)
            and (model is None or row.model == model)
            and (free is None or row.free == free)
        ]
    )


def gpu_rows(user: User, node: Node | None = None) -> list[GpuOut]:
    active = Allocation.objects.filter(released_at=None).select_related("attempt__job__owner")
    gpus = Gpu.objects.present().prefetch_related(
        Prefetch("node", with_room(Node.objects.all())), Prefetch("allocations", active, to_attr="active")
    )
    if node is not None:
        gpus = gpus.filter(node=node)
    rows = list(gpus)
    held = [gpu.active[0].attempt.job_id for gpu in rows if gpu.active]
    visible = set(Job.objects.visible_to(user).filter(pk__in=held).values_list("pk", flat=True))
    usable = offered(rows)
    return [_row(gpu, visible, gpu.uuid in usable) for gpu in rows]


def _row(gpu: Any, visible: set[int], usable: bool) -> GpuOut:
    holder = _holder(gpu.active[0].attempt.job, visible) if gpu.active else None
    return GpuOut(
        uuid=gpu.uuid,
        node=gpu.node.name,
        index=gpu.index,
        vendor=gpu.vendor,
        model=gpu.model,
        name=gpu.name,
        pci_bus_id=gpu.pci_bus_id or None,
        memory_total_bytes=gpu.memory_total_bytes,
        power_limit_mw=gpu.power_limit_mw,
        mig_enabled=gpu.mig_enabled,
        mig_profile=gpu.mig_profile or None,
        parent_uuid=gpu.parent_uuid or None,
        state=gpu.state,
        state_reason=gpu.state_reason or None,
        draining=gpu.draining or None,
        free=usable and not unavailable(gpu.node) and holder is None,
        holder=holder,
        latest=Reading(**{name: value for name, value in gpu.latest.items() if name in Reading.model_fields}),
    )


def _holder(job: Job, visible: set[int]) -> Holder:
    seen = job.pk in visible
    return Holder(owner=job.owner.username, job=job.pk if seen else None, job_name=job.name if seen else None)
