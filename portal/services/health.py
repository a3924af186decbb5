"""How the GPUs feel: what was reported about them, what follows for their state, and who may change that.

Every finding is a row that stays open until it is resolved; the state of a GPU is the worst that its open rows ask for.
"""

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from portal.hardware import verdicts
from portal.models import Allocation, Attempt, Event, Gpu, Health, Node, User
from portal.services import events, live, scheduling, transitions
from portal.services.errors import Problem
from portal.services.text import storable
from wire.hardware import HealthEvent
from wire.states import GpuState

ABOUT = timedelta(seconds=2)
"""Between the clocks of a node and the portal, when asking who held a GPU."""

LISTED_MOST = 200
SPOOL_LEAST_BYTES = 256 * 1024**2  # as the check before a start has it


@transaction.atomic
def report(node: Node, event: HealthEvent) -> bool:
    """-> whether it was news. The same key is the same event, however often it comes."""
    if event.kind not in verdicts.NODE_KINDS:
        return False
    gpu = gpu_of(node, event)
    at = moment(event.at)
    known = Health.objects.filter(node=node, key=storable(event.key, 120)).first()
    if known is not None:
        enrich(known, event)
        return False
    if event.kind == "back" and gpu is not None:
        answers_again(gpu)
    elif event.kind != "xid" and gpu is not None and is_known(gpu, event, at):
        return False
    row = open_finding(
        gpu or node, event.kind, event.message, key=event.key, code=event.code, at=at, source=event.source,
        count=max(1, event.count),
    )
    if event.kind == "hang" and gpu is not None:
        resolve(Health.objects.filter(gpu=gpu, kind="lost", resolved_at=None))
        settle(gpu)
    tell_jobs(row)
    return True


@transaction.atomic
def release(gpu: Gpu, *, actor: User) -> Gpu:
    """Take it back into service. What still lasts cannot be released from; a lost card is let go of for good."""
    rows = open_rows(gpu)
    lasting = [row for row in rows if row.kind in verdicts.WHILE_IT_LASTS]
    if any(row.kind == "lost" for row in lasting):
        resolve(Health.objects.filter(pk__in=[row.pk for row in rows]), actor)
        settle(gpu, actor=actor)
        return gpu
    if lasting:
        detail = f"GPU {gpu.index} of {gpu.node.name} cannot be released while this lasts: {lasting[0].message}"
        raise Problem(409, "still_there", detail)
    if rows:
        resolve(Health.objects.filter(pk__in=[row.pk for row in rows]), actor)
        events.record("gpu.released", gpu=gpu, actor=actor, message=f"Released by {actor.username}.")
    settle(gpu, actor=actor)
    return gpu


@transaction.atomic
def quarantine(gpu: Gpu, reason: str, *, actor: User) -> Gpu:
    """Out of service until somebody releases it. What runs on it goes on."""
    now = timezone.now()
    said = storable(reason, 150) or "no reason given"
    open_finding(gpu, "quarantine", f"Quarantined by {actor.username}: {said}",
                 key=f"quarantine/{gpu.uuid}/{now.timestamp():.3f}", at=now, source="portal", actor=actor)
    return gpu


def vanished(gpu: Gpu, message: str) -> None:
    """A whole card that is missing from the newest inventory. One that hangs is not lost: it is known why."""
    if not Health.objects.filter(gpu=gpu, kind__in=("lost", "hang"), resolved_at=None).exists():
        now = timezone.now()
        open_finding(gpu, "lost", message, key=f"lost/{gpu.uuid}/{now.timestamp():.3f}", at=now,
                     source="inventory")


def answers_again(gpu: Gpu) -> bool:
    """It is listed, or its node says so. What else was found on it stays. -> whether that was news."""
    resolve(Health.objects.filter(gpu=gpu, kind__in=("lost", "hang"), resolved_at=None))
    return settle(gpu)


