"""The one reading path, through the real binding, over simulated boards and what goes wrong with real ones."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pynvml
import pytest

from wire.reports import GpuInfo, GpuReading
from workers.gpus import DriverUnavailable, GpuDriver, GpuList, load, nvml, simulated
from workers.gpus.boards import CATALOGUE
from workers.gpus.faults import Delay, Fault, Faults, Return, Text
from workers.gpus.holders import Holder
from workers.gpus.machine import CONTEXT_BYTES, RESIDENT_SCALE, Machine
from workers.gpus.nvml_processes import Pids, anyone
from workers.gpus.procfs import Stat

MIB, GIB = 1 << 20, 1 << 30


class Desk:
    """A simulated node whose clock, processes and faults the test sets."""

    def __init__(self, topology: str) -> None:
        self.faults, self.holders, self.now = Faults(), list[Holder](), 1000.0
        self.machine = Machine(CATALOGUE.topologies[topology], "desk", clock=lambda: self.now, scan=self.scan)
        simulated.install(topology, "desk", lambda: self.faults, self.machine)
        self.driver: GpuDriver = nvml.NvmlDriver(pids=Pids(1 << 22, anyone))

    def hold(self, *holders: Holder, after_s: float = 1.0) -> None:
        """These processes are there from now on, as is seen by the next scan."""
        self.holders = list(holders)
        self.now += after_s

    def scan(self, _uuids: frozenset[str]) -> list[Holder]:
        return self.holders

    def listed(self) -> GpuList:
        self.driver.start()
        return self.driver.enumerate()

    def reading(self, index: int) -> GpuReading:
        uuid = self.machine.gpus[index].uuid
        return next(reading for reading in self.driver.read() if reading.uuid == uuid)


@pytest.fixture
def desk() -> Iterator[Callable[[str], Desk]]:
    yield Desk
    simulated.uninstall()


def trouble(reading: GpuReading) -> dict[str, str]:
    """What is missing although the board has it."""
    return {name: reason for name, reason in reading.missing.items() if reason not in {"not_supported", "first_sample"}}


def matrix(gpus: GpuList) -> list[str]:
    """What `nvidia-smi topo -m` would print for the list."""
    joined = {frozenset((link.a, link.b)): link.kind for link in gpus.links}
    uuids = [info.uuid for info in gpus.infos]
    return [" ".join("X" if a == b else joined[frozenset((a, b))] for b in uuids) for a in uuids]


@pytest.mark.parametrize("topology", sorted(set(CATALOGUE.topologies) - {"A100-2-MIG"}))
def test_every_node_is_listed_as_its_board_says(desk: Callable[[str], Desk], topology: str) -> None:
    gpus = desk(topology).listed()
    facts = CATALOGUE.topologies[topology]
    board = CATALOGUE.boards[facts.board]
    assert [info.name for info in gpus.infos] == [board.name] * len(facts.numa)
    assert [info.numa_node for info in gpus.infos] == facts.numa
    assert {info.memory_total_bytes for info in gpus.infos} == {board.memory_mib * MIB}
    assert {info.power_limit_mw for info in gpus.infos} == {board.power_limit_w * 1000}
    assert len({info.uuid for info in gpus.infos} | {info.pci_bus_id for info in gpus.infos}) == 2 * len(facts.numa)
    assert (gpus.driver, gpus.cuda, gpus.problem) == ("570.158.01", "12.8", None)


@pytest.mark.parametrize("topology", sorted(set(CATALOGUE.topologies) - {"A100-2-MIG"}))
def test_the_link_matrix_found_by_link_counting_is_the_one_of_the_facts(
    desk: Callable[[str], Desk], topology: str
) -> None:
    gpus = desk(topology).listed()
    assert matrix(gpus) == CATALOGUE.topologies[topology].matrix
    assert gpus.nvswitch is CATALOGUE.topologies[topology].nvswitch


@pytest.mark.parametrize(("topology", "kinds", "nvswitch"), [
    ("DGX-H100-8", {"NV18"}, True),
    ("DGX-A100-8", {"NV12"}, True),
    ("HGX-H100-4", {"NV6"}, False),
    ("HGX-H200-8", {"NV18"}, True),
    ("RTX4090-8-PCIe", {"SYS"}, False),
    ("L40S-8-PCIe", {"PIX", "NODE", "SYS"}, False),
])
def test_well_known_nodes_are_joined_as_their_makers_say(
    desk: Callable[[str], Desk], topology: str, kinds: set[str], nvswitch: bool
) -> None:
    gpus = desk(topology).listed()
    assert {link.kind for link in gpus.links} == kinds
    assert gpus.nvswitch is nvswitch


def test_an_h100_is_described(desk: Callable[[str], Desk]) -> None:
    info = desk("DGX-H100-8").listed().infos[3]
    assert (info.index, info.vendor, info.architecture, info.compute_capability) == (3, "nvidia", "hopper", "9.0")
    assert info.pci_bus_id == "00000000:2B:00.0"
    assert info.serial is not None and info.serial.isdigit()


def test_a_geforce_has_no_serial_and_says_why(desk: Callable[[str], Desk]) -> None:
    info = desk("RTX4090-8-PCIe").listed().infos[0]
    assert info.serial is None
    assert info.missing["serial"] == "not_supported"
    assert info.nvlink_count is None and info.missing["nvlink_count"] == "not_supported"
    assert info.mig_capable is False and info.mig_enabled is False


def test_two_nodes_have_different_uuids_and_one_node_always_the_same() -> None:
    def uuids(node: str) -> set[str]:
        return {gpu.uuid for gpu in Machine(CATALOGUE.topologies["DGX-H100-8"], node).gpus}

    assert uuids("a") == uuids("a")
    assert not uuids("a") & uuids("b")


def test_a_gpu_with_mig_on_is_listed_with_its_slices(desk: Callable[[str], Desk]) -> None:
    whole, cut, *slices = desk("A100-2-MIG").listed().infos
    assert (whole.mig_enabled, whole.mig_capable, whole.mig_profile) == (False, True, None)
    assert (cut.mig_enabled, cut.parent_uuid, cut.index) == (True, None, 1)
    assert [info.mig_profile for info in slices] == ["3g.40gb", "2g.20gb", "1g.10gb"]
    assert {(info.parent_uuid, info.index, info.uuid[:4], info.mig_enabled) for info in slices} == {
        (cut.uuid, 1, "MIG-", None)}
    assert all((info.memory_total_bytes or 0) < (cut.memory_total_bytes or 0) for info in slices)


def test_a_slice_tells_its_memory_and_not_what_only_its_gpu_knows(desk: Callable[[str], Desk]) -> None:
    bench = desk("A100-2-MIG")
    piece = bench.listed().infos[2].uuid
    bench.hold(holder(77, (piece,), cpu_ticks=0, resident=GIB))
    reading = next(reading for reading in bench.driver.read() if reading.uuid == piece)
    assert reading.memory_used_bytes == CONTEXT_BYTES + RESIDENT_SCALE * GIB
    assert [process.pid for process in reading.processes or []] == [77]
    assert reading.utilization_percent is None
    assert reading.missing["utilization_percent"] == "not_supported"


def holder(pid: int, uuids: tuple[str, ...], *, cpu_ticks: int, resident: int = GIB) -> Holder:
    return Holder(pid, uuids, Stat(parent=1, start_ticks=5, cpu_ticks=cpu_ticks, resident_bytes=resident))


def test_load_follows_the_processor_time_of_the_holder(desk: Callable[[str], Desk]) -> None:
    bench = desk("DGX-H100-8")
    bench.listed()
    mine = bench.machine.gpus[2].uuid
    bench.hold(holder(41, (mine,), cpu_ticks=100))
    bench.reading(2)
    bench.hold(holder(41, (mine,), cpu_ticks=200), after_s=2.0)  # one second of two
    busy, idle = bench.reading(2), bench.reading(3)
    assert busy.utilization_percent == 50.0
    assert idle.utilization_percent == 0.0 and idle.memory_used_bytes == 0 and idle.processes == []
    assert busy.power_mw is not None and idle.power_mw is not None and busy.power_mw > 4 * idle.power_mw
    assert busy.sm_clock_mhz != idle.sm_clock_mhz and idle.throttle_reasons == 1
    bench.now += 10.0
    later = bench.reading(2)
    assert (later.energy_mj or 0) - (busy.energy_mj or 0) == pytest.approx(busy.power_mw * 10, rel=0.01)


def test_memory_never_exceeds_the_board(desk: Callable[[str], Desk]) -> None:
    bench = desk("RTX4090-8-PCIe")
    bench.listed()
    mine = bench.machine.gpus[0].uuid
    bench.hold(*(holder(pid, (mine,), cpu_ticks=0, resident=9 * GIB) for pid in (1, 2)))
    reading = bench.reading(0)
    assert reading.memory_used_bytes == (24564 - 388) * MIB
    assert reading.memory_total_bytes == 24564 * MIB


def test_an_old_driver_without_the_second_memory_call_is_read_by_the_first(desk: Callable[[str], Desk]) -> None:
    bench = desk("DGX-H100-8")
    bench.faults = Faults(missing=["nvmlDeviceGetMemoryInfo_v2"])
    bench.listed()
    reading = bench.reading(0)
    assert reading.memory_used_bytes == 551 * MIB  # that version counts the reserve
    assert reading.memory_reserved_bytes is None and trouble(reading) == {}


def test_an_old_driver_without_the_newest_calls_is_read_by_the_older_ones(desk: Callable[[str], Desk]) -> None:
    bench = desk("DGX-H100-8")
    bench.faults = Faults(missing=[
        "nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetFieldValues",
    ])
    bench.listed()
    bench.hold(holder(9, (bench.machine.gpus[0].uuid,), cpu_ticks=0))
    reading = bench.reading(0)
    assert trouble(reading) == {}
    assert reading.temperature_c == 31.0 and [process.pid for process in reading.processes or []] == [9]


def test_a_driver_that_cannot_list_processes_says_so(desk: Callable[[str], Desk]) -> None:
    bench = desk("DGX-H100-8")
    bench.faults = Faults(missing=[f"nvmlDeviceGetComputeRunningProcesses_v{n}" for n in (2, 3)])
    bench.listed()
    reading = bench.reading(0)
    assert reading.processes is None
    assert reading.missing["processes"] == "not_supported"


@pytest.mark.parametrize(("symbol", "name"), [
    ("nvmlDeviceGetUtilizationRates", "utilization_percent"),
    ("nvmlDeviceGetMemoryInfo_v2", "memory_used_bytes"),
    ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
    ("nvmlDeviceGetComputeRunningProcesses_v3", "processes"),
])
@pytest.mark.parametrize(("code", "reason"), [
    (pynvml.NVML_ERROR_NO_PERMISSION, "no_permission"),
    (pynvml.NVML_ERROR_TIMEOUT, "timeout"),
    (pynvml.NVML_ERROR_UNKNOWN, "error:999"),
])
def test_one_broken_value_of_one_gpu_hides_no_other(
    desk: Callable[[str], Desk], symbol: str, name: str, code: int, reason: str
) -> None:
    bench = desk("HGX-H100-4")
    bench.listed()
    bench.faults = Faults(returns=[Return(symbol=symbol, gpu=1, code=code)])
    broken, whole = bench.reading(1), bench.reading(2)
    assert getattr(broken, name) is None and broken.missing[name] == reason
    assert broken.temperature_c is not None and broken.power_mw is not None
    assert trouble(whole) == {} and getattr(whole, name) is not None


def test_a_gpu_lost_in_mid_run_costs_only_itself(desk: Callable[[str], Desk]) -> None:
    bench = desk("DGX-H100-8")
    before = bench.listed()
    lost = before.infos[3]
    bench.faults = Faults(lost=[3])
    readings = {reading.uuid: reading for reading in bench.driver.read()}
    assert readings[lost.uuid].missing["gpu"] == "gpu_lost"
    assert readings[lost.uuid].utilization_percent is None
    assert all(not trouble(reading) for uuid, reading in readings.items() if uuid != lost.uuid)

    after = bench.driver.enumerate()
    assert [info.index for info in after.infos] == [0, 1, 2, 4, 5, 6, 7]
    assert after.problem is not None and f"GPU 3 ({lost.uuid}) does not answer (gpu_lost)" in after.problem
    assert len(after.links) == 7 * 6 / 2
    assert bench.reading(3).missing == {"gpu": "gpu_lost"}

    bench.faults = Faults()
    again = bench.driver.enumerate()
    assert again == before


def test_a_gpu_that_must_not_be_asked_is_not_asked(desk: Callable[[str], Desk]) -> None:
    bench = desk("HGX-H100-4")
    bench.faults = Faults(delays=[Delay(symbol=symbol, gpu=2, seconds=3600) for symbol in (
        "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetNvLinkState")])
    bench.driver = nvml.NvmlDriver(skip=[2], pids=Pids(1 << 22, anyone))
    gpus = bench.listed()
    assert [info.index for info in gpus.infos] == [0, 1, 3]
    assert "GPU 2 does not answer (timeout)" in (gpus.problem or "")


@pytest.mark.parametrize("symbol", [
    "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetPowerUsage"])
def test_whoever_watches_can_name_the_gpu_that_hangs(
    desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch, symbol: str
) -> None:
    bench = desk("HGX-H100-4")
    bench.faults = Faults(delays=[Delay(symbol=symbol, gpu=2, seconds=3600)])
    at_work: set[int | None] = set()
    monkeypatch.setattr(simulated.time, "sleep", lambda seconds: at_work.add(bench.driver.at_work))
    bench.listed()
    bench.driver.read()
    assert at_work == {2}
    assert bench.driver.at_work is None


def test_a_name_that_is_not_text_costs_neither_the_gpu_nor_its_neighbours(desk: Callable[[str], Desk]) -> None:
    bench = desk("HGX-H100-4")
    bench.faults = Faults(texts=[Text(symbol="nvmlDeviceGetName", gpu=0, hex=b"NVIDIA \xff\xfe?".hex())])
    bench.driver.start()
    with pytest.raises(UnicodeDecodeError):
        pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    gpus = bench.driver.enumerate()
    assert gpus.infos[0].name == "NVIDIA \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}?"
    assert [info.name for info in gpus.infos[1:]] == ["NVIDIA H100 80GB HBM3"] * 3


def test_scrambled_process_lists_are_cut_to_the_possible(desk: Callable[[str], Desk]) -> None:
    bench = desk("HGX-H100-4")
    bench.listed()
    bench.hold(*(holder(pid, (bench.machine.gpus[0].uuid,), cpu_ticks=0) for pid in (0, 12, (1 << 31) + 5)))
    reading = bench.reading(0)
    assert [process.pid for process in reading.processes or []] == [12]
    assert trouble(reading) == {"processes": "unreliable"}


@pytest.mark.parametrize(("code", "words"), [
    (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot the machine or reload the module"),
    (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
    (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "takes part without GPUs"),
    (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
    (pynvml.NVML_ERROR_UNKNOWN, "restart the container"),
    (pynvml.NVML_ERROR_MEMORY, "dmesg"),
])
def test_a_driver_that_does_not_start_gives_the_cause_and_the_way_out(
    desk: Callable[[str], Desk], code: int, words: str
) -> None:
    bench = desk("HGX-H100-4")
    bench.faults = Faults(returns=[Return(symbol="nvmlInitWithFlags", code=code)])
    with pytest.raises(DriverUnavailable, match=words):
        bench.driver.start()


def test_the_old_package_that_shadows_the_binding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", SimpleNamespace(__file__="/lib/site-packages/pynvml/__init__.py"))
    with pytest.raises(DriverUnavailable, match="pip uninstall pynvml"):
        nvml.NvmlDriver().start()


def test_unknown_kinds_and_topologies_are_named_with_the_choices() -> None:
    with pytest.raises(DriverUnavailable, match=r"'rocm'; the drivers are .*nvml, .*simulated"):
        load("rocm")
    with pytest.raises(DriverUnavailable, match=r"'DGX-1'; choose one of .*DGX-H100-8"):
        load("simulated", topology="DGX-1")


def test_the_real_library_is_back_after_the_simulation(desk: Callable[[str], Desk]) -> None:
    real = pynvml.nvmlLib
    desk("HGX-H100-4")
    desk("DGX-H100-8")
    assert pynvml.nvmlLib is not real
    simulated.uninstall()
    assert pynvml.nvmlLib is real


def test_the_simulator_refuses_a_python_without_access_to_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "behind", lambda argument: argument)
    with pytest.raises(DriverUnavailable, match="does not let the simulated driver fill"):
        simulated.install("HGX-H100-4", "desk")


def test_faults_meet_what_they_name() -> None:
    fault = Fault(symbol="nvmlDeviceGetName", gpu=2)
    assert fault.meets("nvmlDeviceGetName", (2, "GPU-x"))
    assert not fault.meets("nvmlDeviceGetName", (1, "GPU-y"))
    assert not fault.meets("nvmlDeviceGetUUID", (2, "GPU-x"))
    assert Fault(symbol="nvmlDeviceGetName").meets("nvmlDeviceGetName", ())


def test_infos_of_two_enumerations_are_equal(desk: Callable[[str], Desk]) -> None:
    bench = desk("DGX-A100-8")
    first: list[GpuInfo] = bench.listed().infos
    assert bench.driver.enumerate().infos == first
