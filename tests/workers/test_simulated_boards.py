"""What the simulated boards are, how they are joined and what they do, seen through the real reading path."""

import json
from pathlib import Path
from typing import Any

import pynvml
import pytest
from desk import GIB, Make, SetDesk, holder, make_desk

from wire.reports import GpuReading
from workers.gpus.boards import CATALOGUE

ORACLE = json.loads((Path(__file__).parent / "oracles" / "hardware.json").read_bytes())["matrices"]
MIB = 1 << 20
NODES = sorted(CATALOGUE.topologies)
__all__ = ["make_desk"]


def matrix(desk: SetDesk) -> list[str]:
    """What `nvidia-smi topo -m` prints."""
    joined = {frozenset((link.a, link.b)): link.kind for link in desk.gpus.links}
    uuids = [gpu.uuid for gpu in desk.machine.gpus]
    return [" ".join("X" if a == b else joined[frozenset((a, b))] for b in uuids) for a in uuids]


@pytest.mark.parametrize("topology", sorted(ORACLE))
def test_the_matrix_of_a_node_is_the_published_one(make_desk: Make, topology: str) -> None:
    desk = make_desk(topology)
    assert matrix(desk) == ORACLE[topology]["matrix"]
    assert [info.numa_node for info in desk.gpus.infos] == ORACLE[topology]["numa"]


def test_all_published_nodes_are_simulated() -> None:
    assert set(ORACLE) <= set(CATALOGUE.topologies)
    assert {"HGX-H200-8", "L40S-8-PCIe", "RTX4090-5-mixed"} <= set(CATALOGUE.topologies)
    assert {topology.board for topology in CATALOGUE.topologies.values()} == set(CATALOGUE.boards)


@pytest.mark.parametrize("topology", NODES)
def test_a_matrix_agrees_with_itself(topology: str) -> None:
    node = CATALOGUE.topologies[topology]
    gpus = range(len(node.numa))
    for kinds in (node.matrix, node.pcie):
        rows = [row.split() for row in kinds]
        assert [len(row) for row in rows] == [len(gpus)] * len(gpus)
        assert all(rows[a][b] == rows[b][a] and (rows[a][b] == "X") == (a == b) for a in gpus for b in gpus)
    links = CATALOGUE.boards[node.board].nvlinks
    assert all(len(node.link_ends(index, links)) == links for index in gpus)


@pytest.mark.parametrize("topology", [name for name in NODES if not CATALOGUE.topologies[name].virtual])
def test_an_idle_node_answers_everything_that_its_boards_have(make_desk: Make, topology: str) -> None:
    desk = make_desk(topology)
    desk.driver.read()
    desk.now += 1.0
    board = CATALOGUE.boards[CATALOGUE.topologies[topology].board]
    absent = set() if board.has_ecc else {"ecc_corrected", "ecc_uncorrected"}
    absent |= set() if board.has_memory_sensor else {"memory_temperature_c"}
    absent |= set() if board.fans else {"fan_percent"}
    absent |= set() if board.nvlinks else {"nvlink_received_bytes_per_s", "nvlink_transmitted_bytes_per_s"}
    whole = [reading for reading in desk.driver.read() if reading.uuid == desk.uuid(0)]
    assert set(whole[0].missing) == absent
    found = desk.hardware(0)
    assert (found.pcie_generation_max, found.pcie_width_max) == (board.pcie_generation, 16)
    assert found.ecc_enabled is (True if board.has_ecc else None)
    assert len(found.links) == board.nvlinks
    assert found.persistence_mode is not None and found.recovery_action == 0


def test_links_of_a_board_of_four_lead_to_its_three_peers(make_desk: Make) -> None:
    desk = make_desk("HGX-A100-4")
    links = desk.hardware(0).links
    assert [link.remote_pci_bus_id for link in links] == [
        gpu.bus_id for gpu in desk.machine.gpus[1:] for _ in range(4)]
    assert {(link.active, link.remote_kind) for link in links} == {(True, "gpu")}


def test_a_pcie_board_without_a_bridge_has_links_that_lead_nowhere(make_desk: Make) -> None:
    desk = make_desk("H100-PCIe-2")
    assert {link.active for link in desk.hardware(0).links} == {False}
    assert [link.kind for link in desk.gpus.links] == ["PHB"]


def working(desk: SetDesk, *pids_and_gpus: tuple[int, int], team: str = "7d0c", seconds: float = 1.0) -> None:
    """One process on each GPU, busy from now on for as long as the clock is moved by this."""
    ticks = round(100 * (desk.now + seconds))
    desk.hold(*(holder(pid, desk.uuid(gpu), cpu_ticks=ticks, team=team) for pid, gpu in pids_and_gpus), after_s=seconds)
    desk.driver.read()


def reading(desk: SetDesk, index: int) -> GpuReading:
    return desk.reading(desk.uuid(index))


def gbytes_per_s(value: float | None) -> float:
    assert value is not None
    return value / 1e9


