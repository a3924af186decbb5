"""The cards of a node, as its newest inventory lists them. No row is ever deleted: allocations point at it."""

from typing import Any

import msgspec

from portal.models import Gpu, Node
from portal.scheduler.families import family
from portal.services import events, health, transitions
from portal.services.text import storable
from wire.reports import GpuInfo
from wire.states import GpuState

OWN_COLUMNS = frozenset({
    "uuid", "index", "vendor", "name", "pci_bus_id", "memory_total_bytes", "power_limit_mw", "numa_node", "parent_uuid",
    "mig_profile", "mig_enabled",
})  # fmt: skip


def reported(node: Node, infos: list[GpuInfo]) -> None:
    """Everything the node has now; what it no longer names is gone until it is named again."""
    known = {gpu.uuid: gpu for gpu in Gpu.objects.select_related("node").filter(uuid__in=[info.uuid for info in infos])}
    for info in infos:
        gpu = known.get(info.uuid)
        if gpu is None:
            gpu = Gpu.objects.create(uuid=info.uuid, node=node, **columns(info))
            events.record("gpu.found", node=node, gpu=gpu, message=f"GPU {info.index}: {info.name}.")
        else:
            again(node, gpu, info)
    here = {info.uuid for info in infos}
    for gpu in Gpu.objects.filter(node=node, present=True).exclude(uuid__in=here):
        if gpu.parent_uuid in here:
            uncut(gpu)
        else:
            vanish(gpu)


def again(node: Node, gpu: Gpu, info: GpuInfo) -> None:
    if gpu.node_id != node.pk:
        message = f"GPU {gpu.uuid} moved here from {gpu.node.name}."
        events.record("gpu.moved", node=node, gpu=gpu, message=message)
    elif not gpu.present:
        events.record("gpu.found", node=node, gpu=gpu, message=f"GPU {info.index} is back.")
    Gpu.objects.filter(pk=gpu.pk).update(node=node, present=True, **columns(info))
    gpu.node, gpu.present = node, True
    if gpu.state != GpuState.OK:
        health.answers_again(gpu)


def uncut(gpu: Gpu) -> None:
    """A slice that is gone while its card is there was taken away on purpose: nothing is broken."""
    events.record("gpu.uncut", gpu=gpu, message=f"The slice {gpu.mig_profile} ({gpu.uuid}) does not exist any more.")
    Gpu.objects.filter(pk=gpu.pk).update(present=False, draining="")


def vanish(gpu: Gpu) -> None:
    message = f"GPU {gpu.index} ({gpu.uuid}) is missing from the newest inventory."
    events.record("gpu.missing", gpu=gpu, message=message)
    Gpu.objects.filter(pk=gpu.pk).update(present=False)
    if gpu.parent_uuid:  # a slice that was cut away; whether that was wanted is for its card to say
        transitions.move(gpu, GpuState.LOST, message=message, state_reason=storable(message, 200))
    else:
        health.vanished(gpu, message)


def columns(info: GpuInfo) -> dict[str, Any]:
    details = {key: value for key, value in msgspec.to_builtins(info).items() if key not in OWN_COLUMNS}
    return {
        "index": info.index,
        "vendor": storable(info.vendor, 10),
        "name": storable(info.name, 96),
        "model": storable(family(info.name), 40),
        "pci_bus_id": storable(info.pci_bus_id or "", 20),
        "memory_total_bytes": info.memory_total_bytes,
        "power_limit_mw": info.power_limit_mw,
        "numa_node": info.numa_node,
        "parent_uuid": storable(info.parent_uuid or "", 80),
        "mig_profile": storable(info.mig_profile or "", 20),
        "mig_enabled": bool(info.mig_enabled),
        "details": details,
    }
