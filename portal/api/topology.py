"""How the GPUs and network cards of a node are joined."""

from django.http import HttpRequest
from ninja import Router, Schema

from portal.api.auth import user_of
from portal.api.requests import allow_only
from portal.services import access, topology

router = Router()


class TopologyGpuOut(Schema):
    """`numa_node` and `cpu_affinity` are null where the node does not know them."""

    uuid: str
    index: int
    name: str
    pci_bus_id: str | None
    numa_node: int | None
    cpu_affinity: str | None
    parent_uuid: str | None
    mig_profile: str | None
    nvlinks: int | None
    pcie_generation: int | None
    pcie_width: int | None


class PairOut(Schema):
    """`nominal_gbs`: GB/s of both directions together on paper, of this pair alone; null if not known."""

    a: str
    b: str
    kind: str
    nominal_gbs: float | None
    words: str


class NicOut(Schema):
    """`distances` by GPU UUID: PIX, PXB, PHB, NODE or SYS."""

    name: str
    pci_bus_id: str | None
    numa_node: int | None
    rdma: bool
    link_layer: str | None
    rate_gbps: float | None
    state: str | None
    distances: dict[str, str]


class TopologyOut(Schema):
    """`matrix` has a row per GPU in the order of `gpus`, as people know it; "" where nothing is known."""

    node: str
    nvswitch: bool
    gpus: list[TopologyGpuOut]
    links: list[PairOut]
    matrix: list[list[str]]
    nics: list[NicOut]


@router.get("/{name}/topology", response=TopologyOut, url_name="node_topology", summary="How a node is wired")
def get_topology(request: HttpRequest, name: str) -> topology.Topology:
    allow_only(request)
    return topology.topology(access.get_node(user_of(request), name))