def test_two_gpus_of_one_job_exchange_over_nvlink_and_a_third_does_not(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    for _ in range(4):
        working(desk, (11, 0), (12, 1))
    one, other, idle = (reading(desk, index) for index in range(3))
    assert one.utilization_percent == 100.0
    # 18 links of 25 GB/s each way, of which the exchange takes three tenths.
    assert gbytes_per_s(one.nvlink_transmitted_bytes_per_s) == pytest.approx(135.0, rel=0.02)
    assert gbytes_per_s(other.nvlink_received_bytes_per_s) == pytest.approx(135.0, rel=0.02)
    assert gbytes_per_s(one.pcie_received_bytes_per_s) == pytest.approx(2.52, rel=0.02)
    assert idle.nvlink_transmitted_bytes_per_s == 0.0 and idle.pcie_received_bytes_per_s == 0.0
    moved = {link.transmitted_bytes for link in desk.hardware(0).links}
    assert len(moved) == 1 and (moved.pop() or 0) > 1e9


def test_gpus_of_different_jobs_exchange_nothing(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    for _ in range(4):
        ticks = round(100 * (desk.now + 1))
        desk.hold(holder(11, desk.uuid(0), cpu_ticks=ticks, team="a"),
                  holder(12, desk.uuid(1), cpu_ticks=ticks, team="b"))
        desk.driver.read()
    assert reading(desk, 0).utilization_percent == 100.0
    assert reading(desk, 0).nvlink_transmitted_bytes_per_s == 0.0


def test_gpus_that_are_joined_by_pcie_alone_exchange_over_it(make_desk: Make) -> None:
    desk = make_desk("A100-PCIe-4-bridged")
    for _ in range(4):
        working(desk, (11, 0), (12, 2))  # the bridges join 0 to 1 and 2 to 3
    assert reading(desk, 0).nvlink_transmitted_bytes_per_s == 0.0
    assert gbytes_per_s(reading(desk, 0).pcie_transmitted_bytes_per_s) == pytest.approx(31.5 * 0.31, rel=0.02)


def test_work_warms_the_memory_and_counts_the_time_at_the_power_limit(make_desk: Make) -> None:
    desk = make_desk("DGX-A100-8")
    cold = reading(desk, 0)
    for _ in range(60):
        working(desk, (11, 0), seconds=2.0)
    warm = reading(desk, 0)
    assert warm.temperature_c == pytest.approx(69.0, abs=1.0)
    assert warm.memory_temperature_c == pytest.approx(75.0, abs=1.0)
    assert (warm.power_violation_ns or 0) > 100e9 and warm.thermal_violation_ns == 0
    assert (warm.energy_mj or 0) - (cold.energy_mj or 0) == pytest.approx(382_600 * 118, rel=0.05)
    assert warm.throttle_reasons == 0x4 and cold.throttle_reasons == 0x1


def test_a_board_for_desks_lets_its_link_rest(make_desk: Make) -> None:
    desk = make_desk("RTX4090-8-PCIe")
    assert desk.hardware(0).pcie_generation == 1
    working(desk, (11, 0))
    assert desk.hardware(0).pcie_generation == 4


def test_a_guest_with_a_virtual_gpu_is_told_little(make_desk: Make) -> None:
    desk = make_desk("L40S-vGPU-1")
    desk.hold(holder(5, desk.uuid(0)))
    (info,), found = desk.gpus.infos, reading(desk, 0)
    assert (info.virtual, info.name, info.serial) == ("vgpu", "NVIDIA L40S-48Q", None)
    assert found.memory_used_bytes and [process.pid for process in found.processes or []] == [5]
    hidden = ("utilization_percent", "power_mw", "temperature_c", "energy_mj", "encoder_percent")
    assert [getattr(found, name) for name in hidden] == [None] * 5
    assert {found.missing[name] for name in hidden} == {"not_supported"}
    assert "gpu" not in found.missing and desk.driver.events() == []


def test_cores_near_a_gpu_are_those_of_its_socket(make_desk: Make) -> None:
    make_desk("DGX-H100-8")
    words = pynvml.nvmlDeviceGetCpuAffinity(pynvml.nvmlDeviceGetHandleByIndex(5), 4)
    cores = {64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    assert cores == {*range(56, 112), *range(168, 224)}


def test_a_symbol_that_the_simulation_does_not_know_is_not_supported(make_desk: Make) -> None:
    make_desk("DGX-H100-8")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetBridgeChipInfo(handle)


def test_every_simulated_symbol_has_its_caller_in_the_binding(make_desk: Make) -> None:
    library: Any = make_desk("DGX-H100-8").library
    called = Path(pynvml.__file__ or "").read_text()
    unknown = [name for name in library._symbols if f'"{name}"' not in called]
    # Older names, for programs that ask for them by themselves.
    assert set(unknown) <= {
        "nvmlInit_v2", "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetPciInfo_v2"} | {
        name for name in unknown if name.endswith("RunningProcesses_v2")}


def test_a_job_holds_memory_beside_the_reserve(make_desk: Make) -> None:
    desk = make_desk("HGX-B200-8")
    desk.hold(holder(5, desk.uuid(0)))
    found = reading(desk, 0)
    assert found.memory_used_bytes == 512 * MIB + 8 * GIB
    assert found.memory_reserved_bytes == 712 * MIB and found.memory_total_bytes == 182631 * MIB
