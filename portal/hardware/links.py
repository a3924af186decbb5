"""How fast two GPUs of a node are joined on paper, and in words. Measured figures are lower, and links are shared.

Figures are GB/s (decimal) of both directions together, of a pair alone. Sources: NVLink and XGMI per link from the
vendors' pages as collected in stas00/ml-engineering (network/README.md); PCIe from its line rate and encoding.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

NVLINK_GBS = {1: 40.0, 2: 50.0, 3: 50.0, 4: 50.0, 5: 100.0}
"""Of one link, by generation."""

NVLINK_GENERATIONS = {"P100": 1, "V100": 2, "A100": 3, "A800": 3, "A30": 3, "A40": 3, "A6000": 3, "H100": 4, "H800": 4,
                      "H200": 4, "H20": 4, "GH200": 4, "B100": 5, "B200": 5, "GB200": 5, "B300": 5, "GB300": 5}
"""By model, for nodes whose driver does not tell."""

BRIDGED_GBS = {"A40": 28.125, "A6000": 28.125}
"""Workstation cards whose links are narrower; four of them make 112.5."""

XGMI_GBS = {"MI250X": 100.0, "MI250": 100.0, "MI210": 100.0, "MI300X": 128.0, "MI300A": 128.0, "MI325X": 128.0}
"""Of one link, by model."""

FULL_MESH = frozenset({"MI300X", "MI325X"})
"""Boards on which every pair has exactly one link."""

PCIE_LANE_GBS = {1: 0.5, 2: 1.0, 3: 15.75 / 8, 4: 31.5 / 8, 5: 63.0 / 8, 6: 121.0 / 8}
"""Of one lane, both directions together."""

PCIE_WORDS = {
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the PCIe host bridge of one processor",
    "NODE": "through the processor, between its host bridges",
    "SYS": "across processors",
}
BUS_ID = re.compile(r"(?:0*([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
WORD = re.compile(r"[A-Z0-9]+")


@dataclass(frozen=True)
class End:
    """What is known of one GPU of a pair. `link_peers` are the PCI ids at the other ends of its active links."""

    name: str
    pci_bus_id: str | None = None
    nvlink_version: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    link_peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Joined:
    """`nominal_gbs` None: not known, the reason is in `words`."""

    kind: str
    nominal_gbs: float | None
    words: str


def between(kind: str, a: End, b: End, nvswitch: bool = False) -> Joined:
    if kind.startswith("NV"):
        return by_nvlink(kind, a, b, nvswitch)
    if kind.startswith("XGMI"):
        return by_xgmi(kind, a, b)
    if kind in PCIE_WORDS:
        return by_pcie(kind, a, b)
    return Joined(kind, None, "How they are joined is not known.")


def by_nvlink(kind: str, a: End, b: End, nvswitch: bool) -> Joined:
    count = int(kind[2:]) if kind[2:].isdecimal() else 1
    links = f"{count} NVLink{'s' if count > 1 else ''}"
    generations = [found for end in (a, b) if (found := nvlink_generation(end)) is not None]
    if not generations:
        return Joined(kind, None, f"{links} of a generation that is not known.")
    generation = min(generations)
    per_link = min(BRIDGED_GBS.get(model_of(end.name, BRIDGED_GBS) or "", NVLINK_GBS[generation]) for end in (a, b))
    way = " through NVSwitch, shared by all its peers at the time" if nvswitch else ""
    return Joined(kind, count * per_link, f"{links} of generation {generation}{way}.")


def nvlink_generation(end: End) -> int | None:
    if end.nvlink_version in NVLINK_GBS:
        return end.nvlink_version
    model = model_of(end.name, NVLINK_GENERATIONS)
    return NVLINK_GENERATIONS[model] if model else None


def by_xgmi(kind: str, a: End, b: End) -> Joined:
    """The library says that a pair is joined by XGMI also when another GPU lies between."""
    per_link = min((XGMI_GBS[model] for end in (a, b) if (model := model_of(end.name, XGMI_GBS))), default=None)
    if per_link is None:
        return Joined(kind, None, "Infinity Fabric of a board that is not known.")
    count = xgmi_links(a, b)
    if count is None:
        return Joined(kind, None, "Infinity Fabric; how many links the pair has its node has not told yet.")
    if count == 0:
        return Joined(kind, None, "Infinity Fabric through another GPU: there is no link of the pair alone.")
    return Joined(kind, count * per_link, f"{count} Infinity Fabric link{'s' if count > 1 else ''}.")


def xgmi_links(a: End, b: End) -> int | None:
    counts = [sum(same_place(peer, other.pci_bus_id) for peer in end.link_peers)
              for end, other in ((a, b), (b, a)) if end.link_peers and other.pci_bus_id]
    if counts:
        return min(counts)
    return 1 if model_of(a.name, FULL_MESH) and model_of(b.name, FULL_MESH) else None


def by_pcie(kind: str, a: End, b: End) -> Joined:
    lanes = [(end.pcie_generation, end.pcie_width) for end in (a, b)]
    speeds = [PCIE_LANE_GBS[generation] * width for generation, width in lanes
              if generation in PCIE_LANE_GBS and width]
    if len(speeds) < 2:
        return Joined(kind, None, f"PCIe {PCIE_WORDS[kind]}; how wide it is its node has not told yet.")
    slowest = min(range(2), key=lambda place: speeds[place])
    generation, width = lanes[slowest]
    shared = ", shared by all that crosses there" if kind in ("NODE", "SYS") else ""
    words = f"PCIe generation {generation} x{width} {PCIE_WORDS[kind]}{shared}."
    return Joined(kind, round(speeds[slowest], 1), words)


def model_of(name: str, known: Iterable[str]) -> str | None:
    """The longest known model that is a word of the driver's name."""
    words = set(WORD.findall(name.upper()))
    return max((model for model in known if model in words), key=len, default=None)


def same_place(one: str, other: str | None) -> bool:
    """Drivers write the domain with four digits or with eight."""
    a, b = place_of(one), place_of(other or "")
    return a is not None and a == b


def place_of(bus_id: str) -> tuple[int, int, int, int] | None:
    match = BUS_ID.fullmatch(bus_id.strip())
    if match is None:
        return None
    return tuple(int(part or "0", 16) for part in match.groups())  # type: ignore[return-value]
