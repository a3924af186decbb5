"""Network cards and their distance to the GPUs, from trees as the kernel shows them."""

from pathlib import Path

import pytest

from workers import topology
from workers.topology import Place, distance, nics


class Sysfs:
    """A tree under a folder. A device is named by its chain of bridges, as the kernel lays them into each other."""

    def __init__(self, root: Path, numa_nodes: int = 2) -> None:
        self.root = root
        for node in range(numa_nodes):
            (root / f"devices/system/node/node{node}").mkdir(parents=True)

    def device(self, *chain: str, kind: str = "0x020000", numa: int = 0) -> Path:
        path = self.root.joinpath("devices", *chain)
        path.mkdir(parents=True)
        (path / "class").write_text(kind + "\n")
        (path / "numa_node").write_text(f"{numa}\n")
        bus = self.root / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / chain[-1]).symlink_to(path)
        return path

    def gpu(self, *chain: str, numa: int = 0) -> str:
        self.device(*chain, kind="0x030200", numa=numa)
        return chain[-1]

    def named(self, group: str, name: str, device: Path, **files: str) -> Path:
        entry = self.root / "class" / group / name
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(device)
        for file, text in files.items():
            (entry / file).write_text(text + "\n")
        return entry

    def rdma(self, name: str, device: Path, layer: str = "InfiniBand", rate: str = "400 Gb/sec (4X NDR)",
             state: str = "4: ACTIVE") -> None:
        port = self.named("infiniband", name, device) / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("link_layer", layer), ("rate", rate), ("state", state)):
            (port / file).write_text(text + "\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def switch(root: str, port: str, upstream: str, downstream: str, device: str) -> tuple[str, ...]:
    return (root, port, upstream, downstream, device)


def test_a_card_is_as_far_from_each_gpu_as_the_bridges_between_them(sysfs: Sysfs) -> None:
    below_switch = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
    gpus = {
        "same-switch": sysfs.gpu(*below_switch, "0000:17:00.0", "0000:18:00.0"),
        "second-switch": sysfs.gpu(*below_switch, "0000:17:02.0", "0000:20:00.0", "0000:21:00.0", "0000:22:00.0"),
        "same-host-bridge": sysfs.gpu("pci0000:15", "0000:15:05.0", "0000:19:00.0"),
        "same-socket": sysfs.gpu("pci0000:37", "0000:37:01.0", "0000:38:00.0"),
        "other-socket": sysfs.gpu("pci0000:97", "0000:97:01.0", "0000:98:00.0", numa=1),
        "gone": "0000:ff:00.0",
        "not-told": None,
    }
    card = sysfs.device(*below_switch, "0000:17:01.0", "0000:1a:00.0")
    sysfs.rdma("mlx5_0", card)
    (nic,) = nics(gpus, sysfs.root)
    assert nic.distances == {"same-switch": "PIX", "second-switch": "PXB", "same-host-bridge": "PHB",
                             "same-socket": "NODE", "other-socket": "SYS"}
    assert (nic.name, nic.pci_bus_id, nic.numa_node, nic.rdma) == ("mlx5_0", "0000:1a:00.0", 0, True)
    assert (nic.link_layer, nic.rate_gbps, nic.state) == ("InfiniBand", 400.0, "active")


def test_a_server_with_a_card_per_gpu_has_each_next_to_its_own(sysfs: Sysfs) -> None:
    gpus: dict[str, str | None] = {}
    for place in range(8):
        numa, bus = place // 4, 0x10 * (place + 1)
        root, port, upstream = f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"
        gpus[f"GPU-{place}"] = sysfs.gpu(root, port, upstream, f"0000:{bus + 2:02x}:00.0",
                                         f"0000:{bus + 3:02x}:00.0", numa=numa)
        card = sysfs.device(root, port, upstream, f"0000:{bus + 2:02x}:01.0", f"0000:{bus + 4:02x}:00.0", numa=numa)
        sysfs.rdma(f"mlx5_{place}", card)
    # NVML's way to write the same ids.
    found = nics({uuid: f"0000{bus}".upper() for uuid, bus in gpus.items()}, sysfs.root)
    assert [nic.name for nic in found] == [f"mlx5_{place}" for place in range(8)]
    for place, nic in enumerate(found):
        kinds = [nic.distances[f"GPU-{other}"] for other in range(8)]
        own_socket = range(4 * (place // 4), 4 * (place // 4) + 4)
        assert kinds == ["PIX" if other == place else "NODE" if other in own_socket else "SYS" for other in range(8)]


def test_a_card_is_listed_once_by_its_rdma_name_and_virtual_things_not_at_all(sysfs: Sysfs) -> None:
    card = sysfs.device("pci0000:00", "0000:00:03.0", "0000:02:00.0")
    sysfs.rdma("rocep2s0", card, layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    sysfs.named("net", "ens2np0", card, speed="100000", operstate="up")
    virtual = sysfs.device("pci0000:00", "0000:00:03.0", "0000:02:00.1")
    (virtual / "physfn").symlink_to(card)
    sysfs.named("net", "ens2v0", virtual, speed="100000", operstate="up")
    loop = sysfs.root / "class/net/lo"
    loop.mkdir(parents=True)
    (loop / "operstate").write_text("unknown\n")
    usb = sysfs.device("pci0000:00", "0000:00:14.0", kind="0x0c0330") / "usb1/1-1/1-1:1.0"
    usb.mkdir(parents=True)
    sysfs.named("net", "enx00", usb, speed="1000", operstate="up")
    (nic,) = nics({}, sysfs.root)
    assert (nic.name, nic.link_layer, nic.rate_gbps, nic.rdma) == ("rocep2s0", "Ethernet", 100.0, True)


def test_an_ethernet_card_without_rdma_and_one_without_a_cable(sysfs: Sysfs) -> None:
    wired = sysfs.device("pci0000:00", "0000:00:1f.6", numa=-1)
    sysfs.named("net", "eno1", wired, speed="25000", operstate="up")
    idle = sysfs.device("pci0000:00", "0000:00:1f.7", numa=1)
    sysfs.named("net", "eno2", idle, speed="-1", operstate="down")
    first, second = nics({}, sysfs.root)
    assert (first.name, first.rate_gbps, first.state, first.numa_node, first.rdma) == ("eno1", 25.0, "up", None, False)
    assert (second.name, second.rate_gbps, second.state, second.numa_node) == ("eno2", None, "down", 1)


def test_a_virtual_machines_card_stands_behind_virtio(sysfs: Sysfs) -> None:
    card = sysfs.device("pci0000:00", "0000:00:05.0")
    (card / "virtio2").mkdir()
    sysfs.named("net", "eth0", card / "virtio2", speed="-1", operstate="up")
    gpu = sysfs.gpu("pci0000:00", "0000:00:06.0")
    (nic,) = nics({"GPU": gpu}, sysfs.root)
    assert (nic.pci_bus_id, nic.distances, nic.rate_gbps) == ("0000:00:05.0", {"GPU": "PHB"}, None)


def test_where_the_kernel_knows_no_numa_node_only_a_machine_with_one_has_all_within_it(tmp_path: Path) -> None:
    for nodes, kind in ((1, "NODE"), (2, "SYS")):
        sysfs = Sysfs(tmp_path / str(nodes), nodes)
        sysfs.rdma("mlx5_0", sysfs.device("pci0000:00", "0000:01:00.0", numa=-1))
        gpu = sysfs.gpu("pci0000:40", "0000:41:00.0", numa=-1)
        assert nics({"GPU": gpu}, sysfs.root)[0].distances == {"GPU": kind}


def test_the_tenth_card_comes_after_the_second(sysfs: Sysfs) -> None:
    for place in (10, 2, 1):
        sysfs.rdma(f"mlx5_{place}", sysfs.device("pci0000:00", f"0000:{place:02x}:00.0"))
    sysfs.named("net", "eth0", sysfs.device("pci0000:00", "0000:20:00.0"))
    assert [nic.name for nic in nics({}, sysfs.root)] == ["mlx5_1", "mlx5_2", "mlx5_10", "eth0"]


@pytest.mark.parametrize("broken", ["rate", "state", "link_layer"])
def test_a_value_that_cannot_be_read_costs_only_itself(sysfs: Sysfs, broken: str) -> None:
    sysfs.rdma("mlx5_0", sysfs.device("pci0000:00", "0000:01:00.0"))
    (sysfs.root / "class/infiniband/mlx5_0/ports/1" / broken).write_bytes(b"\xff\xfe")
    (nic,) = nics({}, sysfs.root)
    assert nic.name == "mlx5_0" and nic.pci_bus_id == "0000:01:00.0"
    assert sum(value is None for value in (nic.rate_gbps, nic.link_layer, nic.state)) == (broken == "rate")


def test_a_machine_without_any_card_has_none(tmp_path: Path) -> None:
    assert nics({"GPU": "0000:01:00.0"}, tmp_path) == []


def test_the_levels_are_symmetric() -> None:
    switch = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    near = Place((*switch, "0000:02:00.0", "0000:03:00.0"), 0)
    far = Place((*switch, "0000:02:01.0", "0000:04:00.0", "0000:05:00.0", "0000:06:00.0"), 0)
    assert distance(near, far) == distance(far, near) == "PXB"
    assert distance(near, near) == "PIX"


def test_this_machine_is_read_without_an_error() -> None:
    for nic in nics({}):
        assert nic.name and nic.distances == {} and topology.kernel_name(nic.pci_bus_id or "") == nic.pci_bus_id
