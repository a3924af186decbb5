"""GPUs as a person sees them: one word for the state, who holds it, the newest reading.

A card that is cut into MIG slices is one cell with a cell for each slice in it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from portal.models import Allocation, Gpu, Job, Node, User
from wire.states import GpuState, NodeState

OUT_OF_TOUCH = {NodeState.UNREACHABLE: "unreachable", NodeState.JOINING: "unreachable"}
BROKEN = {GpuState.LOST, GpuState.QUARANTINED}
COMPUTE_SLICES = 7  # of every board but the A30, whose profiles say so
PROFILE = re.compile(r"(\d+)g\.")
MISSING = {
    "not_supported": "this GPU does not offer it",
    "no_permission": "the node may not read it",
    "gpu_lost": "the GPU is lost",
    "timeout": "the driver did not answer in time",
    "reset_required": "the GPU wants a reset first",
    "nonsense": "the driver gave a value that cannot be true",
    "first_sample": "a rate needs two readings",
    "counter_reset": "a counter began anew",
    "shared_with_host": "its memory is the machine's",
    "unreliable": "the driver names processes that cannot be",
    "released": "its driver is let go of for a while",
    "mig": "the driver gives none while MIG is on",
}


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
    state: str  # free, busy, mine, dirty, suspect, quarantined, lost, unreachable, draining; mig: see its slices
    holder: Holder | None = None
    latest: dict[str, Any] = field(default_factory=dict)
    slices: list["Cell"] = field(default_factory=list)
    parent: Gpu | None = None  # of a slice

    @property
    def free(self) -> bool:
        return self.state == "free"

    @property
    def split(self) -> bool:
        return self.gpu.mig_enabled or bool(self.slices)

    @property
    def parts(self) -> list["Cell"]:
        """What can be held: the slices, or the whole card."""
        return self.slices if self.split else [self]

    @property
    def compute(self) -> int:
        """Compute slices that it has."""
        found = PROFILE.search(self.gpu.mig_profile)
        return int(found.group(1)) if found else compute_slices(self.gpu)

    @property
    def unused(self) -> int:
        """Compute slices that no MIG slice covers."""
        return max(0, compute_slices(self.gpu) - sum(one.compute for one in self.slices)) if self.split else 0

    @property
    def share(self) -> float:
        """Of one card."""
        return self.compute / compute_slices(self.parent) if self.parent else 1.0

    @property
    def kind(self) -> str:
        """H100, or A100 1g.10gb for a slice."""
        return f"{self.parent.model} {self.gpu.mig_profile}" if self.parent else self.gpu.model

    @property
    def label(self) -> str:
        """GPU 3, or GPU 3 · 1g.10gb"""
        return f"GPU {self.parent.index} · {self.gpu.mig_profile}" if self.parent else f"GPU {self.gpu.index}"

    @property
    def anchor(self) -> str:
        """Where it stands on the page of its node."""
        return f"gpu-{(self.parent or self.gpu).index}"

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
    def why_no_processes(self) -> str:
        return self.why_missing("processes")

    @property
    def memory_percent(self) -> float | None:
        used, total = self.memory_used_bytes, self.gpu.memory_total_bytes
        return None if used is None or not total else min(100.0, used / total * 100)

    def why_missing(self, name: str) -> str:
        missing = self.latest.get("missing") or {}
        reason = missing.get(name) or missing.get("gpu") or ("" if self.latest else "no reading yet")
        if reason == "not_supported" and (self.split or self.parent):
            reason = "mig"
        return missing_words(reason or "the driver gives none")


def cells(user: User, nodes: Iterable[Node]) -> dict[int, list[Cell]]:
    """By node id, in the order of their index, slices within their card. Three queries, however many GPUs there are."""
    by_id = {node.pk: node for node in nodes}
    held = holders(user, list(by_id))
    rows: dict[int, list[Gpu]] = {node_id: [] for node_id in by_id}
    for gpu in Gpu.objects.present().filter(node_id__in=list(by_id)).order_by("node_id", "index", "uuid"):
        gpu.node = by_id[gpu.node_id]  # whoever asks a cell's GPU for its machine need not ask the database
        rows[gpu.node_id].append(gpu)
    return {node_id: of_node(by_id[node_id], gpus, held) for node_id, gpus in rows.items()}


def of_node(node: Node, gpus: list[Gpu], held: dict[int, Holder]) -> list[Cell]:
    cards = {gpu.uuid for gpu in gpus if not gpu.parent_uuid}
    cut: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if gpu.parent_uuid in cards:
            cut.setdefault(gpu.parent_uuid, []).append(gpu)
    return [card(node, gpu, cut.get(gpu.uuid, []), held) for gpu in gpus if gpu.parent_uuid not in cards]


def card(node: Node, gpu: Gpu, cut: list[Gpu], held: dict[int, Holder]) -> Cell:
    holder = held.get(gpu.pk)
    state = state_of(gpu, node, holder)
    if not cut and not gpu.mig_enabled:
        return Cell(gpu, node, state, holder, gpu.latest)
    starts = {one.get("uuid"): one.get("start") or 0 for one in mig_of(gpu).get("instances") or []}
    cut = sorted(cut, key=lambda one: (starts.get(one.uuid, 0), one.index))
    slices = [slice_cell(node, gpu, one, held.get(one.pk)) for one in cut]
    return Cell(gpu, node, "mig" if state == "free" else state, holder, gpu.latest, slices)


def slice_cell(node: Node, parent: Gpu, gpu: Gpu, holder: Holder | None) -> Cell:
    """What is wrong with the card is wrong with its slices; what drains the card drains them."""
    state = state_of(gpu, node, holder)
    if parent.state != GpuState.OK and state in ("free", "busy", "mine", "draining"):
        state = state_of(parent, node, holder)
    elif state == "free" and parent.draining:
        state = "draining"
    return Cell(gpu, node, state, holder, gpu.latest, parent=parent)


def missing_words(reason: object) -> str:
    """Why a value is not known, for people."""
    text = str(reason)
    if text.startswith("error:"):
        return f"the driver answered with error {text.removeprefix('error:')}"
    return MISSING.get(text) or text.replace("_", " ")


def mig_of(gpu: Gpu) -> dict[str, Any]:
    """wire.hardware.MigStatus as a dict, empty if the node has told none."""
    return gpu.hardware.get("mig") or {}


def compute_slices(gpu: Gpu) -> int:
    """How many the whole card has."""
    return max((int(one.get("slices") or 0) for one in mig_of(gpu).get("profiles") or []), default=0) or COMPUTE_SLICES


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
    if gpu.draining or not node.schedulable:
        return "draining"
    # A node that was silent for a moment gets no new work either.
    return "free" if node.state == NodeState.READY else "suspect"
