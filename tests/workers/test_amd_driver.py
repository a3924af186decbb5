"""AMD's reading path, over simulated boards that sit beneath our driver, and what goes wrong with real ones."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from wire.hardware import GpuHardware, MigOrder
from wire.reports import GpuReading
from workers.gpus import DriverUnavailable, GpuDriver, GpuList, OrderFailed, load, simulated_amd
from workers.gpus.amd_boards import AMD_CATALOGUE
from workers.gpus.amd_details import OTHER_DIE, ranges
from workers.gpus.amd_readings import FIRST_SAMPLE
from workers.gpus.amdsmi import AmdSmiDriver
from workers.gpus.faults import Delay, Fault, Faults, Return, Text
from workers.gpus.holders import Holder
from workers.gpus.procfs import Stat
from workers.gpus.simulated_amd_machine import CONTEXT_BYTES, RESIDENT_SCALE, AmdMachine
from workers.gpus.symptoms import Symptoms

MIB, GIB = 1 << 20, 1 << 30
ALWAYS_MISSING = {
    "memory_reserved_bytes", "encoder_percent", "decoder_percent", "performance_state", "pcie_received_bytes_per_s",
    "pcie_transmitted_bytes_per_s", "fan_percent"}


class Desk:
    """A simulated node whose clock, processes and faults the test sets."""

    def __init__(self, topology: str) -> None:
        self.faults, self.holders, self.now = Faults(), list[Holder](), 1000.0
        facts = AMD_CATALOGUE.topologies[topology]
        self.machine = AmdMachine(facts, "desk", clock=lambda: self.now, scan=lambda uuids: self.holders)
        self.library = simulated_amd.install(topology, "desk", lambda: self.faults, self.machine)
        self.driver = AmdSmiDriver(clock=lambda: self.now)

    def hold(self, *holders: Holder, after_s: float = 1.0) -> None:
        """These processes are there from now on, as is seen by the next scan."""
        self.holders = list(holders)
        self.now += after_s

    def listed(self) -> GpuList:
        self.driver.start()
        return self.driver.enumerate()

    def reading(self, index: int) -> GpuReading:
        return self.driver.read()[index]

    def hardware(self, index: int) -> GpuHardware:
        return self.driver.hardware()[index]


@pytest.fixture
def desk() -> Iterator[Callable[[str], Desk]]:
    yield Desk
    simulated_amd.uninstall()


def holder(pid: int, *uuids: str, cpu_ticks: int = 0, resident: int = GIB, team: str = "job") -> Holder:
    return Holder(pid, uuids, Stat(parent=1, start_ticks=5, cpu_ticks=cpu_ticks, resident_bytes=resident), team)


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
    bench.machine.gpus[0].is_hot = True
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
    bench.machine.gpus[0].is_hot = True
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
    bench.machine.gpus[3].links_down = {2}
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
    bench.machine.gpus[5].links_down = {0}
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


@pytest.mark.parametrize(("name", "broken"), [
    ("utilization_percent", {"average_gfx_activity": "N/A"}),
    ("power_mw", {"current_socket_power": 0xFFFF, "average_socket_power": "N/A"}),
    ("temperature_c", {"temperature_hotspot": 0xFFFF}),
    ("sm_clock_mhz", {"current_gfxclk": "N/A", "current_gfxclks": ["N/A"] * 8}),
])
def test_a_value_that_the_batch_lacks_is_asked_for_by_itself(
    desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch, name: str, broken: dict[str, Any]
) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    before = getattr(bench.reading(0), name)
    answers = bench.library._answers
    whole = answers.get_gpu_metrics_info
    monkeypatch.setattr(answers, "get_gpu_metrics_info", lambda gpu: whole(gpu) | broken)
    reading = bench.reading(0)
    assert before is not None and getattr(reading, name) == before and name not in reading.missing


@pytest.mark.parametrize("nonsense", ["N/A", 0xFFFF, 0xFFFFFFFF, 2**64 - 1, float("nan"), float("inf"), None, True])
def test_nonsense_is_unknown_and_never_a_number(
    desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch, nonsense: Any
) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    answers = bench.library._answers
    table = dict.fromkeys(answers.get_gpu_metrics_info(bench.machine.gpus[0]), nonsense)
    monkeypatch.setattr(answers, "get_gpu_metrics_info", lambda gpu: table)
    monkeypatch.setattr(answers, "get_gpu_activity", lambda gpu: {"gfx_activity": nonsense, "umc_activity": nonsense})
    monkeypatch.setattr(answers, "get_power_info", lambda gpu: {"current_socket_power": nonsense})
    monkeypatch.setattr(answers, "get_temp_metric", lambda gpu, sensor, metric: nonsense)
    monkeypatch.setattr(answers, "get_clock_info", lambda gpu, kind: {"clk": nonsense})
    bench.reading(0)
    bench.now += 1.0
    reading = bench.reading(0)
    names = ["utilization_percent", "memory_utilization_percent", "power_mw", "temperature_c", "sm_clock_mhz",
             "memory_temperature_c", "memory_clock_mhz"]
    if nonsense not in (0xFFFF, 0xFFFFFFFF):  # which a wide counter may well reach
        names += ["nvlink_received_bytes_per_s", "pcie_replays"]
    for name in names:
        assert getattr(reading, name) is None and reading.missing[name] == "not_supported", name
    assert reading.memory_used_bytes == 0 and "gpu" not in reading.missing


@pytest.mark.parametrize(("function", "wrong", "name"), [
    ("get_gpu_memory_usage", 2**48, "memory_used_bytes"),
    ("get_gpu_memory_usage", 196593 * MIB, "memory_used_bytes"),  # more than there is
    ("get_gpu_memory_usage", -5, "memory_used_bytes"),
    ("get_gpu_metrics_info", {"current_socket_power": 60_000}, "power_mw"),
    ("get_gpu_metrics_info", {"temperature_hotspot": 900}, "temperature_c"),
])
def test_a_figure_that_cannot_be_true_is_called_nonsense(
    desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch, function: str, wrong: Any, name: str
) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    answers = bench.library._answers
    sound = getattr(answers, function)
    monkeypatch.setattr(answers, function,
                        lambda *asked: sound(*asked) | wrong if isinstance(wrong, dict) else wrong)
    reading = bench.reading(0)
    assert getattr(reading, name) is None and reading.missing[name] == "nonsense"
    assert reading.sm_clock_mhz == 132 and "gpu" not in reading.missing


@pytest.mark.parametrize(("code", "reason"), [
    (8, "timeout"), (10, "no_permission"), (32, "error:32"), (30, "error:30")])
def test_a_gpu_that_refuses_everything_is_silent_for_that_reason(
    desk: Callable[[str], Desk], code: int, reason: str
) -> None:
    bench = desk("MI210-4-PCIe")
    bench.listed()
    bench.faults = Faults(returns=[
        Return(symbol=f"amdsmi_get_{name}", gpu=1, code=code) for name in (
            "gpu_metrics_info", "gpu_memory_usage", "gpu_vram_usage", "temp_metric", "gpu_process_list",
            "gpu_activity", "power_info", "clock_info", "energy_count", "gpu_total_ecc_count", "gpu_fan_speed")])
    readings = bench.driver.read()
    assert readings[1].missing["gpu"] == reason
    assert all("gpu" not in readings[index].missing for index in (0, 2, 3))


@pytest.mark.parametrize(("symbols", "name"), [
    (["amdsmi_get_gpu_memory_usage"], "memory_used_bytes"),
    (["amdsmi_get_gpu_process_list"], "processes"),
    (["amdsmi_get_energy_count"], "energy_mj"),
    (["amdsmi_get_gpu_total_ecc_count"], "ecc_uncorrected"),
    (["amdsmi_get_gpu_metrics_info", "amdsmi_get_power_info"], "power_mw"),
    (["amdsmi_get_gpu_metrics_info", "amdsmi_get_gpu_activity"], "utilization_percent"),
    (["amdsmi_get_gpu_metrics_info", "amdsmi_get_clock_info"], "sm_clock_mhz"),
])
@pytest.mark.parametrize(("code", "reason"), [(10, "no_permission"), (8, "timeout"), (12, "error:12")])
def test_one_broken_value_of_one_gpu_hides_no_other(
    desk: Callable[[str], Desk], symbols: list[str], name: str, code: int, reason: str
) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    bench.driver.read()
    bench.now += 20.0
    bench.faults = Faults(returns=[Return(symbol=symbol, gpu=1, code=code) for symbol in symbols])
    readings = bench.driver.read()
    broken, sound = readings[1], readings[2]
    assert getattr(broken, name) is None and broken.missing[name] == reason
    assert broken.temperature_c is not None and "gpu" not in broken.missing
    assert set(sound.missing) == ALWAYS_MISSING and getattr(sound, name) is not None


def test_an_older_binding_without_some_functions_is_read_by_what_it_has(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.faults = Faults(missing=["amdsmi_get_gpu_memory_total", "amdsmi_get_gpu_memory_usage",
                                   "amdsmi_get_gpu_metrics_info", "amdsmi_get_cpu_affinity_with_scope"])
    info = bench.listed().infos[0]
    assert info.memory_total_bytes == 196592 * MIB and info.missing["cpu_affinity"] == "not_supported"
    bench.hold(holder(9, info.uuid))
    reading = bench.reading(0)
    assert reading.memory_used_bytes == CONTEXT_BYTES + RESIDENT_SCALE * GIB
    assert reading.power_mw is not None and reading.temperature_c == 38.0
    assert reading.missing["throttle_reasons"] == "not_supported"


def test_a_gpu_lost_in_mid_run_costs_only_itself(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    before = bench.listed()
    lost = before.infos[3]
    bench.faults = Faults(lost=[3])
    readings = {reading.uuid: reading for reading in bench.driver.read()}
    assert readings[lost.uuid].missing["gpu"] == "gpu_lost" and readings[lost.uuid].utilization_percent is None
    assert all("gpu" not in reading.missing for uuid, reading in readings.items() if uuid != lost.uuid)
    # Its name and links are remembered by the library; it is left out all the same.
    after = bench.driver.enumerate()
    assert [info.index for info in after.infos] == [0, 1, 2, 4, 5, 6, 7]
    assert f"GPU 3 ({lost.uuid}) does not answer (gpu_lost)" in (after.problem or "")
    assert len(after.links) == 7 * 6 / 2
    assert bench.reading(3).missing == {"gpu": "gpu_lost"} and len(bench.driver.hardware()) == 7
    bench.faults = Faults()
    assert bench.driver.enumerate() == before


def test_a_gpu_that_must_not_be_asked_is_not_asked(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI210-4-PCIe")
    bench.faults = Faults(delays=[Delay(symbol=symbol, gpu=2, seconds=3600) for symbol in (
        "amdsmi_get_gpu_enumeration_info", "amdsmi_get_gpu_metrics_info", "amdsmi_get_gpu_asic_info",
        "amdsmi_topo_get_link_type")])
    bench.driver = AmdSmiDriver(skip=[2])
    gpus = bench.listed()
    assert [info.index for info in gpus.infos] == [0, 1, 3]
    assert "GPU 2 does not answer (timeout)" in (gpus.problem or "")


@pytest.mark.parametrize("symbol", ["amdsmi_get_gpu_enumeration_info", "amdsmi_topo_get_link_type",
                                    "amdsmi_get_gpu_metrics_info", "amdsmi_get_gpu_process_list",
                                    "amdsmi_get_pcie_info"])
def test_whoever_watches_can_name_the_gpu_that_hangs(
    desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch, symbol: str
) -> None:
    bench = desk("MI210-4-PCIe")
    bench.faults = Faults(delays=[Delay(symbol=symbol, gpu=2, seconds=3600)])
    at_work: set[int | None] = set()
    monkeypatch.setattr(simulated_amd.time, "sleep", lambda seconds: at_work.add(bench.driver.at_work))
    bench.listed()
    bench.driver.read()
    bench.driver.hardware()
    assert at_work == {2} and bench.driver.at_work is None


def test_a_name_that_is_not_text_costs_neither_the_gpu_nor_its_neighbours(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI210-4-PCIe")
    bench.faults = Faults(texts=[Text(symbol="amdsmi_get_gpu_asic_info", gpu=1, hex="ff0041")])
    names = [info.name for info in bench.listed().infos]
    assert names == ["AMD Instinct MI210", "AMD GPU", "AMD Instinct MI210", "AMD Instinct MI210"]


@pytest.mark.parametrize("pid", [0, -4, 0xFFFFFFFF, 1 << 30, "N/A"])
def test_an_impossible_pid_is_left_out_and_said(
    desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch, pid: Any
) -> None:
    bench = desk("MI300X-8")
    bench.listed()
    bench.hold(holder(77, bench.machine.gpus[0].uuid))
    answers = bench.library._answers
    whole = answers.get_gpu_process_list
    monkeypatch.setattr(answers, "get_gpu_process_list", lambda gpu: [*whole(gpu), {"pid": pid, "mem": 5}])
    reading = bench.reading(0)
    assert [one.pid for one in reading.processes or []] == [77]
    assert reading.missing["processes"] == "unreliable"


@pytest.mark.parametrize(("code", "words"), [
    (34, "amdgpu driver is not loaded"), (10, "groups render and video"), (4, "amd-smi-lib"),
    (18, "amdgpu in `dmesg`")])
def test_a_driver_that_refuses_names_the_way_out(desk: Callable[[str], Desk], code: int, words: str) -> None:
    bench = desk("MI300X-8")
    bench.faults = Faults(returns=[Return(symbol="amdsmi_init", code=code)])
    with pytest.raises(DriverUnavailable, match=words):
        bench.driver.start()
    bench.faults = Faults()
    bench.driver.start()
    bench.faults = Faults(returns=[Return(symbol="amdsmi_get_processor_handles", code=code)])
    with pytest.raises(DriverUnavailable, match=words):
        bench.driver.enumerate()


def test_a_library_that_was_opened_by_nobody_is_opened_anew(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    before = bench.listed()
    bench.driver.read()
    assert bench.driver.renew() is False
    bench.library._shut_down()
    bench.driver.read()
    assert bench.driver.renew() is True
    assert bench.driver.enumerate() == before
    assert "gpu" not in bench.reading(0).missing and bench.driver.renew() is False


def test_a_library_that_was_let_go_is_not_asked_until_the_gpus_are_listed_again(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    before = bench.listed()
    bench.driver.release()
    assert bench.library.is_open is False
    assert all("gpu" in reading.missing for reading in bench.driver.read()) and bench.driver.hardware() == []
    assert bench.listed() == before
    bench.driver.close()
    bench.driver.close()


def test_no_gpu_at_all_is_a_problem(desk: Callable[[str], Desk]) -> None:
    bench = desk("MI300X-8")
    bench.machine.gpus = []
    gpus = bench.listed()
    assert gpus.infos == [] and "lists no GPU" in (gpus.problem or "")


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
