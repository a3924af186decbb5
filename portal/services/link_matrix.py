"""How the GPUs and network cards of a node are joined, as a table."""

from dataclasses import dataclass
from typing import Any

from portal.hardware import links
from portal.hardware.links import End
from portal.models import Node
from portal.services.cells import Cell

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
    """How two things are joined. `tone` 1 is the fastest, 4 the slowest, 0 not known."""

    kind: str
    tone: int
    both_free: bool = False
    itself: bool = False
    nominal_gbs: float | None = None  # both directions together, of the pair alone
    words: str = ""
    why: str = ""  # if it is not known, or not there


@dataclass(frozen=True)
class NicRow:
    """wire.hardware.Nic for people."""

    told: dict[str, Any]
    nearest_kind: str
    nearest: str  # "0, 1"

    @property
    def name(self) -> str:
        return str(self.told.get("name") or "")


def matrix(node: Node, cells: list[Cell]) -> list[tuple[Cell, list[LinkCell]]]:
    """A row per GPU: first the GPUs, then the network cards."""
    kinds = {frozenset((a, b)): str(kind) for a, b, kind in node.links}
    ends = {cell.gpu.uuid: end_of(cell) for cell in cells}
    return [
        (row, [link(row, column, kinds, ends) for column in cells] + [nic_link(row, nic) for nic in node.nics])
        for row in cells
    ]


def link_kinds(node: Node) -> list[tuple[str, int, str]]:
    """Those that occur, the fastest first: kind, tone, in words."""
    found = {str(kind) for _, _, kind in node.links}
    found |= {str(kind) for nic in node.nics for kind in (nic.get("distances") or {}).values()}
    return sorted(((kind, tone_of(kind), words_of(kind, node)) for kind in found), key=lambda item: item[1:])


def nics(node: Node, cells: list[Cell]) -> list[NicRow]:
    return [nic_row(dict(nic), cells) for nic in node.nics]


# --- helpers ----------------------------------------------------------------------------------------------------------


def link(row: Cell, column: Cell, kinds: dict[frozenset[str], str], ends: dict[str, End]) -> LinkCell:
    if row.gpu.uuid == column.gpu.uuid:
        return LinkCell("", 0, itself=True)
    kind = kinds.get(frozenset((row.gpu.uuid, column.gpu.uuid)), "")
    if tone_of(kind) == 1 and (row.split or column.split):
        return LinkCell("", 0, why="MIG")  # slices of different cards do not reach each other
    joined = links.between(kind, ends[row.gpu.uuid], ends[column.gpu.uuid], row.node.nvswitch)
    both_free = row.free and column.free
    return LinkCell(kind, tone_of(kind), both_free, nominal_gbs=joined.nominal_gbs, words=joined.words)


def end_of(cell: Cell) -> End:
    """At its best: an idle GPU lowers the generation of its PCIe link to save power."""
    told = cell.gpu.hardware
    return End(
        name=cell.gpu.name,
        pci_bus_id=cell.gpu.pci_bus_id or None,
        nvlink_version=cell.gpu.details.get("nvlink_version"),
        pcie_generation=told.get("pcie_generation_max") or told.get("pcie_generation"),
        pcie_width=told.get("pcie_width_max") or told.get("pcie_width"),
        link_peers=tuple(
            str(one["remote_pci_bus_id"])
            for one in told.get("links") or []
            if one.get("active") and one.get("remote_pci_bus_id")
        ),
    )


def nic_link(row: Cell, nic: dict[str, Any]) -> LinkCell:
    kind = str((nic.get("distances") or {}).get(row.gpu.uuid) or "")
    return LinkCell(kind, tone_of(kind))


def nic_row(told: dict[str, Any], cells: list[Cell]) -> NicRow:
    distances = told.get("distances") or {}
    kind = min(distances.values(), key=nearness, default="")
    nearest = [str(cell.gpu.index) for cell in cells if kind and distances.get(cell.gpu.uuid) == kind]
    return NicRow(told, kind, ", ".join(nearest))


def nearness(kind: str) -> int:
    order = list(LINK_WORDS)
    return order.index(kind) if kind in order else len(order)


def tone_of(kind: str) -> int:
    return 1 if kind.startswith(("NV", "XGMI")) else LINK_CLASSES.get(kind, 0)


def words_of(kind: str, node: Node) -> str:
    if kind.startswith("NV"):
        return f"{kind[2:]} NVLinks" + (" through NVSwitch" if node.nvswitch else "")
    if kind.startswith("XGMI"):
        return "Infinity Fabric"
    return LINK_WORDS.get(kind, "")
