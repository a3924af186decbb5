"""AMD's reading path, over simulated boards that sit beneath our driver."""

from collections.abc import Callable

import pytest
from amd_desk import ALWAYS_MISSING, GIB, MIB, Desk, desk, holder

from wire.hardware import MigOrder
from workers.gpus import GpuDriver, GpuList, OrderFailed, load
from workers.gpus.amd_boards import AMD_CATALOGUE
from workers.gpus.amd_details import OTHER_DIE, ranges
from workers.gpus.amd_readings import FIRST_SAMPLE
from workers.gpus.faults import Fault, Faults
from workers.gpus.holders import Holder
from workers.gpus.simulated_amd_machine import CONTEXT_BYTES, RESIDENT_SCALE, AmdCondition
from workers.gpus.symptoms import Symptoms

__all__ = ["desk"]


def matrix(gpus: GpuList) -> list[str]:
    joined = {frozenset((link.a, link.b)): link.kind for link in gpus.links}
    uuids = [info.uuid for info in gpus.infos]
    return [" ".join("X" if a == b else joined[frozenset((a, b))] for b in uuids) for a in uuids]


@pytest.mark.parametrize("topology", sorted(AMD_CATALOGUE.topologies))
def test_every_node_is_listed_and_joined_as_its_facts_say(desk: Callable[[str], Desk], topology: str) -> None:
    gpus = desk(topology).listed()
    facts = AMD_CATALOGUE.topologies[topology]
    board = AMD_CATALOGUE.boards[facts.board]
    assert [info.name for info in gpus.infos] == [board.market_name] * len(facts.numa)
    assert [info.numa_node for info in gpus.infos] == facts.numa
    assert {(info.vendor, info.memory_total_bytes) for info in gpus.infos} == {("amd", board.memory_mib * MIB)}
    assert len({info.uuid for info in gpus.infos} | {info.pci_bus_id for info in gpus.infos}) == 2 * len(facts.numa)
    assert matrix(gpus) == facts.matrix
    assert (gpus.driver, gpus.cuda, gpus.nvswitch, gpus.problem) == ("6.14.14 (ROCm 7.0.2)", None, False, None)


@pytest.mark.parametrize(("topology", "kinds", "count"), [
    ("MI300X-8", {"XGMI"}, 8), ("MI250X-4", {"XGMI"}, 8), ("MI210-4-PCIe", {"PHB", "SYS"}, 4)])
def test_well_known_nodes_are_joined_as_their_maker_says(
    desk: Callable[[str], Desk], topology: str, kinds: set[str], count: int
) -> None:
    gpus = desk(topology).listed()
    assert {link.kind for link in gpus.links} == kinds and len(gpus.infos) == count


def test_an_mi300x_is_described(desk: Callable[[str], Desk]) -> None:
    info = desk("MI300X-8").listed().infos[5]
    assert (info.index, info.architecture, info.compute_capability) == (5, "cdna3", "gfx942")
    assert (info.pci_bus_id, info.cpu_affinity, info.power_limit_mw) == ("0000:5c:00.0", "48-95", 750_000)
    assert (info.temperature_slowdown_c, info.temperature_shutdown_c) == (100, 105)
    assert (info.sm_clock_max_mhz, info.memory_clock_max_mhz) == (2100, 1300)
    assert info.serial and info.vbios and info.virtual is None
    assert set(info.missing) == {"nvlink_count", "nvlink_version", "mig_capable"}


