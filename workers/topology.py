"""The network cards of this machine and how far each is from the GPUs, by the kernel's tree of PCI devices.

The levels are those of GPUs among themselves: PIX below one PCIe switch, PXB across several, PHB through a host bridge,
NODE within a NUMA node, SYS across. What the kernel does not know is None.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from wire.hardware import Nic

ROOT = Path("/sys")
NETWORK_CLASS = "0x02"
BELOW_ONE_SWITCH = 2  # the port of the switch, and the device behind it
CLIMB = 2  # from an interface to its card: virtio stands between
BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
RATE = re.compile(r"([0-9.]+)\s*Gb/sec")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device sits: the host bridge, the bridges below it, and itself."""

    chain: tuple[str, ...]
    numa_node: int | None


def nics(gpus: Mapping[str, str | None], root: Path = ROOT) -> list[Nic]:
    """`gpus`: UUID -> PCI bus id, as its driver writes it. Sorted by name."""
    places = {uuid: place for uuid, bus in gpus.items() if bus and (place := place_of(root, bus))}
    one_node = len(list((root / "devices/system/node").glob("node[0-9]*"))) <= 1
    found = []
    for nic, card in cards(root):
        here = place_at(card)
        nic.distances = {uuid: distance(here, place, one_node) for uuid, place in places.items()}
        found.append(nic)
    return sorted(found, key=lambda nic: (not nic.rdma, natural(nic.name)))


def distance(a: Place, b: Place, one_numa_node: bool = False) -> str:
    shared = next((level for level, (x, y) in enumerate(zip(a.chain, b.chain, strict=False)) if x != y),
                  min(len(a.chain), len(b.chain)))
    if shared == 0:
        same_node = a.numa_node is not None and a.numa_node == b.numa_node
        return "NODE" if same_node or one_numa_node else "SYS"
    if shared == 1:
        return "PHB"
    deepest = max(len(a.chain), len(b.chain)) - shared
    return "PIX" if deepest <= BELOW_ONE_SWITCH else "PXB"


def place_of(root: Path, bus_id: str) -> Place | None:
    name = kernel_name(bus_id)
    device = root / "bus/pci/devices" / name if name else None
    return place_at(device) if device and device.exists() else None


def place_at(device: Path) -> Place:
    parts = device.resolve().parts
    first = next((at for at, part in enumerate(parts) if HOST_BRIDGE.fullmatch(part)), len(parts) - 1)
    return Place(parts[first:], whole(device / "numa_node"))


def kernel_name(bus_id: str) -> str | None:
    """Drivers write the domain with four digits or eight, in capitals or not; the kernel at least four, small."""
    match = BUS_ID.fullmatch(bus_id.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def cards(root: Path) -> Iterator[tuple[Nic, Path]]:
    """One per network device on the bus, named by its RDMA device if it has one. No virtual functions."""
    told: set[Path] = set()
    for device in sorted((root / "class/infiniband").glob("*")):
        card = card_of(device)
        if card and card not in told:
            told.add(card)
            yield rdma_nic(device, card), card
    for interface in sorted((root / "class/net").glob("*")):
        card = card_of(interface)
        if card and card not in told:
            told.add(card)
            yield ethernet_nic(interface, card), card


def card_of(entry: Path) -> Path | None:
    device = (entry / "device").resolve()
    for place in (device, *device.parents[:CLIMB]):
        if content(place / "class").startswith(NETWORK_CLASS):
            return None if (place / "physfn").exists() else place
    return None


def rdma_nic(device: Path, card: Path) -> Nic:
    port = next(iter(sorted((device / "ports").glob("*"))), device)
    rate = RATE.match(content(port / "rate"))
    return Nic(
        name=device.name, pci_bus_id=card.name, numa_node=whole(card / "numa_node"), rdma=True,
        link_layer=content(port / "link_layer") or None, rate_gbps=float(rate[1]) if rate else None,
        state=content(port / "state").rpartition(":")[2].strip().lower() or None,
    )


def ethernet_nic(interface: Path, card: Path) -> Nic:
    """Without a cable the kernel says -1, or fails."""
    megabits = whole(interface / "speed")
    return Nic(
        name=interface.name, pci_bus_id=card.name, numa_node=whole(card / "numa_node"), link_layer="Ethernet",
        rate_gbps=megabits / 1000 if megabits else None, state=content(interface / "operstate") or None,
    )


def whole(path: Path) -> int | None:
    """A number that is one: the kernel writes -1 for unknown."""
    try:
        number = int(content(path))
    except ValueError:
        return None
    return number if number >= 0 else None


def content(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def natural(name: str) -> list[tuple[int, str]]:
    """mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
