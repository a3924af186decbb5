"""The read model of the overview: what is free and where, what is mine, what waits and why. Fixed number of queries."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

from django.utils import timezone

from portal.models import Allocation, Job, JobState, Node, User
from portal.models.jobs import JobQuerySet
from portal.services import samples
from portal.services.cells import Cell, cells
from portal.services.samples import Span
from wire.states import NodeState

FAILURE_SHOWN_FOR = timedelta(days=7)
JOBS_SHOWN = 8
HISTORY_S = 1800.0
HISTORY_POINTS = 60
ODD = ("quarantined", "lost", "dirty", "suspect", "draining")
NODES_NAMED = 3  # one by one at the head of the page


@dataclass(frozen=True)
class NodeRow:
    node: Node
    cells: list[Cell]

    @property
    def free(self) -> int:
        return sum(cell.free for cell in self.cells)

    @property
    def slices_free(self) -> int:
        return sum(part.free for cell in self.cells for part in cell.slices)

    @property
    def utilization_percent(self) -> float | None:
        return mean_use(self.cells)

    @property
    def lines(self) -> list[list[Cell]]:
        """The grid is eight cells wide."""
        return [self.cells[start : start + 8] for start in range(0, len(self.cells), 8)]


@dataclass(frozen=True)
class ModelGroup:
    """Everything of one GPU model: a card of «free now» and a group of the grid."""

    model: str
    memory_bytes: int | None
    link: str
    rows: list[NodeRow]

    @property
    def cells(self) -> list[Cell]:
        return [cell for row in self.rows for cell in row.cells]

    @property
    def total(self) -> int:
        return len(self.cells)

    @property
    def free(self) -> int:
        return self.count("free")

    @property
    def mine(self) -> int:
        return self.count("mine")

    @property
    def busy(self) -> int:
        return self.count("busy")

    @property
    def split(self) -> int:
        """Cards that are cut into slices."""
        return self.count("mig")

    @property
    def slices(self) -> int:
        return sum(len(cell.slices) for cell in self.cells)

    @property
    def slices_free(self) -> int:
        return sum(row.slices_free for row in self.rows)

    @property
    def off(self) -> int:
        return self.total - self.free - self.mine - self.busy - self.split

    @property
    def blocks(self) -> list[int]:
        """Free GPUs per node, the most first."""
        return sorted((row.free for row in self.rows if row.free), reverse=True)

    @property
    def largest(self) -> NodeRow | None:
        """The node with the most free GPUs."""
        best = max(self.rows, key=lambda row: row.free, default=None)
        return best if best is not None and best.free else None

    def count(self, state: str) -> int:
        return sum(cell.state == state for cell in self.cells)


@dataclass(frozen=True)
class RunningJob:
    job: Job
    models: str
    nodes: list[str]
    utilization_percent: float | None


@dataclass(frozen=True)
class Holding:
    owner: str
    mine: bool
    gpus: int
    share: float  # in whole cards: a slice is a part of one
    models: str
    utilization_percent: float | None


@dataclass(frozen=True)
class Attention:
    """Something that wants to be looked at, and where."""

    state: str
    count: int
    node: Node
    anchor: str = ""


@dataclass(frozen=True)
class ClusterView:
    groups: list[ModelGroup]
    empty_nodes: list[Node]  # that reported no GPU
    running: list[RunningJob]
    running_total: int
    waiting: list[Job]
    waiting_total: int
    last_failure: Job | None
    holdings: list[Holding]

    @property
    def rows(self) -> list[NodeRow]:
        return [row for group in self.groups for row in group.rows]

    @property
    def cells(self) -> list[Cell]:
        return [cell for group in self.groups for cell in group.cells]

    @property
    def node_count(self) -> int:
        return len({row.node.pk for row in self.rows}) + len(self.empty_nodes)

    @property
    def parts(self) -> list[Cell]:
        """What can be held: whole cards, and the slices of the others."""
        return parts_of(self.cells)

    @property
    def counts(self) -> dict[str, int]:
        """How many cells are in each state; a card that is cut counts once, and each of its slices."""
        split = sum(cell.split for cell in self.cells)
        return dict(Counter(part.state for part in self.parts)) | ({"mig": split} if split else {})

    @property
    def attention(self) -> list[Attention]:
        """GPUs by state, the worst first, each pointing at the first of them."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            for state in {cell.state, *(part.state for part in cell.parts)}:
                found.setdefault(state, []).append(cell)
        return [
            Attention(state, len(found[state]), found[state][0].node, found[state][0].anchor)
            for state in ODD
            if state in found
        ]

    @property
    def nodes(self) -> list[Node]:
        return [*{row.node.pk: row.node for row in self.rows}.values(), *self.empty_nodes]

    @property
    def silent(self) -> list[Node]:
        """The longest out of touch first."""
        away = [node for node in self.nodes if node.state == NodeState.UNREACHABLE]
        return sorted(away, key=lambda node: (node.last_heartbeat_at is not None, node.last_heartbeat_at))

    @property
    def silent_named(self) -> list[Node]:
        return self.silent if len(self.silent) <= NODES_NAMED else []

    @property
    def troubled(self) -> list[Node]:
        """Nodes in touch that say themselves what is wrong with them."""
        return [node for node in self.nodes if node.problem and node.state != NodeState.UNREACHABLE]