def driver_works(node: Node) -> None:
    """Its newest inventory has nothing to complain about."""
    resolve(Health.objects.filter(node=node, gpu=None, kind__in=("driver", "hang"), resolved_at=None))


def watch_disks() -> int:
    """Nodes whose newest heartbeat says that there is no room for another run, and those that have it again."""
    short = Node.objects.filter(heartbeat__spool_free_bytes__lt=SPOOL_LEAST_BYTES)
    known = Health.objects.filter(kind="disk", resolved_at=None)
    changed = resolve(known.exclude(node__in=short))
    for node in short.exclude(pk__in=known.values("node")):
        free_mib = node.heartbeat["spool_free_bytes"] / 1024**2
        message = f"{node.name} has {free_mib:.0f} MiB left on the disk of its runs; it gets no new work."
        open_finding(node, "disk", message, key=f"disk/{timezone.now().timestamp():.3f}", source="heartbeat")
        changed += 1
    if changed:
        scheduling.wake()
    return changed


def open_finding(subject: Gpu | Node, kind: str, message: str, *, key: str, actor: User | None = None,
                 **fields: Any) -> Health:  # fmt: skip
    """A new row, and what follows from it for the GPU. One that asks for nothing is no open matter."""
    gpu = subject if isinstance(subject, Gpu) else None
    node = subject.node if isinstance(subject, Gpu) else subject
    verdict = verdicts.of(kind, fields.get("code"), message)
    row, made = Health.objects.get_or_create(
        node=node,
        key=storable(key, 120),
        defaults={
            "gpu": gpu,
            "kind": kind,
            "severity": verdict.severity,
            "message": storable(message or verdict.meaning, 400),
            "meaning": verdict.meaning,
            "advice": verdict.advice,
            "resolved_at": timezone.now() if verdict.severity == verdicts.INFO and verdict.state is None else None,
            **fields,
        },
    )
    if made and gpu is not None:
        settle(gpu, actor=actor)
    if made:
        live.notify(live.CLUSTER, "health", node=node.name)
    return row


def resolve(rows: QuerySet[Health], actor: User | None = None) -> int:
    return rows.filter(resolved_at=None).update(resolved_at=timezone.now(), resolved_by=actor)


@transaction.atomic
def settle(gpu: Gpu, *, actor: User | None = None) -> bool:
    """Its state as its open findings ask for it, and that of its slices. -> whether it changed.

    The row is locked first: a report and an administrator may come at the same moment.
    """
    gpu.refresh_from_db(fields=["state", "state_reason", "state_since"], from_queryset=Gpu.objects.select_for_update())
    state, reason = verdicts.worst((of_row(row).state, reason_of(row)) for row in open_rows(gpu))
    reason = storable(reason, verdicts.REASON_CHARS)
    changed = transitions.move(gpu, state, message=reason or "Nothing is open any more.", actor=actor,
                               state_reason=reason)  # fmt: skip
    if not changed and gpu.state_reason != reason:
        Gpu.objects.filter(pk=gpu.pk).update(state_reason=reason)
        gpu.state_reason = reason
    for piece in Gpu.objects.filter(parent_uuid=gpu.uuid, present=True).select_related("node"):
        settle(piece, actor=actor)
    if changed and state == GpuState.OK:
        scheduling.wake()
    if changed:
        live.notify(live.CLUSTER, "health", node=gpu.node.name)
    return changed


def open_rows(gpu: Gpu) -> list[Health]:
    """Its own, and for a slice those of the card it is cut from, except for what is on another slice."""
    own = Q(gpu=gpu)
    if gpu.parent_uuid:
        own |= Q(gpu__uuid=gpu.parent_uuid) & ~Q(kind__in=verdicts.SELF_HEALING)
    return list(Health.objects.filter(own, resolved_at=None).order_by("at"))


