"""The network cards of simulated nodes, as their makers place them. Those of the machine beneath are not theirs."""

from collections.abc import Iterable
from dataclasses import dataclass

from wire.hardware import Nic
from wire.reports import GpuInfo


@dataclass(frozen=True, slots=True)
class Fitting:
    """`level` from a card to the GPUs that it sits beside, which are `beside` many."""

    level: str
    beside: int
    link_layer: str
    rate_gbps: float


FITTINGS = {
    "DGX-H100-8": Fitting("PIX", 1, "InfiniBand", 400.0),
    "HGX-H200-8": Fitting("PIX", 1, "InfiniBand", 400.0),
    "HGX-B200-8": Fitting("PIX", 1, "InfiniBand", 400.0),
    "MI300X-8": Fitting("PIX", 1, "Ethernet", 400.0),
    "DGX-A100-8": Fitting("PXB", 2, "InfiniBand", 200.0),
}


def nics(topology: str, infos: Iterable[GpuInfo]) -> list[Nic]:
    """One card per GPU; none where nothing is known."""
    fitting = FITTINGS.get(topology)
    gpus = list(infos)
    owners = {info.index: info for info in gpus if info.parent_uuid is None}
    return [nic(owners[index], gpus, fitting) for index in sorted(owners)] if fitting else []


def nic(owner: GpuInfo, gpus: list[GpuInfo], fitting: Fitting) -> Nic:
    return Nic(
        name=f"mlx5_{owner.index}", pci_bus_id=f"0000:{0x90 + 8 * owner.index:02x}:00.0",
        numa_node=owner.numa_node, rdma=True, link_layer=fitting.link_layer, rate_gbps=fitting.rate_gbps,
        state="active",
        distances={gpu.uuid: distance(owner, gpu, fitting) for gpu in gpus},
    )


def distance(owner: GpuInfo, gpu: GpuInfo, fitting: Fitting) -> str:
    if owner.index // fitting.beside == gpu.index // fitting.beside:
        return fitting.level
    return "NODE" if gpu.numa_node == owner.numa_node else "SYS"
