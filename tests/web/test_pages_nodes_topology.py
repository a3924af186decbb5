"""The drawing of a machine: only what was reported, each GPU where it hangs."""

import pytest

from portal.models import Gpu, Node
from portal.services import node_details
from portal.services.topology_drawing import Drawing
from tests.portal.conftest import Cast, gpu_uuid, make_node
from tests.web.test_pages_overview import page

pytestmark = pytest.mark.django_db


@pytest.fixture
def node(cast: Cast, broker_url: str) -> Node:
    return make_node("h1", gpus=8, nvswitch=True)


def drawn(cast: Cast, node: Node) -> Drawing:
    found = node_details.detail(cast.bob, Node.objects.get(pk=node.pk)).drawing
    assert found is not None
    return found


def texts(found: Drawing) -> list[str]:
    return [box.text for box in found.boxes]


def dgx(node: Node) -> None:
    for gpu in node.gpus.all():
        Gpu.objects.filter(pk=gpu.pk).update(numa_node=gpu.index // 4)
    places = {"PIX": lambda index, nic: index // 2 == nic, "NODE": lambda index, nic: index // 4 == nic // 2}
    node.nics = [
        {"name": f"mlx5_{nic}", "distances": {
            gpu_uuid("h1", index): next((kind for kind, at in places.items() if at(index, nic)), "SYS")
            for index in range(8)}}
        for nic in range(4)
    ]  # fmt: skip
    node.save(update_fields=["nics"])


def test_a_dgx_has_two_domains_four_switches_with_their_cards_and_one_nvswitch(cast: Cast, node: Node) -> None:
    dgx(node)
    found = drawn(cast, node)
    assert texts(found).count("PCIe switch") == 4 and {"NUMA 0", "NUMA 1", "mlx5_0", "mlx5_3"} <= set(texts(found))
    assert "NVSwitch, NV18" in texts(found)
    assert [line.kind for line in found.lines].count("fast") == 8
    assert found.words == "8 GPUs on NUMA 0, NUMA 1; 4 PCIe switches; all joined by NVSwitch"
    for first in found.boxes:
        for other in found.boxes:
            apart = (first.x + first.width <= other.x or other.x + other.width <= first.x
                     or first.y + first.height <= other.y or other.y + other.height <= first.y)  # fmt: skip
            assert first is other or apart, (first, other)
        assert first.x >= 0 and first.x + first.width <= found.width and first.y + first.height <= found.height


def test_dead_links_and_cut_cards_are_seen_on_their_line(cast: Cast, node: Node) -> None:
    links = [{"link": number, "active": number > 4} for number in range(18)]
    node.gpus.filter(index=2).update(hardware={"links": links})
    node.gpus.filter(index=3).update(mig_enabled=True)
    labels = {line.kind: line.label for line in drawn(cast, node).lines if line.label}
    assert labels == {"down": "13 of 18", "off": "MIG"}


def test_pairs_are_arcs_and_a_switch_that_nobody_reported_is_not_drawn(cast: Cast, node: Node) -> None:
    uuids = [gpu_uuid("h1", index) for index in range(8)]
    node.links = [[uuids[0], uuids[1], "NV4"], [uuids[2], uuids[3], "NV4"], [uuids[0], uuids[2], "SYS"]]
    node.nvswitch = False
    node.save(update_fields=["links", "nvswitch"])
    found = drawn(cast, node)
    assert [line.label for line in found.lines if line.kind == "fast"] == ["NV4", "NV4"]
    assert "PCIe switch" not in texts(found) and texts(found).count("PCIe") == 1
    assert all(f"G{index}" in texts(found) for index in range(8))


def test_gpus_behind_one_switch_stand_together(cast: Cast, node: Node) -> None:
    uuids = [gpu_uuid("h1", index) for index in range(8)]
    node.links = [[uuids[a], uuids[b], "PIX" if a // 4 == b // 4 else "SYS"] for a in range(8) for b in range(a + 1, 8)]
    node.nvswitch = False
    node.save(update_fields=["links", "nvswitch"])
    assert texts(drawn(cast, node)).count("PCIe switch") == 2


def test_nothing_known_is_said_and_not_drawn(cast: Cast, node: Node) -> None:
    Node.objects.filter(pk=node.pk).update(links=[])
    assert "has not told how its GPUs are joined" in page(cast.bob, "/nodes/h1/")
    alone = make_node("h2", gpus=1)
    assert node_details.detail(cast.bob, alone).drawing is None


def test_pairs_have_their_nominal_bandwidth_in_the_matrix(cast: Cast, node: Node) -> None:
    node.gpus.update(name="NVIDIA H100 80GB HBM3")
    row = node_details.detail(cast.bob, node).matrix[0][1]
    assert (row[1].kind, row[1].nominal_gbs, row[1].both_free) == ("NV18", 900.0, True)
    html = page(cast.bob, "/nodes/h1/")
    assert "NV18<small>900</small>" in html and "18 NVLinks of generation 4 through NVSwitch" in html


def test_a_pcie_pair_of_unknown_width_has_no_figure(cast: Cast, node: Node) -> None:
    uuids = [gpu_uuid("h1", index) for index in range(2)]
    Node.objects.filter(pk=node.pk).update(links=[[*uuids, "SYS"]])
    cell = node_details.detail(cast.bob, Node.objects.get(pk=node.pk)).matrix[0][1][1]
    assert cell.nominal_gbs is None and "has not told yet" in cell.words
    told = {"pcie_generation": 1, "pcie_width": 16, "pcie_generation_max": 4, "pcie_width_max": 16}
    node.gpus.update(hardware=told)
    cell = node_details.detail(cast.bob, Node.objects.get(pk=node.pk)).matrix[0][1][1]
    assert cell.nominal_gbs == 63.0
