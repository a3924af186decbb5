"""What the page of one node shows: its GPUs, how they are joined, what runs on them. Fixed number of queries."""

import time
from dataclasses import dataclass
from typing import Any

from django.db.models import Q

from portal.models import Event, Job, Node, User
from portal.services import samples
from portal.services.cells import Cell, cells
from portal.services.samples import Series, Span

EVENTS_SHOWN = 30
CHART_S = 900.0
CHART_POINTS = 300
LINK_CLASSES = {"PIX": 2, "PXB": 2, "PHB": 3, "NODE": 3, "SYS": 4}
LINK_WORDS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "same PCIe host bridge",
    "NODE": "same socket",
    "SYS": "across sockets",
}


@dataclass(frozen=True)
class LinkCell:
    """How two GPUs are joined. `tone` 1 is the fastest, 4 the slowest, 0 not known."""

    kind: str
    tone: int
    both_free: bool = False
    itself: bool = False


@dataclass(frozen=True)
class GpuProcess:
    cell: Cell
    pid: int
    command: str
    user: str
    memory_used_bytes: int | None
    known: bool  # belongs to an attempt of the portal


@dataclass(frozen=True)
class NodeDetail:
    node: Node
    cells: list[Cell]
    events: list[Event]
    jobs: list[Job]

    @property
    def free(self) -> int:
        return sum(cell.free for cell in self.cells)

    @property
    def heartbeat(self) -> dict[str, Any]:
        return self.node.heartbeat or {}

    @property
    def matrix(self) -> list[tuple[Cell, list[LinkCell]]]:
        kinds = {frozenset((a, b)): str(kind) for a, b, kind in self.node.links}
        return [(row, [link(row, column, kinds) for column in self.cells]) for row in self.cells]

    @property
    def link_kinds(self) -> list[tuple[str, int, str]]:
        """Those that occur, the fastest first: kind, tone, in words."""
        found = {str(kind) for _, _, kind in self.node.links}
        return sorted(((kind, tone_of(kind), words_of(kind, self.node)) for kind in found), key=lambda item: item[1:])

    @property
    def processes(self) -> list[GpuProcess]:
        return [process_of(cell, raw) for cell in self.cells for raw in cell.processes or []]

    @property
    def memory_used_bytes(self) -> int | None:
        return self.heartbeat.get("memory_used_bytes")


def detail(user: User, node: Node) -> NodeDetail:
    visible = Job.objects.visible_to(user)
    own = Job.objects.filter(attempts__allocations__gpu__node=node, attempts__allocations__released_at=None)
    jobs = visible.filter(pk__in=own.values("pk")).select_related("owner").order_by("id")
    seen = Q(job=None) | Q(job__in=visible.values("pk"))
    events = Event.objects.filter(seen, Q(node=node) | Q(gpu__node=node)).select_related("gpu", "job", "actor")
    return NodeDetail(node, cells(user, [node])[node.pk], list(events.order_by("-id")[:EVENTS_SHOWN]), list(jobs))


def recent(found: list[Cell]) -> Series:
    """Samples of the last quarter of an hour."""
    now = time.time()
    return samples.series([Span(cell.gpu, now - CHART_S, now + samples.CLOCK_AHEAD_S) for cell in found], CHART_POINTS)


def link(row: Cell, column: Cell, kinds: dict[frozenset[str], str]) -> LinkCell:
    if row.gpu.uuid == column.gpu.uuid:
        return LinkCell("", 0, itself=True)
    kind = kinds.get(frozenset((row.gpu.uuid, column.gpu.uuid)), "")
    return LinkCell(kind, tone_of(kind), both_free=row.free and column.free)


def tone_of(kind: str) -> int:
    return 1 if kind.startswith("NV") else LINK_CLASSES.get(kind, 0)


def words_of(kind: str, node: Node) -> str:
    if kind.startswith("NV"):
        return f"{kind[2:]} NVLinks" + (" through NVSwitch" if node.nvswitch else "")
    return LINK_WORDS.get(kind, "")


def process_of(cell: Cell, raw: dict[str, Any]) -> GpuProcess:
    command, user = str(raw.get("command") or ""), str(raw.get("user") or "")
    return GpuProcess(
        cell, int(raw.get("pid") or 0), command, user, raw.get("memory_used_bytes"), bool(raw.get("attempt"))
    )
