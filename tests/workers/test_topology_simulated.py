"""Simulated nodes have the network cards that such nodes come with, not those of the machine beneath."""

import pytest

from workers.gpus import load, sim_nics, simulated, simulated_amd


@pytest.mark.parametrize(("topology", "rows"), [
    ("DGX-H100-8", ["PIX NODE NODE NODE SYS SYS SYS SYS", "NODE PIX NODE NODE SYS SYS SYS SYS"]),
    ("DGX-A100-8", ["PXB PXB SYS SYS SYS SYS SYS SYS", "PXB PXB SYS SYS SYS SYS SYS SYS"]),
    ("MI300X-8", ["PIX NODE NODE NODE SYS SYS SYS SYS", "NODE PIX NODE NODE SYS SYS SYS SYS"]),
    ("RTX4090-8-PCIe", []),
])
def test_cards_lie_as_their_makers_place_them(topology: str, rows: list[str]) -> None:
    try:
        driver = load("simulated", topology=topology, node="nics")
        driver.start()
        infos = driver.enumerate().infos
        found = sim_nics.nics(topology, infos)
    finally:
        simulated.uninstall()
        simulated_amd.uninstall()
    assert [" ".join(nic.distances[info.uuid] for info in infos) for nic in found[:2]] == rows
    assert len({nic.pci_bus_id for nic in found}) == len(found) == (8 if rows else 0)
    assert all(nic.rdma and nic.rate_gbps and nic.state == "active" for nic in found)