def test_the_uuid_is_the_one_that_its_software_takes_for_visible_devices(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    by_serial = {f"GPU-{gpu.serial:016x}" for gpu in bench.machine.gpus}
    assert {info.uuid for info in bench.listed().infos} == by_serial
    # A binding of before that function has the serial number of the chip.
    bench.faults = Faults(missing=["amdsmi_get_gpu_enumeration_info"])
    assert {info.uuid for info in bench.listed().infos} == by_serial
    bench.faults = Faults(missing=["amdsmi_get_gpu_enumeration_info", "amdsmi_get_gpu_asic_info"])
    others = [info.uuid for info in bench.listed().infos]
    assert len(set(others)) == 8 and not by_serial & set(others)


def test_the_parts_of_a_chip_with_one_serial_number_are_told_apart(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    for gpu in bench.machine.gpus:
        gpu.serial = 0xABC
        gpu.uuid = "GPU-0000000000000abc"
    uuids = [info.uuid for info in bench.listed().infos]
    assert uuids == ["GPU-0000000000000abc", *(f"GPU-0000000000000abc/{part}" for part in range(1, 8))]
    assert [info.uuid for info in bench.driver.enumerate().infos] == uuids


def test_a_quiet_mi300x_tells_everything_it_has(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    first = bench.reading(2)
    assert {name for name, reason in first.missing.items() if reason == FIRST_SAMPLE} == {
        "nvlink_received_bytes_per_s", "nvlink_transmitted_bytes_per_s", "throttle_reasons"}
    bench.now += 1.0
    reading = bench.reading(2)
    assert set(reading.missing) == ALWAYS_MISSING and set(reading.missing.values()) == {"not_supported"}
    assert (reading.utilization_percent, reading.memory_used_bytes, reading.processes) == (0.0, 0, [])
    assert (reading.power_mw, reading.temperature_c, reading.memory_temperature_c) == (140_000, 38.0, 43.0)
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.throttle_reasons) == (132, 1300, 0)
    assert (reading.ecc_corrected, reading.ecc_uncorrected, reading.pcie_replays) == (0, 0, 0)
    assert reading.power_violation_ns == 0 and reading.nvlink_received_bytes_per_s == 0.0


def test_load_follows_the_processor_time_of_the_holder(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    mine = bench.machine.gpus[2].uuid
    bench.hold(holder(41, mine, cpu_ticks=100))
    bench.reading(2)
    bench.hold(holder(41, mine, cpu_ticks=200), after_s=2.0)  # one second of two
    busy, idle = bench.driver.read()[2:4]
    assert busy.utilization_percent == 50.0 and busy.memory_utilization_percent == 25.0
    assert busy.memory_used_bytes == CONTEXT_BYTES + RESIDENT_SCALE * GIB
    assert [(one.pid, one.memory_used_bytes) for one in busy.processes or []] == [(41, busy.memory_used_bytes)]
    assert idle.utilization_percent == 0.0 and idle.processes == []
    assert (busy.power_mw or 0) > 3 * (idle.power_mw or 0) and busy.sm_clock_mhz != idle.sm_clock_mhz
    bench.now += 10.0
    later = bench.reading(2)
    assert (later.energy_mj or 0) - (busy.energy_mj or 0) == pytest.approx((busy.power_mw or 0) * 10, rel=0.01)


def test_what_ranks_of_one_job_exchange_is_counted_by_link(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    pair = [gpu.uuid for gpu in bench.machine.gpus[:2]]

    def ranks(ticks: int) -> list[Holder]:
        return [holder(50 + place, uuid, cpu_ticks=ticks) for place, uuid in enumerate(pair)]

    bench.hold(*ranks(0))
    bench.driver.read()
    for ticks in (100, 200, 300):
        bench.hold(*ranks(ticks))
        readings = bench.driver.read()
    carried = readings[0].nvlink_transmitted_bytes_per_s
    assert carried == pytest.approx(0.3 * 64e9, rel=0.01)
    assert readings[1].nvlink_received_bytes_per_s == carried and readings[2].nvlink_received_bytes_per_s == 0.0
    links = bench.hardware(0).links
    assert [link.remote_pci_bus_id for link in links if link.transmitted_bytes] == ["0000:1c:00.0"]
    assert len(links) == 7 and all(link.active and link.remote_kind == "gpu" for link in links)


def test_time_under_a_limit_is_told_with_its_reason(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    bench.driver.read()
    mine = bench.machine.gpus[0].uuid
    for second in range(1, 5):
        bench.hold(holder(41, mine, cpu_ticks=100 * second))
        reading = bench.reading(0)
    assert reading.throttle_reasons == 0x4
    assert reading.power_violation_ns == 2e9  # of the scan at 2 s on it is known to be busy
    bench.hold()
    bench.machine.gpus[0].condition = AmdCondition(hot=True)
    bench.reading(0)
    bench.now += 1.0
    assert bench.reading(0).throttle_reasons == 0x20
    assert bench.reading(1).thermal_violation_ns == 0


def test_a_counter_that_begins_anew_gives_no_rate(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    bench.machine.gpus[0].link_kib = [1e9] * 7
    bench.reading(0)
    bench.machine.gpus[0].link_kib = [0.0] * 7
    bench.now += 1.0
    reading = bench.reading(0)
    assert reading.nvlink_received_bytes_per_s is None
    assert reading.missing["nvlink_received_bytes_per_s"] == "counter_reset"


def test_power_of_a_card_with_two_dies_is_told_by_one_of_them(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI250X-4")
    infos = bench.listed().infos
    first, second = bench.driver.read()[:2]
    assert first.power_mw == 90_000 and first.energy_mj is not None and first.power_limit_mw == 560_000
    for name in ("power_mw", "energy_mj", "power_limit_mw"):
        assert getattr(second, name) is None and second.missing[name] == OTHER_DIE
    assert second.temperature_c == 38.0 and second.utilization_percent == 0.0
    assert infos[1].power_limit_mw is None and infos[1].missing["power_limit_mw"] == OTHER_DIE
    # The card draws for both: work on the second die is seen on the first.
    bench.hold(holder(41, infos[1].uuid, cpu_ticks=0))
    bench.driver.read()
    bench.hold(holder(41, infos[1].uuid, cpu_ticks=100))
    first, second = bench.driver.read()[:2]
    assert (first.power_mw or 0) > 200_000 and first.utilization_percent == 0.0
    assert second.utilization_percent == 100.0 and second.power_mw is None


def test_an_older_board_says_that_it_is_held_back_but_not_why(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI250X-4")
    bench.listed()
    assert bench.reading(0).throttle_reasons == 0
    bench.machine.gpus[0].condition = AmdCondition(hot=True)
    reading = bench.reading(0)
    assert reading.throttle_reasons == 0x8
    assert reading.missing["nvlink_received_bytes_per_s"] == "not_supported"


def test_links_pcie_and_partition_are_told(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    details = bench.hardware(3)
    assert (details.pcie_generation, details.pcie_width, details.pcie_generation_max, details.pcie_width_max) == (
        5, 16, 5, 16)
    assert (details.partition, details.ecc_enabled, details.row_remap_pending) == ("SPX/NPS1", True, False)
    bench.machine.gpus[3].condition = AmdCondition(links_down=frozenset({2}))
    assert [link.active for link in bench.hardware(3).links] == [True, True, False, True, True, True, True]


def test_the_dies_of_one_card_have_four_links_between_them(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI250X-4")
    infos = bench.listed().infos
    peers = [link.remote_pci_bus_id for link in bench.hardware(0).links]
    assert peers.count(infos[1].pci_bus_id) == 4 and peers.count(infos[6].pci_bus_id) == 2
    assert bench.hardware(0).partition is None and bench.hardware(0).missing["partition"] == "not_supported"


def test_what_becomes_worse_is_noticed_like_that_of_other_makers(desk: Callable[[str], Desk]) -> None:
    bench, symptoms = desk("MI300X-8"), Symptoms()

    def look() -> list[tuple[str, str | None]]:
        readings = symptoms.of_readings(bench.driver.read())
        return [(event.kind, event.gpu_uuid) for event in
                readings + symptoms.of_hardware(bench.driver.hardware(), bench.now) + bench.driver.events()]

    bench.machine.gpus[4].bad_pages = [0]
    bench.listed()
    assert look() == []
    bench.machine.gpus[4].bad_pages = [0, 0, 1]
    bench.machine.gpus[5].condition = AmdCondition(links_down=frozenset({0}))
    bench.machine.gpus[6].uncorrected = 3
    bench.machine.gpus[7].bad_pages = [2]
    bench.faults = Faults(lost=[0])
    bench.now += 30.0
    gpus = [gpu.uuid for gpu in bench.machine.gpus]
    assert sorted(look()) == sorted([("lost", gpus[0]), ("row_remap", gpus[4]), ("link_down", gpus[5]),
                                     ("ecc", gpus[6]), ("row_remap", gpus[7])])
    assert look() == []
    pages = bench.hardware(4)
    assert (pages.rows_remapped_uncorrectable, pages.row_remap_pending, pages.row_remap_failed) == (2, True, False)
    assert bench.hardware(7).row_remap_failed is True


def test_mig_is_refused_with_what_to_do_instead(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    with pytest.raises(OrderFailed, match="amd-smi set --compute-partition"):
        bench.driver.set_mig(MigOrder(id="1", gpu_uuid=bench.machine.gpus[0].uuid))


def test_a_vgpu_guest_is_recognised(desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = desk("MI300X-8")
    mode = bench.library.AmdSmiVirtualizationMode.GUEST
    monkeypatch.setattr(bench.library._answers, "get_gpu_virtualization_mode", lambda gpu: {"mode": mode})
    assert {info.virtual for info in bench.listed().infos} == {"vgpu"}


def test_the_simulated_topology_decides_which_driver_reads(desk: Callable[[str], Desk]) -> None:
    driver: GpuDriver = load("simulated", topology="MI300X-8", node="n")
    driver.start()
    assert {info.vendor for info in driver.enumerate().infos} == {"amd"}


def test_faults_of_another_function_leave_a_call_alone() -> None:
    assert not Fault(symbol="amdsmi_get_power_info").meets("amdsmi_get_power_cap_info", ())


@pytest.mark.parametrize(("cores", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8, 9, 20], "0-2,8-9,20")])
def test_cores_are_written_as_ranges(cores: list[int], text: str) -> None:
    assert ranges(cores) == text
