"""GPUs as a person sees them: one word for the state, who holds it, the newest reading."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from portal.models import Allocation, Gpu, Job, Node, User
from wire.states import GpuState, NodeState

OUT_OF_TOUCH = {NodeState.UNREACHABLE: "unreachable", NodeState.JOINING: "unreachable"}
BROKEN = {GpuState.LOST, GpuState.QUARANTINED}


@dataclass(frozen=True)
class Holder:
    """Who holds a GPU. People see each other's names; a job is named only to those who may see it."""

    owner: str
    initials: str
    mine: bool
    rank: int
    since: datetime
    job_id: int | None = None
    job_name: str = ""


@dataclass(frozen=True)
class Cell:
    gpu: Gpu
    node: Node
    state: str  # free, busy, mine, dirty, suspect, quarantined, lost, unreachable, draining
    holder: Holder | None = None
    latest: dict[str, Any] = field(default_factory=dict)

    @property
    def free(self) -> bool:
        return self.state == "free"

    @property
    def utilization_percent(self) -> float | None:
        return self.latest.get("utilization_percent")

    @property
    def memory_used_bytes(self) -> int | None:
        return self.latest.get("memory_used_bytes")

    @property
    def power_mw(self) -> int | None:
        return self.latest.get("power_mw")

    @property
    def temperature_c(self) -> float | None:
        return self.latest.get("temperature_c")

    @property
    def processes(self) -> list[dict[str, Any]] | None:
        return self.latest.get("processes")

    @property
    def memory_percent(self) -> float | None:
        used, total = self.memory_used_bytes, self.gpu.memory_total_bytes
        return None if used is None or not total else min(100.0, used / total * 100)

    def why_missing(self, name: str) -> str:
        return str(self.latest.get("missing", {}).get(name, "no reading yet"))


def cells(user: User, nodes: Iterable[Node]) -> dict[int, list[Cell]]:
    """By node id, in the order of their index. Three queries, however many GPUs there are."""
    by_id = {node.pk: node for node in nodes}
    held = holders(user, list(by_id))
    found: dict[int, list[Cell]] = {node_id: [] for node_id in by_id}
    for gpu in Gpu.objects.present().filter(node_id__in=list(by_id)).order_by("node_id", "index"):
        node, holder = by_id[gpu.node_id], held.get(gpu.pk)
        gpu.node = node  # whoever asks a cell's GPU for its machine need not ask the database
        found[node.pk].append(Cell(gpu, node, state_of(gpu, node, holder), holder, gpu.latest))
    return found


def holders(user: User, node_ids: list[int]) -> dict[int, Holder]:
    """By GPU id."""
    active = Allocation.objects.filter(released_at=None, gpu__node_id__in=node_ids).select_related(
        "attempt__job__owner"
    )
    rows = list(active)
    visible = set(
        Job.objects.visible_to(user).filter(pk__in={row.attempt.job_id for row in rows}).values_list("pk", flat=True)
    )
    return {row.gpu_id: holder(row, user, visible) for row in rows}


def holder(row: Allocation, user: User, visible: set[int]) -> Holder:
    job = row.attempt.job
    initials = job.owner.initials if len(job.owner.initials) > 1 else job.owner.username[:2]
    who = Holder(job.owner.username, initials, job.owner_id == user.pk, row.rank, row.allocated_at)
    if job.pk not in visible:
        return who
    return Holder(who.owner, who.initials, who.mine, who.rank, who.since, job.pk, job.name)


def state_of(gpu: Gpu, node: Node, holder: Holder | None) -> str:
    """What is wrong comes first, then who holds it, then whether it is on offer."""
    if node.state in OUT_OF_TOUCH:
        return OUT_OF_TOUCH[NodeState(node.state)]
    if gpu.state in BROKEN:
        return gpu.state
    if holder is not None:
        return "mine" if holder.mine else "busy"
    if gpu.state != GpuState.OK:
        return gpu.state
    # A node that was silent for a moment gets no new work either.
    return (
        "free"
        if node.schedulable and node.state == NodeState.READY
        else "draining"
        if not node.schedulable
        else "suspect"
    )