def cluster(user: User) -> ClusterView:
    nodes = list(Node.objects.all())
    by_node = cells(user, nodes)
    own = Job.objects.filter(owner=user).order_by("id")
    running, waiting = list(own.active()), own.waiting()  # of the latter there may be thousands
    everything = parts_of(cell for node in nodes for cell in by_node[node.pk])
    return ClusterView(
        groups=groups(nodes, by_node),
        empty_nodes=[node for node in nodes if not by_node[node.pk]],
        running=[running_job(job, everything) for job in running[:JOBS_SHOWN]],
        running_total=len(running),
        waiting=list(waiting[:JOBS_SHOWN]),
        waiting_total=waiting.count(),
        last_failure=last_failure(Job.objects.filter(owner=user)),
        holdings=holdings(everything),
    )


def groups(nodes: Sequence[Node], by_node: dict[int, list[Cell]]) -> list[ModelGroup]:
    """By model, the larger group first. A node with two models stands in both, each with its own cells."""
    rows: dict[str, list[NodeRow]] = {}
    for node in nodes:
        for model in dict.fromkeys(cell.gpu.model for cell in by_node[node.pk]):
            mine = [cell for cell in by_node[node.pk] if cell.gpu.model == model]
            rows.setdefault(model, []).append(NodeRow(node, mine))
    made = [ModelGroup(model, memory_of(found), link_of(found), found) for model, found in rows.items()]
    return sorted(made, key=lambda group: (-group.total, group.model))


def parts_of(found: Iterable[Cell]) -> list[Cell]:
    return [part for cell in found for part in cell.parts]


def memory_of(rows: list[NodeRow]) -> int | None:
    known = [cell.gpu.memory_total_bytes for row in rows for cell in row.cells if cell.gpu.memory_total_bytes]
    return max(known, default=None)


def link_of(rows: list[NodeRow]) -> str:
    if any(row.node.nvswitch for row in rows):
        return "NVSwitch"
    kinds = {str(link[2]) for row in rows for link in row.node.links}
    return "NVLink" if any(kind.startswith("NV") for kind in kinds) else "PCIe" if kinds else ""


def running_job(job: Job, everything: Iterable[Cell]) -> RunningJob:
    held = [cell for cell in everything if cell.holder and cell.holder.job_id == job.pk]
    return RunningJob(job, models_of(held), sorted({cell.node.name for cell in held}), mean_use(held))


def history(user: User) -> dict[int, list[float | None]]:
    """Mean use of my running jobs over the last half hour, in stretches of 30 s; None where nothing was read."""
    active = Job.objects.filter(owner=user).active().order_by("id")[:JOBS_SHOWN]
    held = Allocation.objects.filter(released_at=None, attempt__job__in=list(active)).select_related("attempt", "gpu")
    now = time.time()
    spans = {row.gpu.uuid: row for row in held}
    begin = now - HISTORY_S
    looked_at = [Span(row.gpu, max(begin, row.allocated_at.timestamp()), now) for row in spans.values()]
    found = samples.series(looked_at, HISTORY_POINTS)
    by_job: dict[int, list[samples.Column]] = {}
    for gpu in found.gpus:
        by_job.setdefault(spans[gpu.uuid].attempt.job_id, []).append(gpu.mean["utilization_percent"])
    return {job_id: [mean_known(moment) for moment in zip(*columns, strict=True)] for job_id, columns in by_job.items()}


def holdings(everything: Iterable[Cell]) -> list[Holding]:
    by_owner: dict[str, list[Cell]] = {}
    for cell in everything:
        if cell.holder:
            by_owner.setdefault(cell.holder.owner, []).append(cell)
    made = [
        Holding(
            owner, bool(held[0].holder and held[0].holder.mine), len(held), sum(cell.share for cell in held),
            models_of(held), mean_use(held),
        )
        for owner, held in by_owner.items()
    ]
    return sorted(made, key=lambda holding: (-holding.gpus, holding.owner))


def models_of(held: Iterable[Cell]) -> str:
    """4× H100, 2× A100"""
    return ", ".join(f"{number}× {model}" for model, number in Counter(cell.kind for cell in held).most_common())


def mean_use(held: Iterable[Cell]) -> float | None:
    """Of the GPUs whose utilisation is known; None if none is."""
    return mean_known(cell.utilization_percent for cell in held)


def mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def last_failure(own: JobQuerySet) -> Job | None:
    since = timezone.now() - FAILURE_SHOWN_FOR
    return own.filter(state=JobState.FAILED, ended_at__gte=since).order_by("-ended_at").first()
