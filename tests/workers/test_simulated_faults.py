"""Scripted faults: what is written, and what the real reading path then sees."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from desk import Make, SetDesk, holder, make_desk

from wire import names
from workers import join
from workers.gpus import DriverUnavailable, simulated
from workers.gpus.boards import CATALOGUE
from workers.gpus.fault_script import (
    METRICS,
    SCRIPT_VARIABLE,
    STARTED_VARIABLE,
    STATE_VARIABLE,
    ScriptError,
    check_on,
    parse,
    pass_on,
)
from workers.gpus.machine import Machine
from workers.gpus.sim_scenario import Places, Scenario
from workers.gpus.symptoms import Symptoms
from workers.kernel_log import event_of
from workers.settings import Settings
from workers.telemetry import Limits, Reader

__all__ = ["make_desk"]
NODE = "DGX-H100-8"


def words_of(text: str) -> list[tuple[int | None, str, int, str, float, float | None]]:
    return [(one.gpu, one.fault, one.number, one.metric, one.start_s, one.end_s) for one in parse(text)]


def test_a_script_says_what_where_and_when() -> None:
    assert words_of("gpu3:lost@60s, gpu1:xid79@30s\ngpu2:throttle@10s+20s;node:mismatch@2m") == [
        (3, "lost", 0, "", 60.0, None), (1, "xid", 79, "", 30.0, None),
        (2, "throttle", 0, "", 10.0, 30.0), (None, "mismatch", 0, "", 120.0, None)]
    assert words_of("gpu6:nvlink2down@500ms gpu1:nometric=temperature gpu0:hang@1.5+1") == [
        (6, "nvlinkdown", 2, "", 0.5, None), (1, "nometric", 0, "temperature", 0.0, None),
        (0, "hang", 0, "", 1.5, 2.5)]
    assert parse("") == []


@pytest.mark.parametrize(("wrong", "words"), [
    ("gpu3", "write it like gpu3:lost@60s"), ("gpu:lost", "is not a fault"), ("lost@60s", "is not a fault"),
    ("gpu1:melted@3s", r"no fault of a GPU: choose one of lost, xidN"), ("gpu1:xid", "no fault of a GPU"),
    ("gpu1:nvlink3", "no fault of a GPU"), ("gpu1:xid3down", "no fault of a GPU"),
    ("node:lost", "no fault of a node: choose one of mismatch, unloaded"), ("node:xid79", "no fault of a node"),
    ("gpu1:nometric", "no value of a GPU"), ("gpu1:nometric=colour", "choose one of utilization, memory"),
    ("gpu1:lost=three", "only nometric takes one"), ("gpu1:lost@soon", "no time after the @"),
    ("gpu1:lost@5s+", "no time after the @"), ("gpu1:lost@-5s", "no time after the @"),
])
def test_a_wrong_script_is_refused_with_the_way_out(wrong: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words) as error:
        parse(f"gpu0:lost {wrong}")
    assert repr(wrong) in str(error.value)


@pytest.mark.parametrize(("topology", "script", "words"), [
    (NODE, "gpu8:lost", "names GPU 8, but the node has 8"), (NODE, "gpu0:nvlink18down", "its board has 18"),
    ("RTX4090-8-PCIe", "gpu0:nvlink0down", "its board has 0"),
    ("RTX4090-8-PCIe", "gpu0:ecc", "counts no memory errors"),
    ("DGX-9", "gpu0:lost", "cannot be played on 'DGX-9'"),
])
def test_a_script_that_breaks_what_a_node_has_not_is_refused(topology: str, script: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        check_on(parse(script), topology)
    with pytest.raises(DriverUnavailable):
        simulated.install(topology, "n", script=script)


def test_joining_refuses_faults_that_the_node_cannot_have(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text("{}")
    common = ["--state-dir", str(tmp_path), "--node", "n", "--config", str(answer)]
    for arguments, words in (
        (["--fault", "gpu0:lost"], "--simulate"), (["--simulate", NODE, "--fault", "gpu9:lost"], "the node has 8"),
        (["--simulate", NODE, "--fault", "gpu0"], "is not a fault"),
    ):
        assert join.main([*common, *arguments]) == 1
        assert words in capsys.readouterr().err


def test_a_joined_node_keeps_its_faults(tmp_path: Path) -> None:
    answer = {"node": "n", "portal_public_key": "ab" * 32, "broker_url": "redis://broker/0", "protocol": names.PROTOCOL}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    join.make_key(tmp_path)
    assert join.main(["--state-dir", str(tmp_path), "--node", "n", "--config", str(tmp_path / "answer.json"),
                      "--simulate", NODE, "--fault", "gpu0:lost@5s", "--fault", "node:unloaded@1m"]) == 0
    settings = Settings.load({"GPUYARD_NODE_CONFIG": str(tmp_path / "node.json")})
    assert (settings.simulate, settings.faults) == (NODE, "gpu0:lost@5s node:unloaded@1m")


def test_what_a_reader_must_know_is_passed_on_once() -> None:
    environment = {STATE_VARIABLE: "/mine"}
    pass_on(environment, "gpu0:lost", Path("/var/node"), 12.5)
    assert environment == {STATE_VARIABLE: "/mine", SCRIPT_VARIABLE: "gpu0:lost", STARTED_VARIABLE: "12.5"}


# --- what is seen --------------------------------------------------------------------------------------------------


def after(desk: SetDesk, seconds: float) -> None:
    desk.now += seconds


def missing(desk: SetDesk, index: int) -> dict[str, str]:
    return {name: why for name, why in desk.reading(desk.uuid(index)).missing.items()
            if why not in ("first_sample",) and name not in ("fan_percent",)}


def test_a_lost_gpu_is_lost_from_its_time_on_and_back_after_it(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu3:lost@60s+30s")
    assert missing(desk, 3) == {}
    after(desk, 61)
    assert missing(desk, 3)["gpu"] == "gpu_lost" and missing(desk, 2) == {}
    assert [(event.kind, event.code, event.gpu_uuid) for event in desk.driver.events()] == [("xid", 79, desk.uuid(3))]
    listed = desk.driver.enumerate()
    assert [info.index for info in listed.infos] == [0, 1, 2, 4, 5, 6, 7]
    assert "GPU 3" in (listed.problem or "")
    after(desk, 30)
    assert len(desk.driver.enumerate().infos) == 8
    assert missing(desk, 3) == {} and desk.driver.events() == []


@pytest.mark.parametrize("code", [13, 79, 94])
def test_an_xid_is_an_event_of_its_gpu(make_desk: Make, code: int) -> None:
    desk = make_desk(NODE, f"gpu1:xid{code}@30s")
    assert desk.driver.events() == []
    after(desk, 31)
    (event,) = desk.driver.events()
    assert (event.kind, event.code, event.gpu_uuid, event.source) == ("xid", code, desk.uuid(1), "nvml")
    assert missing(desk, 1) == {}


def test_a_hot_gpu_is_held_back_for_a_while(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu2:throttle@10s+20s")

    def work(seconds: float) -> Any:
        desk.hold(holder(7, desk.uuid(2), cpu_ticks=round(100 * (desk.now + seconds))), after_s=seconds)
        return desk.reading(desk.uuid(2))

    work(1)
    well = work(1)
    work(10)
    hot = work(5)
    assert hot.throttle_reasons & 0x48 == 0x48 and not well.throttle_reasons & 0x48
    assert hot.sm_clock_mhz < 0.5 * well.sm_clock_mhz and hot.power_mw < well.power_mw
    assert hot.temperature_c > well.temperature_c and hot.thermal_violation_ns >= 5e9
    work(15)
    assert not work(1).throttle_reasons & 0x48


def test_a_slow_link_is_below_what_the_board_can(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu0:slowlink@5s")
    well = desk.hardware(0)
    after(desk, 6)
    slow = desk.hardware(0)
    assert (well.pcie_generation, well.pcie_width) == (5, 16)
    assert (slow.pcie_generation, slow.pcie_width, slow.pcie_generation_max, slow.pcie_width_max) == (1, 4, 5, 16)
    assert (desk.reading(desk.uuid(0)).pcie_replays or 0) > 0


def test_a_memory_error_counts_raises_events_and_wants_a_reset(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu5:ecc@15s")
    symptoms = Symptoms()
    assert symptoms.of_readings(desk.driver.read()) == []
    after(desk, 16)
    reading = desk.reading(desk.uuid(5))
    assert (reading.ecc_uncorrected, reading.ecc_corrected) == (1, 3)
    found = desk.hardware(5)
    assert (found.ecc_uncorrected_total, found.rows_remapped_uncorrectable, found.row_remap_pending,
            found.row_remap_failed, found.recovery_action) == (1, 1, True, False, 4)
    assert [(event.kind, event.code) for event in desk.driver.events()] == [("ecc", None), ("xid", 48), ("recovery", 4)]
    assert {event.kind for event in symptoms.of_readings(desk.driver.read())} == {"ecc"}
    assert desk.reading(desk.uuid(4)).ecc_uncorrected == 0


def test_after_its_time_a_board_is_as_if_it_had_been_reset(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu5:ecc@15s+10s gpu5:nvlink1down@15s+60s")
    after(desk, 16)
    assert desk.hardware(5).row_remap_pending is True
    after(desk, 10)
    found = desk.hardware(5)
    assert (found.row_remap_pending, found.recovery_action, found.ecc_uncorrected_total) == (False, 0, 0)
    assert found.links[1].active is False
    after(desk, 50)
    assert {link.active for link in desk.hardware(5).links} == {True}


SYMPTOMS = {
    "lost@3s": {"lost"}, "lost@3s+40s": {"lost", "back"}, "throttle@3s": {"throttle"}, "slowlink@3s": {"slow_link"},
    "ecc@3s": {"ecc", "row_remap", "recovery"}, "nvlink2down@3s": {"link_down"}, "xid94@3s": set(),
    "memstuck@3s": set(), "badpids@3s": set(), "nometric=power@3s": set(), "throttle@3s+10s": set(),
}


@pytest.mark.parametrize("fault", SYMPTOMS)
def test_what_is_noticed_of_a_fault_on_a_busy_gpu_and_of_no_other(make_desk: Make, fault: str) -> None:
    """Beside what the driver tells by itself."""
    desk, symptoms = make_desk(NODE, f"gpu2:{fault}"), Symptoms()
    seen: set[tuple[str | None, str]] = set()
    for _ in range(30):
        ticks = round(100 * (desk.now + 2))
        desk.hold(*(holder(10 + gpu, desk.uuid(gpu), cpu_ticks=ticks) for gpu in (1, 2)), after_s=2.0)
        found = symptoms.of_readings(desk.driver.read()) + symptoms.of_hardware(desk.driver.hardware(), desk.now)
        seen |= {(event.gpu_uuid, event.kind) for event in found}
    assert seen == {(desk.uuid(2), kind) for kind in SYMPTOMS[fault]}


def test_an_nvlink_that_is_down_is_no_link_any_more(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu6:nvlink2down@5s")
    after(desk, 6)
    links = desk.hardware(6).links
    assert [link.link for link in links if not link.active] == [2]
    kinds = {link.kind for link in desk.driver.enumerate().links if desk.uuid(6) in (link.a, link.b)}
    assert kinds == {"NV17"}
    assert [event.code for event in desk.driver.events()] == [74]


def test_memory_that_is_stuck_belongs_to_nobody(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu7:memstuck@0s")
    reading = desk.reading(desk.uuid(7))
    assert reading.processes == [] and (reading.memory_used_bytes or 0) > 40 << 30
    assert (reading.memory_used_bytes or 0) < (reading.memory_total_bytes or 0)


def test_impossible_pids_make_a_list_unreliable(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu1:badpids@0s")
    desk.hold(holder(77, desk.uuid(1)))
    reading = desk.reading(desk.uuid(1))
    assert [process.pid for process in reading.processes or []] == [77]
    assert reading.missing["processes"] == "unreliable"


def test_a_name_that_is_not_text_costs_nothing_else(make_desk: Make) -> None:
    desk = make_desk(NODE, "gpu1:badname@0s")
    with pytest.raises(UnicodeDecodeError):
        pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(1))
    assert [info.name for info in desk.gpus.infos][::2] == ["NVIDIA H100 80GB HBM3"] * 4
    assert desk.gpus.infos[1].name.startswith("NVIDIA \N{REPLACEMENT CHARACTER}")
    assert missing(desk, 1) == {}


SEEN_AS = {
    "utilization": {"utilization_percent"}, "memory": {"memory_used_bytes"}, "power": {"power_mw"},
    "temperature": {"temperature_c"}, "memory_temperature": {"memory_temperature_c"}, "sm_clock": {"sm_clock_mhz"},
    "memory_clock": {"memory_clock_mhz"}, "energy": {"energy_mj"}, "throttle_reasons": {"throttle_reasons"},
    "processes": {"processes"}, "fan": set(), "encoder": {"encoder_percent"}, "decoder": {"decoder_percent"},
    "ecc": {"ecc_corrected", "ecc_uncorrected"},
    "pcie": {"pcie_replays", "pcie_received_bytes_per_s", "pcie_transmitted_bytes_per_s"},
    "nvlink": {"nvlink_received_bytes_per_s", "nvlink_transmitted_bytes_per_s"},
}


@pytest.mark.parametrize("metric", METRICS)
def test_a_value_that_is_not_supported_is_absent_alone(make_desk: Make, metric: str) -> None:
    desk = make_desk(NODE, f"gpu1:nometric={metric}@0s")
    desk.driver.read()
    after(desk, 1)
    expected = dict.fromkeys(SEEN_AS[metric], "not_supported")
    if metric == "utilization":
        expected["memory_utilization_percent"] = "not_supported"
    found = missing(desk, 1)
    assert {name: found[name] for name in SEEN_AS[metric]} == dict.fromkeys(SEEN_AS[metric], "not_supported")
    assert set(found) <= set(expected)
    assert missing(desk, 0) == {}


@pytest.mark.parametrize(("fault", "words"), [
    ("mismatch", "driver and library versions differ"), ("unloaded", "modprobe nvidia")])
def test_a_driver_that_fails_the_node_is_named_with_advice(make_desk: Make, fault: str, words: str) -> None:
    desk = make_desk(NODE, f"node:{fault}@40s+10s")
    assert missing(desk, 0) == {}
    after(desk, 41)
    assert all("gpu" in reading.missing for reading in desk.driver.read())
    with pytest.raises(DriverUnavailable, match=words):
        desk.driver.enumerate()
    with pytest.raises(DriverUnavailable, match=words):
        desk.driver.start()
    after(desk, 10)
    assert len(desk.driver.enumerate().infos) == 8


def test_a_hanging_gpu_hangs_for_its_time_and_no_other(make_desk: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make_desk(NODE, "gpu4:hang@20s+10s")
    asked: dict[int | None, float] = {}
    monkeypatch.setattr(simulated.time, "sleep", lambda seconds: asked.setdefault(desk.driver.at_work, seconds))
    desk.driver.read()
    assert asked == {}
    after(desk, 24)
    desk.driver.read()
    assert asked == {4: 6.0}
    after(desk, 6)
    asked.clear()
    desk.driver.read()
    assert asked == {}


# --- over the life of processes ------------------------------------------------------------------------------------


def scenario(tmp_path: Path, started: float, now: float) -> Scenario:
    machine = Machine(CATALOGUE.topologies[NODE], "n", clock=lambda: now, scan=lambda _uuids: [])
    return Scenario(machine, parse("gpu3:lost@10s gpu5:ecc@20s gpu1:xid31@60s"), started,
                    Places(kernel_log=tmp_path / "kmsg", told=tmp_path / "told.json"))


def test_another_process_goes_on_in_the_script_and_tells_nothing_twice(tmp_path: Path) -> None:
    first = scenario(tmp_path, started=100.0, now=115.0)
    first.advance()
    assert [(event.gpu, event.data) for event in first.events] == [(3, 79)]
    second = scenario(tmp_path, started=100.0, now=125.0)
    second.advance()
    assert [event.gpu for event in second.events] == [5, 5, 5]
    assert second.faults.lost == [3]  # still
    third = scenario(tmp_path, started=100.0, now=130.0)
    third.advance()
    assert not third.events and third._machine.gpus[5].errors.uncorrected == 1
    anew = scenario(tmp_path, started=5000.0, now=5015.0)
    anew.advance()
    assert [(event.gpu, event.data) for event in anew.events] == [(3, 79)]


def test_the_kernel_log_tells_the_same_xids(tmp_path: Path) -> None:
    scenario(tmp_path, started=100.0, now=170.0).advance()
    found = [event_of(line, 1.0) for line in (tmp_path / "kmsg").read_text().splitlines()]
    assert [(event.kind, event.code, event.pci_bus_id) for event in found if event] == [
        ("xid", code, f"0000:{0x07 + 0x0C * gpu:02X}:00") for gpu, code in ((3, 79), (5, 48), (1, 31))]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Reader]:
    monkeypatch.setenv(STARTED_VARIABLE, repr(time.monotonic()))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "simulated.json"))
    monkeypatch.setenv(SCRIPT_VARIABLE, "gpu3:lost@0s gpu4:hang@0s")
    reader = Reader("simulated", NODE, "scripted", interval_s=0.1, limits=Limits(
        deadline_s=1.0, start_deadline_s=4.0, restart_delays_s=(0.05,), retry_silent_s=600.0))
    reader.start()
    yield reader
    reader.stop()


def test_a_script_is_played_in_the_process_that_reads(reader: Reader) -> None:
    deadline = time.monotonic() + 30.0
    gpus = None
    while gpus is None or reader.status != "hung" or len(gpus.infos) != 6:
        assert time.monotonic() < deadline, (reader.status, gpus)
        gpus = reader.inventory()
        time.sleep(0.02)
    assert [info.index for info in gpus.infos] == [0, 1, 2, 5, 6, 7]
    assert "GPU 3" in (gpus.problem or "") and "GPU 4" in (gpus.problem or "")
