"""The cluster as the scheduler sees it, read in a fixed number of queries."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from django.db.models import Count, Exists, OuterRef, QuerySet, Subquery

from portal.models import Allocation, Gpu, Health, Node, Share
from portal.scheduler.snapshot import GpuView, NodeView
from wire.states import ATTEMPT_ENDED, GpuState, NodeState

BROKEN = (GpuState.SUSPECT, GpuState.QUARANTINED, GpuState.LOST)
ENDED = [state.value for state in ATTEMPT_ENDED]
GPU_COLUMNS = (
    "node_id", "uuid", "index", "name", "model", "memory_total_bytes", "state", "mig_enabled", "mig_profile",
    "parent_uuid", "draining",
)  # fmt: skip
NODE_COLUMNS = ("name", "state", "schedulable", "links", "nvswitch")


def node_views() -> Iterator[NodeView]:
    """Two queries, however large the cluster and its past are."""
    by_node = gpu_views()
    still_open = Share.objects.filter(node=OuterRef("pk"), forgotten_at=None).exclude(state__in=ENDED)
    open_shares = still_open.order_by().values("node").annotate(count=Count("pk")).values("count")
    nodes = with_room(Node.objects.annotate(open_shares=Subquery(open_shares))).only(*NODE_COLUMNS)
    for node in nodes.order_by("name"):
        yield NodeView(
            name=node.name,
            gpus=tuple(by_node.get(node.pk, ())),
            links=tuple((a, b, kind) for a, b, kind in node.links),
            nvswitch=node.nvswitch,
            unavailable=unavailable(node),
            busy_shares=node.open_shares or 0,
        )


def gpu_views() -> dict[int, list[GpuView]]:
    """By node. Plain tuples from the database: a large cluster has thousands of cards, and a cycle reads them all."""
    held = Allocation.objects.filter(gpu=OuterRef("pk"), released_at=None)
    cards = Gpu.objects.present().annotate(held=Exists(held)).order_by("node_id", "index", "uuid")
    rows = list(cards.values_list(*GPU_COLUMNS, "held", named=True))
    closed = closed_cards(rows)
    by_node: dict[int, list[GpuView]] = {}
    for row in rows:
        if not row.mig_enabled:  # a card that is cut is for nobody: its slices are
            by_node.setdefault(row.node_id, []).append(gpu_view(row, closed.get(row.parent_uuid)))
    return by_node


def gpu_view(row: Any, closed_card: Any) -> GpuView:
    """A slice is no better off than the card it is cut from."""
    above = (row,) if closed_card is None else (row, closed_card)
    return GpuView(
        row.uuid, row.index, row.name, row.model, row.memory_total_bytes, mig=row.mig_profile,
        free=not row.held and not any(one.draining for one in above),
        healthy=row.state == GpuState.OK and (closed_card is None or closed_card.state not in BROKEN),
        trouble=next((one.state for one in above if one.state != GpuState.OK), ""),
    )  # fmt: skip


def closed_cards(gpus: Iterable[Any]) -> dict[str, Any]:
    """By UUID, the cut cards whose slices get no work: about to be changed, or broken themselves."""
    return {gpu.uuid: gpu for gpu in gpus if gpu.mig_enabled and (gpu.draining or gpu.state in BROKEN)}


def offered(gpus: Collection[Any]) -> set[str]:
    """-> the UUIDs of whole cards that are not cut, and of slices; not of what is broken or about to be changed."""
    closed = closed_cards(gpus)
    return {
        gpu.uuid for gpu in gpus
        if gpu.state == GpuState.OK and not gpu.mig_enabled and not gpu.draining and gpu.parent_uuid not in closed
    }  # fmt: skip


def with_room(nodes: QuerySet[Any]) -> QuerySet[Any]:
    """As `unavailable` wants to see them."""
    full = Health.objects.filter(node=OuterRef("pk"), kind="disk", resolved_at=None)
    return nodes.annotate(full=Exists(full))


def unavailable(node: Node) -> str:
    """-> why it gets no new work, or nothing."""
    if not node.schedulable:
        return "cordoned"
    if getattr(node, "full", False):
        return "short of disk space"
    return "" if node.state == NodeState.READY else str(node.state)