def listing(node: Node, *, limit: int = LISTED_MOST) -> list[Health]:
    """The open ones first, then the newest."""
    rows = Health.objects.filter(node=node).select_related("gpu", "resolved_by")
    still_open = list(rows.filter(resolved_at=None).order_by("-at")[:limit])
    return still_open + list(rows.exclude(resolved_at=None).order_by("-at")[: limit - len(still_open)])


# --- helpers ----------------------------------------------------------------------------------------------------------


def of_row(row: Health) -> verdicts.Verdict:
    return verdicts.of(row.kind, row.code, row.message)


def reason_of(row: Health) -> str:
    return f"Xid {row.code}: {row.meaning}" if row.kind == "xid" else row.message


def gpu_of(node: Node, event: HealthEvent) -> Gpu | None:
    """A node tells of its own GPUs, of no others."""
    own = Gpu.objects.filter(node=node).select_related("node")
    if event.gpu_uuid:
        return own.filter(uuid=storable(event.gpu_uuid, 80)).first()
    if not event.pci_bus_id:
        return None
    wanted = slot(event.pci_bus_id)
    cards = own.filter(parent_uuid="").exclude(pci_bus_id="")
    return next((gpu for gpu in cards if slot(gpu.pci_bus_id) == wanted), None)


def slot(pci_bus_id: str) -> tuple[int, ...] | str:
    """The same place however it is written: 00000000:07:00.0, 0000:07:00 or 07:00.0."""
    domain, _, rest = pci_bus_id.partition(".")[0].rpartition(":")[0].rpartition(":")
    try:
        return int(domain or "0", 16), int(rest, 16), int(pci_bus_id.partition(".")[0].rpartition(":")[2], 16)
    except ValueError:
        return pci_bus_id


def moment(at: float) -> datetime:
    """The node's time, as far as it is possible."""
    now = timezone.now()
    try:
        return min(datetime.fromtimestamp(at, UTC), now) if math.isfinite(at) and at > 0 else now
    except (ValueError, OverflowError, OSError):
        return now


def is_known(gpu: Gpu, event: HealthEvent, at: datetime) -> bool:
    """Such a finding is open, or was resolved after this happened: a report that comes late opens nothing again."""
    same = Health.objects.filter(gpu=gpu, kind=event.kind, code=event.code)
    return same.filter(Q(resolved_at=None) | Q(resolved_at__gte=at)).exists()


def enrich(known: Health, event: HealthEvent) -> None:
    """What one source said first, another may know more about; and how often it happened so far."""
    message = storable(event.message, 400)
    more = message if len(message) > len(known.message) else known.message
    count = max(known.count, event.count)
    if (more, count) != (known.message, known.count):
        Health.objects.filter(pk=known.pk).update(message=more, count=count)


def tell_jobs(row: Health) -> None:
    """Who held the GPU then finds it among the events of the job."""
    if row.gpu is None:
        return
    message = f"GPU {row.gpu.index}: {reason_of(row)}"
    reason = f"{row.kind}_{row.code}" if row.code is not None else row.kind
    held = list(holding(row.gpu, row.at))
    for attempt in held:
        events.record("gpu.health", gpu=row.gpu, attempt=attempt, reason=reason, message=message)
    if not held:
        events.record("gpu.health", gpu=row.gpu, reason=reason, message=message)


def holding(gpu: Gpu, at: datetime) -> Iterable[Attempt]:
    """Whoever held it, or a slice of it, at that moment."""
    held = Allocation.objects.filter(Q(gpu=gpu) | Q(gpu__parent_uuid=gpu.uuid), allocated_at__lte=at + ABOUT)
    held = held.filter(Q(released_at=None) | Q(released_at__gte=at - ABOUT))
    attempts = {row.attempt_id: row.attempt for row in held.select_related("attempt").order_by("pk")}
    return attempts.values()


def of_attempt(attempt: Attempt) -> str:
    """-> what a GPU reported first while it ran, as a sentence, or nothing."""
    seen = Event.objects.filter(attempt=attempt, kind="gpu.health").order_by("pk").first()
    return f"While it ran, {seen.message}" if seen else ""
