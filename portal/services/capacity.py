"""The cluster as the scheduler sees it, read in a fixed number of queries."""

from collections.abc import Iterator

from django.db.models import Count, Exists, OuterRef, Q

from portal.models import Allocation, Gpu, Node
from portal.scheduler.snapshot import GpuView, NodeView
from wire.states import ATTEMPT_ENDED, GpuState, NodeState

ENDED = [state.value for state in ATTEMPT_ENDED]


def node_views() -> Iterator[NodeView]:
    """Two queries, however large the cluster is."""
    held = Allocation.objects.filter(gpu=OuterRef("pk"), released_at=None)
    by_node: dict[int, list[GpuView]] = {}
    for gpu in Gpu.objects.present().filter(mig_profile="").annotate(held=Exists(held)).order_by("node_id", "index"):
        by_node.setdefault(gpu.node_id, []).append(gpu_view(gpu, held=gpu.held))
    open_shares = Count("shares", filter=~Q(shares__state__in=ENDED))
    for node in Node.objects.annotate(open_shares=open_shares).order_by("name"):
        yield NodeView(
            name=node.name,
            gpus=tuple(by_node.get(node.pk, ())),
            links=tuple((a, b, kind) for a, b, kind in node.links),
            nvswitch=node.nvswitch,
            unavailable=unavailable(node),
            busy_shares=node.open_shares,
        )


def gpu_view(gpu: Gpu, *, held: bool) -> GpuView:
    return GpuView(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        model=gpu.model,
        memory_bytes=gpu.memory_total_bytes,
        free=not held,
        healthy=gpu.state == GpuState.OK,
    )


def unavailable(node: Node) -> str:
    """-> why it gets no new work, or nothing."""
    if not node.schedulable:
        return "cordoned"
    return "" if node.state == NodeState.READY else str(node.state)
