"""The cluster as the scheduler sees it, read in a fixed number of queries."""

from collections.abc import Iterator

from django.db.models import Count, Exists, OuterRef, Subquery

from portal.models import Allocation, Gpu, Node, Share
from portal.scheduler.snapshot import GpuView, NodeView
from wire.states import ATTEMPT_ENDED, GpuState, NodeState

ENDED = [state.value for state in ATTEMPT_ENDED]
NODE_COLUMNS = ("name", "state", "schedulable", "links", "nvswitch")


def node_views() -> Iterator[NodeView]:
    """Two queries, however large the cluster and its past are."""
    by_node = gpu_views()
    still_open = Share.objects.filter(node=OuterRef("pk"), forgotten_at=None).exclude(state__in=ENDED)
    open_shares = still_open.order_by().values("node").annotate(count=Count("pk")).values("count")
    nodes = Node.objects.annotate(open_shares=Subquery(open_shares)).only(*NODE_COLUMNS)
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
    whole_cards = Gpu.objects.present().filter(mig_profile="").annotate(held=Exists(held)).order_by("node_id", "index")
    columns = ("node_id", "uuid", "index", "name", "model", "memory_total_bytes", "held", "state")
    by_node: dict[int, list[GpuView]] = {}
    for node_id, uuid, index, name, model, memory_bytes, taken, state in whole_cards.values_list(*columns):
        view = GpuView(uuid, index, name, model, memory_bytes, free=not taken, healthy=state == GpuState.OK)
        by_node.setdefault(node_id, []).append(view)
    return by_node


def unavailable(node: Node) -> str:
    """-> why it gets no new work, or nothing."""
    if not node.schedulable:
        return "cordoned"
    return "" if node.state == NodeState.READY else str(node.state)
