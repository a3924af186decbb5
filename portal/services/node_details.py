"""What the page of one node shows: its GPUs, how they are joined and cut, how they feel, what runs on them.

A fixed number of queries, however many GPUs there are.
"""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db.models import Q

from portal.models import Attempt, Event, Gpu, HardwareOrder, Health, Job, Node, User
from portal.services import link_matrix, orders, samples, topology_drawing
from portal.services.cells import Cell, cells
from portal.services.errors import Problem
from portal.services.gpu_facts import Fact, identity, live_facts
from portal.services.link_matrix import LinkCell, NicRow
from portal.services.mig_cards import MigCard, mig_cards
from portal.services.samples import Series, Span
from portal.services.topology_drawing import Drawing

HEALTH_SHOWN = 40
ORDERS_SHOWN = 6
WINDOWS_S = (900, 21_600, 604_800)
EVENTS_SHOWN = 15
CHART_POINTS = 300


@dataclass(frozen=True)
class GpuProcess:
    cell: Cell
    pid: int
    command: str
    user: str
    memory_used_bytes: int | None
    known: bool  # belongs to an attempt of the portal
    started_at: datetime | None = None
    container: str = ""
    job: Job | None = None  # if one may see it


@dataclass(frozen=True)
class NodeDetail:
    node: Node
    cells: list[Cell]
    events: list[Event]
    jobs: list[Job]
    health: list[Health]
    orders: list[HardwareOrder]
    processes: list[GpuProcess]
    may_manage: bool = False
    mig: list[MigCard] = field(default_factory=list)

    @property
    def free(self) -> int:
        return sum(cell.free for cell in self.cells)

    @property
    def slices(self) -> list[Cell]:
        return [part for cell in self.cells for part in cell.slices]

    @property
    def slices_free(self) -> int:
        return sum(part.free for part in self.slices)

    @property
    def cards(self) -> list[tuple[Cell, list[Fact], list[Fact]]]:
        """Each GPU with its live facts and with what it is."""
        return [(cell, live_facts(cell), identity(cell)) for cell in self.cells]

    @property
    def open_health(self) -> int:
        return sum(one.resolved_at is None for one in self.health)

    @property
    def heartbeat(self) -> dict[str, Any]:
        return self.node.heartbeat or {}

    @property
    def matrix(self) -> list[tuple[Cell, list[LinkCell]]]:
        return link_matrix.matrix(self.node, self.cells)

    @property
    def link_kinds(self) -> list[tuple[str, int, str]]:
        return link_matrix.link_kinds(self.node)

    @property
    def drawing(self) -> Drawing | None:
        return topology_drawing.drawing(self.node, self.cells)

    @property
    def nics(self) -> list[NicRow]:
        return link_matrix.nics(self.node, self.cells)

    @property
    def foreign(self) -> list[GpuProcess]:
        return [one for one in self.processes if not one.known]

    @property
    def memory_used_bytes(self) -> int | None:
        return self.heartbeat.get("memory_used_bytes")


def detail(user: User, node: Node) -> NodeDetail:
    visible = Job.objects.visible_to(user)
    own = Job.objects.filter(attempts__allocations__gpu__node=node, attempts__allocations__released_at=None)
    jobs = visible.filter(pk__in=own.values("pk")).select_related("owner").order_by("id")
    seen = Q(job=None) | Q(job__in=visible.values("pk"))
    events = Event.objects.filter(seen, Q(node=node) | Q(gpu__node=node)).select_related("gpu", "job", "actor")
    found, given = cells(user, [node])[node.pk], orders_of(node)
    return NodeDetail(
        node, found, list(events.order_by("-id")[:EVENTS_SHOWN]), list(jobs), health_of(node), given,
        processes(user, found), user.is_superuser, mig_cards(found, given),
    )


def health_of(node: Node) -> list[Health]:
    """What is still open first."""
    rows = Health.objects.filter(node=node).select_related("gpu", "resolved_by")
    return sorted(rows.order_by("-at")[:HEALTH_SHOWN], key=lambda one: one.resolved_at is not None)


def orders_of(node: Node) -> list[HardwareOrder]:
    return list(HardwareOrder.objects.filter(node=node).select_related("gpu", "requested_by")[:ORDERS_SHOWN])


def processes(user: User, found: list[Cell]) -> list[GpuProcess]:
    """Of slices and cards. What a slice names is not named again by its card."""
    rows = [(part, raw) for cell in found for part in cell.slices for raw in part.processes or []]
    sliced = {(part.parent.uuid, raw.get("pid")) for part, raw in rows if part.parent}
    whole = [(cell, raw) for cell in found for raw in cell.processes or []]
    rows += [(cell, raw) for cell, raw in whole if (cell.gpu.uuid, raw.get("pid")) not in sliced]
    rows.sort(key=lambda row: (row[0].parent or row[0].gpu).index)
    jobs = jobs_of(user, {str(raw["attempt"]) for _, raw in rows if raw.get("attempt")})
    return [process_of(cell, raw, jobs) for cell, raw in rows]


def jobs_of(user: User, attempts: set[str]) -> dict[str, Job]:
    """By attempt id, those that one may see."""
    ids = [found for found in map(as_uuid, attempts) if found]
    rows = Attempt.objects.filter(pk__in=ids, job__in=Job.objects.visible_to(user).values("pk")).select_related("job")
    return {str(attempt.pk): attempt.job for attempt in rows}


def end_foreign(gpu: Gpu, pid: str, *, actor: User) -> HardwareOrder:
    """Only what the newest reading still shows, and only if no job explains it: its start time makes it certain."""
    rows = gpu.latest.get("processes") or []
    shown = next((row for row in rows if str(row.get("pid")) == pid and not row.get("attempt")), None)
    if shown is None or not shown.get("start_time"):
        raise Problem(409, "process_gone", f"No such foreign process is on GPU {gpu.index} any more.")
    return orders.stop_foreign(gpu, int(shown["pid"]), float(shown["start_time"]), actor=actor)


def recent(found: list[Cell], window_s: float = WINDOWS_S[0]) -> Series:
    """Samples of the last while, a quarter of an hour unless told otherwise."""
    now = time.time()
    return samples.series([Span(cell.gpu, now - window_s, now + samples.CLOCK_AHEAD_S) for cell in found], CHART_POINTS)


def process_of(cell: Cell, raw: dict[str, Any], jobs: dict[str, Job]) -> GpuProcess:
    started = raw.get("start_time")
    return GpuProcess(
        cell=cell,
        pid=int(raw.get("pid") or 0),
        command=str(raw.get("command") or ""),
        user=str(raw.get("user") or ""),
        memory_used_bytes=raw.get("memory_used_bytes"),
        known=bool(raw.get("attempt")),
        started_at=datetime.fromtimestamp(started, UTC) if started else None,
        container=str(raw.get("container") or ""),
        job=jobs.get(str(raw.get("attempt"))),
    )


def as_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
