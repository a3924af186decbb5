"""GET /nodes/{name}/topology: how the GPUs and cards of a node are joined, and how fast that is on paper."""

from typing import Any

from portal.models import Gpu, Node
from portal.services import hardware_reports
from tests.portal.conftest import Api, Cast, gpu_uuid, make_node
from wire.hardware import GpuHardware, Hardware, Nic, NvLink


def report(node: Node, *gpus: GpuHardware, nics: list[Nic] | None = None) -> None:
    hardware_reports.apply(node, Hardware(at=1.0, gpus=list(gpus), nics=nics or []))


def answer(api: dict[str, Api], name: str = "n1") -> dict[str, Any]:
    response = api["bob"].get(f"/nodes/{name}/topology")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def test_a_switched_node_tells_every_pair_with_its_bandwidth(api: dict[str, Api]) -> None:
    node = make_node(nvswitch=True)
    Gpu.objects.filter(node=node).update(
        pci_bus_id="00000000:07:00.0", numa_node=1, details={"cpu_affinity": "56-111", "nvlink_version": 4,
                                                            "nvlink_count": 18})
    found = answer(api)
    assert (found["node"], found["nvswitch"], len(found["gpus"]), len(found["links"])) == ("n1", True, 8, 28)
    assert {(pair["kind"], pair["nominal_gbs"]) for pair in found["links"]} == {("NV18", 900.0)}
    assert "through NVSwitch" in found["links"][0]["words"]
    first = found["gpus"][0]
    assert (first["index"], first["numa_node"], first["cpu_affinity"], first["nvlinks"]) == (0, 1, "56-111", 18)
    assert (first["pcie_generation"], first["mig_profile"], first["pci_bus_id"]) == (None, None, "00000000:07:00.0")
    assert [row[place] for place, row in enumerate(found["matrix"])] == ["X"] * 8
    assert {kind for row in found["matrix"] for kind in row} == {"X", "NV18"} and found["nics"] == []


def test_pcie_pairs_are_as_fast_as_what_their_cards_reported(api: dict[str, Api]) -> None:
    node = make_node(gpus=3, model="L40S")
    a, b, c = (gpu_uuid("n1", index) for index in range(3))
    node.links = [[a, b, "PIX"], [a, c, "SYS"]]
    node.save(update_fields=["links"])
    report(node, *(GpuHardware(uuid=uuid, pcie_generation=1, pcie_width=16, pcie_generation_max=4, pcie_width_max=width)
                   for uuid, width in ((a, 16), (b, 8))))
    found = answer(api)
    assert [(pair["b"], pair["kind"], pair["nominal_gbs"]) for pair in found["links"]] == [
        (b, "PIX", 31.5), (c, "SYS", None)]
    assert found["matrix"] == [["X", "PIX", "SYS"], ["PIX", "X", ""], ["SYS", "", "X"]]
    assert "not told yet" in found["links"][1]["words"]


def test_the_links_of_an_amd_pair_are_counted_from_what_its_cards_reported(api: dict[str, Api]) -> None:
    node = make_node(gpus=2)
    a, b = (gpu_uuid("n1", index) for index in range(2))
    Gpu.objects.filter(node=node).update(vendor="amd", name="AMD Instinct MI250X")
    Gpu.objects.filter(uuid=a).update(pci_bus_id="0000:0c:00.0")
    Gpu.objects.filter(uuid=b).update(pci_bus_id="0000:1c:00.0")
    node.links = [[a, b, "XGMI"]]
    node.save(update_fields=["links"])

    def links(peer: str, up: int) -> list[NvLink]:
        return [NvLink(link=place, active=place < up, remote_pci_bus_id=peer) for place in range(4)]

    report(node, GpuHardware(uuid=a, links=links("0000:1c:00.0", 4)),
           GpuHardware(uuid=b, links=links("0000:0c:00.0", 3)))
    found = answer(api)
    assert found["links"][0]["nominal_gbs"] == 300.0 and found["links"][0]["words"] == "3 Infinity Fabric links."
    assert [gpu["nvlinks"] for gpu in found["gpus"]] == [4, 3]


def test_network_cards_are_listed_with_their_distances(api: dict[str, Api]) -> None:
    node = make_node(gpus=1)
    uuid = gpu_uuid("n1", 0)
    known = Nic(name="mlx5_0", pci_bus_id="0000:1a:00.0", numa_node=0, rdma=True, link_layer="InfiniBand",
                rate_gbps=400.0, state="active", distances={uuid: "PIX"})
    report(node, nics=[known, Nic(name="eth0")])
    first, second = answer(api)["nics"]
    assert first == {"name": "mlx5_0", "pci_bus_id": "0000:1a:00.0", "numa_node": 0, "rdma": True,
                     "link_layer": "InfiniBand", "rate_gbps": 400.0, "state": "active", "distances": {uuid: "PIX"}}
    assert (second["name"], second["rate_gbps"], second["rdma"], second["distances"]) == ("eth0", None, False, {})


def test_links_of_gpus_that_are_gone_are_left_out(api: dict[str, Api]) -> None:
    node = make_node(gpus=3)
    Gpu.objects.filter(uuid=gpu_uuid("n1", 2)).update(present=False)
    found = answer(api)
    assert len(found["gpus"]) == 2 and len(found["links"]) == 1 and len(found["matrix"]) == 2
    assert node.pk


def test_who_may_see_it_and_what_is_refused(api: dict[str, Api], cast: Cast) -> None:
    make_node()
    assert api["nobody"].get("/nodes/n1/topology").status_code == 401
    assert api["charlie"].get("/nodes/n1/topology").status_code == 200
    assert api["bob"].get("/nodes/no-such/topology").status_code == 404
    assert api["bob"].get("/nodes/n1/topology?deep=1").status_code == 400
