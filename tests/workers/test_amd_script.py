"""Scripted faults on simulated AMD nodes: each begins and ends on time, and meets the GPU it names."""

from collections.abc import Callable

import pytest
from amd_desk import Desk, desk, holder

from workers.gpus import DriverUnavailable, simulated_amd
from workers.gpus.fault_script import ScriptError, check_on, parse
from workers.gpus.symptoms import Symptoms

__all__ = ["desk"]

Make = Callable[..., Desk]


def silent(bench: Desk) -> dict[int, str]:
    return {place: one.missing["gpu"] for place, one in enumerate(bench.driver.read()) if "gpu" in one.missing}


def test_a_gpu_is_lost_for_a_while(desk: Make) -> None:
    bench = desk("MI300X-8", "gpu3:lost@10s+20s")
    before = bench.listed()
    assert silent(bench) == {}
    bench.now += 10.0
    assert silent(bench) == {3: "gpu_lost"}
    assert [info.index for info in bench.driver.enumerate().infos] == [0, 1, 2, 4, 5, 6, 7]
    bench.now += 20.0
    assert bench.driver.enumerate() == before and silent(bench) == {}


def test_a_driver_that_is_unloaded_says_so(desk: Make) -> None:
    bench = desk("MI300X-8", "node:unloaded@5s+5s")
    before = bench.listed()
    bench.now += 5.0
    assert set(silent(bench).values()) == {"error:34"}
    with pytest.raises(DriverUnavailable, match="amdgpu driver is not loaded"):
        bench.driver.enumerate()
    bench.now += 5.0
    assert bench.listed() == before


def test_heat_holds_back_and_is_noticed_after_half_a_minute(desk: Make) -> None:
    bench, symptoms = desk("MI250X-4", "gpu2:throttle@0s+60s"), Symptoms()
    bench.listed()
    kinds = []
    for _ in range(40):
        bench.hold(holder(41, bench.machine.gpus[2].uuid))
        kinds += [event.kind for event in symptoms.of_readings(bench.driver.read())]
    assert kinds == ["throttle"] and bench.reading(2).throttle_reasons == 0x8
    assert bench.reading(2).sm_clock_mhz == 850 and bench.reading(3).throttle_reasons == 0
    bench.now += 30.0
    assert bench.reading(2).throttle_reasons == 0


def test_a_link_that_trained_badly_and_one_that_is_down(desk: Make) -> None:
    bench = desk("MI300X-8", "gpu1:slowlink@5s gpu4:nvlink6down@5s+5s")
    bench.listed()
    bench.now += 5.0
    slow, cut = bench.hardware(1), bench.hardware(4)
    assert (slow.pcie_generation, slow.pcie_width, slow.pcie_generation_max, slow.pcie_width_max) == (1, 4, 5, 16)
    assert [link.link for link in cut.links if not link.active] == [6] and cut.pcie_generation == 5
    bench.now += 5.0
    assert all(link.active for link in bench.hardware(4).links) and bench.hardware(1).pcie_width == 4


def test_a_memory_error_stays_when_it_is_over(desk: Make) -> None:
    bench = desk("MI300X-8", "gpu0:ecc@5s+1s")
    bench.listed()
    assert bench.reading(0).ecc_uncorrected == 0
    bench.now += 20.0
    assert bench.reading(0).ecc_uncorrected == 1 and bench.reading(1).ecc_uncorrected == 0
    assert bench.hardware(0).row_remap_pending is True
    bench.now += 20.0
    assert bench.reading(0).ecc_uncorrected == 1


def test_memory_without_a_process_impossible_pids_and_a_name_that_is_not_text(desk: Make) -> None:
    bench = desk("MI300X-8", "gpu0:memstuck gpu1:badpids gpu2:badname")
    infos = bench.listed().infos
    stuck, odd = bench.driver.read()[:2]
    assert (stuck.memory_used_bytes or 0) > 100 << 30 and stuck.processes == []
    assert odd.processes == [] and odd.missing["processes"] == "unreliable"
    assert [info.name for info in infos[1:4]] == ["AMD Instinct MI300X", "AMD GPU", "AMD Instinct MI300X"]


@pytest.mark.parametrize(("metric", "name"), [
    ("utilization", "utilization_percent"), ("memory", "memory_used_bytes"), ("power", "power_mw"),
    ("memory_temperature", "memory_temperature_c"), ("sm_clock", "sm_clock_mhz"),
    ("memory_clock", "memory_clock_mhz"), ("energy", "energy_mj"), ("throttle_reasons", "throttle_reasons"),
    ("processes", "processes"), ("ecc", "ecc_uncorrected"), ("nvlink", "nvlink_received_bytes_per_s"),
    ("pcie", "pcie_replays")])
def test_a_value_that_is_not_there_hides_no_other(desk: Make, metric: str, name: str) -> None:
    bench = desk("MI300X-8", f"gpu5:nometric={metric}")
    bench.listed()
    bench.driver.read()
    bench.now += 15.0
    without, whole = bench.driver.read()[5:7]
    assert getattr(without, name) is None and without.missing[name] == "not_supported"
    assert getattr(whole, name) is not None and name not in whole.missing
    assert set(without.missing) - set(whole.missing) == {name} | (
        {"nvlink_transmitted_bytes_per_s"} if metric == "nvlink" else
        {"ecc_corrected"} if metric == "ecc" else set())


def test_a_hang_lasts_as_long_as_the_script_says(desk: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = desk("MI300X-8", "gpu2:hang@5s+30s")
    bench.listed()
    bench.driver.read()
    slept: list[tuple[int | None, float]] = []
    monkeypatch.setattr(simulated_amd.time, "sleep", lambda seconds: slept.append((bench.driver.at_work, seconds)))
    bench.now += 5.0
    bench.driver.read()
    assert {gpu for gpu, _ in slept} == {2} and {seconds for _, seconds in slept} == {30.0}


@pytest.mark.parametrize(("script", "words"), [
    ("gpu0:xid79", "only NVIDIA's driver does that"), ("node:mismatch", "only NVIDIA's driver does that"),
    ("gpu8:lost", "names GPU 8, but the node has 8"), ("gpu0:nvlink7down", "names NVLink 7, but its board has 7")])
def test_what_such_a_node_cannot_suffer_is_refused(script: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        check_on(parse(script), "MI300X-8")
    with pytest.raises(DriverUnavailable, match=words):
        simulated_amd.install("MI300X-8", "n", script=script)
    check_on(parse("gpu7:lost@60s"), "MI300X-8")


def test_topologies_of_both_makers_are_offered() -> None:
    with pytest.raises(ScriptError, match=r"DGX-H100-8.*MI300X-8"):
        check_on(parse("gpu0:lost"), "nowhere")
