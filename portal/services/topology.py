"""How a node is wired: its GPUs, how each pair is joined and how fast that is on paper, its network cards."""

from dataclasses import dataclass
from typing import Any

from portal.hardware.links import End, Joined, between
from portal.models import Gpu, Node

SELF = "X"
UNKNOWN_NIC: dict[str, Any] = {
    "name": "",
    "pci_bus_id": None,
    "numa_node": None,
    "rdma": False,
    "link_layer": None,
    "rate_gbps": None,
    "state": None,
    "distances": {},
}


@dataclass(frozen=True)
class GpuPlace:
    uuid: str
    index: int
    name: str
    pci_bus_id: str | None
    numa_node: int | None
    cpu_affinity: str | None
    parent_uuid: str | None
    mig_profile: str | None
    nvlinks: int | None  # that are up; of AMD's cards those of XGMI
    pcie_generation: int | None  # at most
    pcie_width: int | None


@dataclass(frozen=True)
class Pair:
    a: str
    b: str
    kind: str
    nominal_gbs: float | None
    words: str


@dataclass(frozen=True)
class Topology:
    node: str
    nvswitch: bool
    gpus: list[GpuPlace]
    links: list[Pair]
    matrix: list[list[str]]
    nics: list[dict[str, Any]]


def topology(node: Node) -> Topology:
    gpus = list(Gpu.objects.present().filter(node=node).order_by("index", "uuid"))
    pairs = [Pair(a, b, one.kind, one.nominal_gbs, one.words) for (a, b), one in joined(node, gpus).items()]
    kinds = {frozenset((pair.a, pair.b)): pair.kind for pair in pairs}
    matrix = [[SELF if a is b else kinds.get(frozenset((a.uuid, b.uuid)), "") for b in gpus] for a in gpus]
    return Topology(node.name, node.nvswitch, [place(gpu) for gpu in gpus], pairs, matrix,
                    [nic(dict(told)) for told in node.nics])  # fmt: skip


def joined(node: Node, gpus: list[Gpu]) -> dict[tuple[str, str], Joined]:
    """By the UUIDs of a pair, in the order of its node's report; pairs of GPUs that are here."""
    ends = {gpu.uuid: end(gpu) for gpu in gpus}
    return {
        (a, b): between(str(kind), ends[a], ends[b], node.nvswitch)
        for a, b, kind in node.links
        if a in ends and b in ends
    }


def end(gpu: Gpu) -> End:
    told = gpu.hardware
    up = [link for link in told.get("links") or [] if link.get("active")]
    return End(
        gpu.name,
        gpu.pci_bus_id or None,
        gpu.details.get("nvlink_version"),
        *pcie(told),
        link_peers=tuple(str(link["remote_pci_bus_id"]) for link in up if link.get("remote_pci_bus_id")),
    )


def pcie(told: dict[str, Any]) -> tuple[int | None, int | None]:
    """What the card and its slot can do together: at the moment it may save power."""
    return (told.get("pcie_generation_max") or told.get("pcie_generation"),
            told.get("pcie_width_max") or told.get("pcie_width"))  # fmt: skip


def place(gpu: Gpu) -> GpuPlace:
    generation, width = pcie(gpu.hardware)
    links = gpu.hardware.get("links")
    return GpuPlace(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        pci_bus_id=gpu.pci_bus_id or None,
        numa_node=gpu.numa_node,
        cpu_affinity=gpu.details.get("cpu_affinity"),
        parent_uuid=gpu.parent_uuid or None,
        mig_profile=gpu.mig_profile or None,
        nvlinks=sum(1 for link in links if link.get("active")) if links else gpu.details.get("nvlink_count"),
        pcie_generation=generation,
        pcie_width=width,
    )


def nic(told: dict[str, Any]) -> dict[str, Any]:
    """Every field, also those that the node left out."""
    return UNKNOWN_NIC | {name: value for name, value in told.items() if name in UNKNOWN_NIC}
