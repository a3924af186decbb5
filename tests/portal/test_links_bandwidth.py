"""Nominal bandwidth of a pair, against the figures that makers give for their boards."""

import pytest

from portal.hardware.links import End, between, place_of, same_place

H100 = End("NVIDIA H100 80GB HBM3", nvlink_version=4, pcie_generation=5, pcie_width=16)
MI250X = "AMD Instinct MI250X"


@pytest.mark.parametrize(("name", "kind", "nvswitch", "gbs"), [
    ("Tesla V100-SXM2-32GB", "NV2", False, 100),
    ("Tesla V100-SXM3-32GB", "NV6", True, 300),
    ("NVIDIA A100-SXM4-80GB", "NV12", True, 600),
    ("NVIDIA A100-SXM4-40GB", "NV4", False, 200),
    ("NVIDIA A100 80GB PCIe", "NV12", False, 600),
    ("NVIDIA A30", "NV4", False, 200),
    ("NVIDIA H100 80GB HBM3", "NV18", True, 900),
    ("NVIDIA H100 80GB HBM3", "NV6", False, 300),
    ("NVIDIA H200", "NV18", True, 900),
    ("NVIDIA B200", "NV18", True, 1800),
    ("NVIDIA RTX A6000", "NV4", False, 112.5),
])
def test_nvlink_is_as_fast_as_its_links_together(name: str, kind: str, nvswitch: bool, gbs: float) -> None:
    joined = between(kind, End(name), End(name), nvswitch)
    assert (joined.kind, joined.nominal_gbs) == (kind, gbs)
    assert f"{kind[2:]} NVLinks of generation" in joined.words and ("NVSwitch" in joined.words) is nvswitch


def test_the_driver_knows_the_generation_better_than_the_name() -> None:
    newer = End("NVIDIA H100", nvlink_version=5)
    assert between("NV18", newer, newer).nominal_gbs == 1800
    assert between("NV2", End("NVIDIA X", nvlink_version=4), End("NVIDIA X", nvlink_version=2)).nominal_gbs == 100
    unknown = between("NV2", End("NVIDIA X"), End("NVIDIA X"))
    assert unknown.nominal_gbs is None and "not known" in unknown.words


@pytest.mark.parametrize(("generation", "width", "gbs"), [
    (3, 16, 31.5), (4, 16, 63.0), (5, 16, 126.0), (6, 16, 242.0), (4, 8, 31.5), (1, 1, 0.5), (2, 16, 16.0)])
@pytest.mark.parametrize("kind", ["PIX", "PXB", "PHB", "NODE", "SYS"])
def test_pcie_is_as_fast_as_the_slower_end(kind: str, generation: int, width: int, gbs: float) -> None:
    end = End("NVIDIA L40S", pcie_generation=generation, pcie_width=width)
    fastest = End("NVIDIA L40S", pcie_generation=6, pcie_width=16)
    for pair in ((end, fastest), (fastest, end), (end, end)):
        joined = between(kind, *pair)
        assert joined.nominal_gbs == pytest.approx(gbs, abs=0.05)
        assert f"generation {generation} x{width}" in joined.words
    assert ("shared" in joined.words) is (kind in ("NODE", "SYS"))


def test_a_pair_whose_width_is_not_told_has_no_figure() -> None:
    joined = between("PIX", H100, End("NVIDIA H100 80GB HBM3"))
    assert joined.nominal_gbs is None and "not told yet" in joined.words


def test_infinity_fabric_counts_the_links_of_the_pair() -> None:
    full = between("XGMI", End("AMD Instinct MI300X"), End("AMD Instinct MI300X"))
    assert full.nominal_gbs == 128 and full.words == "1 Infinity Fabric link."
    first = End(MI250X, "0000:0c:00.0", link_peers=("0000:1c:00.0",) * 4 + ("0000:2c:00.0",))
    twin = End(MI250X, "0000:1c:00.0", link_peers=("0000:0c:00.0",) * 4)
    near = End(MI250X, "00000000:2C:00.0", link_peers=("0000:0c:00.0",))
    far = End(MI250X, "0000:7c:00.0", link_peers=("0000:1c:00.0",))
    assert between("XGMI", first, twin).nominal_gbs == 400
    assert between("XGMI", first, near).nominal_gbs == 100
    apart = between("XGMI", first, far)
    assert apart.nominal_gbs is None and "through another GPU" in apart.words
    assert between("XGMI", End(MI250X), End(MI250X)).nominal_gbs is None
    assert between("XGMI", End("AMD X"), End("AMD X")).nominal_gbs is None


def test_a_link_that_went_down_is_not_counted() -> None:
    first = End(MI250X, "0000:0c:00.0", link_peers=("0000:1c:00.0",) * 3)
    twin = End(MI250X, "0000:1c:00.0", link_peers=("0000:0c:00.0",) * 4)
    assert between("XGMI", first, twin).nominal_gbs == between("XGMI", twin, first).nominal_gbs == 300


def test_what_is_not_known_is_said() -> None:
    assert between("", H100, H100).nominal_gbs is None
    assert between("C2C?", H100, H100).words == "How they are joined is not known."


@pytest.mark.parametrize(("one", "other", "same"), [
    ("0000:0c:00.0", "00000000:0C:00.0", True), ("0000:0c:00.0", "0001:0c:00.0", False),
    ("0c:00.0", "0000:0c:00.0", True), ("nonsense", "nonsense", False), ("0000:0c:00.0", None, False)])
def test_pci_ids_are_compared_however_they_are_written(one: str, other: str | None, same: bool) -> None:
    assert same_place(one, other) is same
    assert place_of("10000:0c:1f.7") == (0x10000, 0x0C, 0x1F, 7)
