"""What goes wrong with AMD's GPUs and their library, and that it costs only what it must."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amd_desk import ALWAYS_MISSING, GIB, MIB, Desk, desk, holder

from workers.gpus import DriverUnavailable, amd_details, simulated_amd
from workers.gpus.amdsmi import AmdSmiDriver
from workers.gpus.faults import Delay, Faults, Return, Text
from workers.gpus.simulated_amd_machine import CONTEXT_BYTES, RESIDENT_SCALE

__all__ = ["desk"]


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


def test_cores_that_the_library_cannot_tell_are_those_of_the_kernel(
    desk: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = desk("MI300X-8")
    bench.faults = Faults(returns=[Return(symbol="amdsmi_get_cpu_affinity_with_scope", code=1)])
    monkeypatch.setattr(amd_details, "PCI_DEVICES", tmp_path)
    card = tmp_path / bench.machine.gpus[2].bus_id
    card.mkdir()
    (card / "local_cpulist").write_text("32-47,96-111\n")
    infos = bench.listed().infos
    assert infos[2].cpu_affinity == "32-47,96-111"
    assert infos[3].cpu_affinity is None and infos[3].missing["cpu_affinity"] == "not_supported"


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
