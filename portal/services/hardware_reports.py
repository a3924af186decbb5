"""The slow-moving details of a node's GPUs and network cards, and what in them is a finding."""

from typing import Any

import msgspec
from django.db import transaction
from django.utils import timezone

from portal.hardware import verdicts
from portal.models import Gpu, Health, Node
from portal.services import health, live
from portal.services.gauges import tidied
from wire.hardware import Hardware

GPUS_MOST, NICS_MOST = 256, 128


@transaction.atomic
def apply(node: Node, report: Hardware) -> int:
    """-> how many GPUs it told something new about. A node tells of its own GPUs, of no others."""
    told = {one.uuid: one for one in report.gpus[:GPUS_MOST]}
    changed = []
    for gpu in Gpu.objects.filter(node=node, uuid__in=list(told)).select_related("node"):
        fresh: dict[str, Any] = tidied(msgspec.to_builtins(told[gpu.uuid]))
        if fresh != gpu.hardware:
            note_conditions(gpu, gpu.hardware, fresh)
            gpu.hardware = fresh
            changed.append(gpu)
    if changed:
        Gpu.objects.bulk_update(changed, ["hardware"])
        end_what_is_over(changed)
    nics = tidied(msgspec.to_builtins(report.nics[:NICS_MOST]))
    nics_changed = Node.objects.filter(pk=node.pk).exclude(nics=nics).update(nics=nics)
    if changed or nics_changed:
        live.notify(live.CLUSTER, "hardware", node=node.name)
    return len(changed)


def note_conditions(gpu: Gpu, before: dict[str, Any], after: dict[str, Any]) -> None:
    """A condition counts when it begins: an administrator's release holds although the condition still stands."""
    old = set(verdicts.of_hardware(before))
    for finding in verdicts.of_hardware(after):
        if finding not in old and not is_open(gpu, finding):
            now = timezone.now()
            health.open_finding(
                gpu, finding.kind, finding.message, code=finding.code, at=now, source="inventory",
                key=f"{finding.kind}/{gpu.uuid}/{finding.code}/{now.timestamp():.3f}",
            )


def end_what_is_over(gpus: list[Gpu]) -> None:
    """Warnings about links end by themselves. They fenced nothing, so no state follows."""
    over = {gpu.pk: verdicts.over(gpu.hardware) for gpu in gpus}
    rows = Health.objects.filter(gpu__in=gpus, kind__in=("slow_link", "link_down"), resolved_at=None)
    done = [row.pk for row in rows if row.kind in over.get(row.gpu_id or 0, ())]
    if done:
        health.resolve(Health.objects.filter(pk__in=done))


def is_open(gpu: Gpu, finding: verdicts.Finding) -> bool:
    return any(row.kind == finding.kind and row.code in (None, finding.code) for row in health.open_rows(gpu))
