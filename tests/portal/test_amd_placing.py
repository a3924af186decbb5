"""AMD's cards in the portal: placed by their links, and named so that the node knows whose they are."""

from itertools import combinations

import pytest

from portal.models import Gpu
from portal.scheduler.snapshot import GpuView, NodeView
from portal.scheduler.topology import choose, joins, weight
from portal.services import desired
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import started

GIB = 1024**3


def machine(kinds: dict[frozenset[int], str]) -> NodeView:
    views = tuple(GpuView(f"g{index}", index, "AMD Instinct MI300X", "MI300X", 192 * GIB, free=True)
                  for index in range(4))
    links = tuple((f"g{a}", f"g{b}", kinds.get(frozenset((a, b)), "SYS")) for a, b in combinations(range(4), 2))
    return NodeView("amd1", views, links)


def test_cards_with_a_direct_link_of_amd_are_kept_together() -> None:
    node = machine({frozenset((0, 2)): "XGMI", frozenset((1, 3)): "XGMI"})
    for link in ("any", "nvlink", "pcie-switch"):
        picked = choose(node, node.gpus, 2, link)
        assert picked is not None and [gpu.uuid for gpu in picked] == ["g0", "g2"]
    assert choose(node, node.gpus, 3, "nvlink") is None
    assert weight("XGMI") > weight("PIX") and not joins("PHB", "nvlink")


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_an_order_says_whose_card_it_is(cast: Cast, vendor: str) -> None:
    node = make_node()
    Gpu.objects.filter(node=node).update(vendor=vendor)
    started(cast.bob, gpus=2)
    (launch,) = desired.compose(node).launches
    assert [slot.vendor for slot in launch.gpus] == [vendor] * 2
