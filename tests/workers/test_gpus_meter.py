"""What is read in every second: rates, figures that cannot be true, what need not be asked twice."""

import math
import os
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pynvml
import pytest
from desk import GIB, Make, holder, make_desk
from hypothesis import given
from hypothesis import strategies as st

from wire.reports import GpuReading
from workers.gpus.faults import Faults, Return
from workers.gpus.nvml_identity import members, ranges
from workers.gpus.nvml_meter import Rate, whole
from workers.gpus.nvml_processes import Pids, ProcessList, anyone, is_alive
from workers.gpus.nvml_values import ALL_LINKS, Fields, FieldValue, Probe, field_values
from workers.gpus.plausible import BOUNDS, drop_nonsense

__all__ = ["make_desk"]

UNSUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


def counter(value: float | None, at_s: float = 0.0) -> FieldValue:
    return FieldValue(value, round(at_s * 1e6), "" if value is not None else "timeout")


def test_an_h100_tells_all_that_the_contract_asks_and_says_what_it_has_not(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    desk.driver.read()
    desk.now += 1
    reading = desk.reading(desk.uuid(0))
    assert reading.missing == {"fan_percent": "not_supported"}
    empty = {name for name in GpuReading.__struct_fields__ if getattr(reading, name) is None}
    assert empty == {"fan_percent"}
    assert reading.power_limit_mw == 700_000 and reading.memory_temperature_c == 37


def test_a_geforce_has_no_ecc_and_no_nvlink_and_never_a_zero_for_them(make_desk: Make) -> None:
    desk = make_desk("RTX4090-8-PCIe")
    reading = desk.reading(desk.uuid(0))
    for name in ("ecc_uncorrected", "nvlink_received_bytes_per_s", "memory_temperature_c"):
        assert getattr(reading, name) is None and reading.missing[name] == "not_supported"
    assert reading.fan_percent is not None


def test_busy_gpus_of_one_job_move_bytes_and_idle_ones_none(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    assert desk.reading(desk.uuid(0)).missing["nvlink_received_bytes_per_s"] == "first_sample"
    for second in range(3):
        desk.hold(*(holder(40 + index, desk.uuid(index), cpu_ticks=100 * second, team="job") for index in (0, 1)))
        busy, idle = desk.reading(desk.uuid(0)), desk.reading(desk.uuid(5))
    assert 1e10 < (busy.nvlink_received_bytes_per_s or 0) < 9e11
    assert 1e8 < (busy.pcie_received_bytes_per_s or 0) < 128e9
    assert idle.nvlink_received_bytes_per_s == 0 and idle.pcie_received_bytes_per_s == 0


def test_a_rate_uses_the_drivers_own_clock_and_the_unit_of_the_counter() -> None:
    rate = Rate(1024)
    assert rate.after(counter(100, 10.0), at=77.0) == (None, "first_sample")
    assert rate.after(counter(300, 12.0), at=999.0) == (100 * 1024, "")


def test_a_counter_that_the_driver_has_not_sampled_anew_keeps_its_rate() -> None:
    rate = Rate(1)
    rate.after(counter(0, 10.0), at=0)
    rate.after(counter(50, 11.0), at=0)
    assert rate.after(counter(50, 11.0), at=0) == (50, "")


def test_a_counter_that_went_back_gives_no_rate_and_the_next_one_does() -> None:
    rate = Rate(1)
    rate.after(counter(1000, 10.0), at=0)
    assert rate.after(counter(10, 11.0), at=0) == (None, "counter_reset")
    assert rate.after(counter(30, 12.0), at=0) == (20, "")


def test_after_a_gap_a_rate_starts_anew() -> None:
    rate = Rate(1)
    rate.after(counter(0, 10.0), at=0)
    assert rate.after(counter(None), at=0) == (None, "timeout")
    assert rate.after(counter(90, 12.0), at=0) == (None, "first_sample")


@given(st.lists(st.tuples(st.integers(0, 1 << 50), st.floats(0.001, 100)), min_size=1, max_size=20))
def test_a_rate_is_never_negative(steps: list[tuple[int, float]]) -> None:
    rate, at = Rate(1), 1.0
    for value, elapsed in steps:
        at += elapsed
        found, reason = rate.after(counter(value, at), at)
        assert (found is None) == bool(reason)
        assert found is None or (found >= 0 and math.isfinite(found))


@pytest.mark.parametrize(("name", "value"), [
    ("temperature_c", 255.0), ("temperature_c", math.nan), ("utilization_percent", 101.0), ("power_mw", 6_000_000),
    ("utilization_percent", -1.0), ("sm_clock_mhz", 0xFFFFFFFF), ("power_mw", -1), ("ecc_uncorrected", 1 << 63),
    ("nvlink_received_bytes_per_s", math.inf), ("memory_total_bytes", 0),
])
def test_a_figure_that_cannot_be_true_is_missing_as_nonsense(name: str, value: float) -> None:
    reading = GpuReading(uuid="g", at=0.0, **{name: value, "fan_percent": 30.0})
    drop_nonsense(reading)
    assert getattr(reading, name) is None and reading.missing == {name: "nonsense"}
    assert reading.fan_percent == 30.0


def test_more_memory_in_use_than_there_is_is_nonsense() -> None:
    reading = GpuReading(uuid="g", at=0.0, memory_used_bytes=90 * GIB, memory_total_bytes=80 * GIB)
    drop_nonsense(reading)
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (None, 80 * GIB)
    assert reading.missing == {"memory_used_bytes": "nonsense"}


@given(st.sampled_from(sorted(BOUNDS)), st.floats())
def test_whatever_a_driver_says_only_the_possible_is_told(name: str, value: float) -> None:
    reading = GpuReading(uuid="g", at=0.0, **{name: value})
    drop_nonsense(reading)
    kept, (low, high) = getattr(reading, name), BOUNDS[name]
    assert (kept is None) == (not low <= value <= high)
    assert (reading.missing == {}) == (kept is not None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_a_field_that_is_no_number_does_not_break_the_reading(value: float) -> None:
    reading = GpuReading(uuid="g", at=0.0, energy_mj=whole(FieldValue(value)))
    drop_nonsense(reading)
    assert reading.energy_mj is None and reading.missing == {"energy_mj": "nonsense"}


def test_what_a_gpu_does_not_have_is_asked_once_until_it_is_listed_anew(
    make_desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk("HGX-H100-4")
    desk.faults = Faults(returns=[Return(symbol="nvmlDeviceGetUtilizationRates", gpu=1, code=UNSUPPORTED)])
    asked: list[str] = []
    call = desk.library.call

    def counting(name: str, *rest: object) -> object:
        asked.append(name)
        return call(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.library, "call", counting)
    for _ in range(3):
        assert desk.reading(desk.uuid(1)).missing["utilization_percent"] == "not_supported"
    assert asked.count("nvmlDeviceGetUtilizationRates") == 3 * 3 + 1

    desk.faults = Faults()
    desk.driver.enumerate()
    assert desk.reading(desk.uuid(1)).utilization_percent == 0.0


def test_a_value_that_failed_for_another_reason_is_asked_again(make_desk: Make) -> None:
    desk = make_desk("HGX-H100-4")
    desk.faults = Faults(returns=[Return(symbol="nvmlDeviceGetPowerUsage", gpu=1, code=pynvml.NVML_ERROR_TIMEOUT)])
    assert desk.reading(desk.uuid(1)).missing["power_mw"] == "timeout"
    desk.faults = Faults()
    assert desk.reading(desk.uuid(1)).power_mw is not None


def test_a_driver_without_field_values_is_asked_for_them_once(
    make_desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(_handle: object, wanted: list[object]) -> None:
        asked.append(len(wanted))
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", refuse)
    fields = Fields([(1, 0), (2, ALL_LINKS)])
    for _ in range(2):
        assert {one.reason for one in fields.read(None).values()} == {"not_supported"}
    assert asked == [2]


def test_a_driver_that_refuses_a_call_for_one_new_field_gives_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(_handle: object, wanted: list[tuple[int, int]]) -> object:
        asked.append(len(wanted))
        if any(field == 230 for field, _ in wanted):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
        for value in values:
            value.valueType, value.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 7
        return values

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", answer)
    fields = Fields([(83, 0), (230, 0), (94, 0)])
    for _ in range(2):
        found = fields.read(None)
        assert [found[field, 0].value for field in (83, 230, 94)] == [7, None, 7]
        assert found[230, 0].reason == "not_supported"
    assert asked == [3, 1, 1, 1, 2]


@pytest.mark.parametrize(("kind", "member", "value"), [
    (0, "dVal", 1.5), (1, "uiVal", 7), (2, "ulVal", 1 << 40), (3, "ullVal", 1 << 63), (4, "sllVal", -9),
    (5, "siVal", -3), (6, "usVal", 65535),
])
def test_every_type_of_field_is_read_as_the_binding_would(kind: int, member: str, value: float) -> None:
    raw_values = (pynvml.c_nvmlFieldValue_t * 2)()
    raw_values[1].valueType, raw_values[1].timestamp = kind, 12345
    setattr(raw_values[1].value, member, value)
    raw_values[0].nvmlReturn = pynvml.NVML_ERROR_NO_PERMISSION
    refused, read = field_values(raw_values)
    assert (read.value, read.at_us) == (value, 12345)
    assert (refused.value, refused.reason) == (None, "no_permission")


def test_processes_that_proc_hides_are_alive_and_ended_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert is_alive(os.getpid()) and not is_alive(process.pid)

    def forbidden(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert is_alive(1)


def test_a_gpu_that_refuses_everything_is_silent_whatever_the_code(make_desk: Make) -> None:
    desk = make_desk("HGX-H100-4")
    symbols = ("UtilizationRates", "MemoryInfo_v2", "TemperatureV", "PowerUsage", "ClockInfo")
    desk.faults = Faults(returns=[Return(symbol=f"nvmlDeviceGet{name}", gpu=2, code=pynvml.NVML_ERROR_RESET_REQUIRED)
                                  for name in symbols])
    assert desk.reading(desk.uuid(2)).missing["gpu"] == "reset_required"
    assert "gpu" not in desk.reading(desk.uuid(1)).missing


def raw(pid: int, used: int = GIB, instance: int = 0xFFFFFFFF) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used, gpuInstanceId=instance, computeInstanceId=instance)


class Listing:
    """What a driver lists as computing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *processes: SimpleNamespace) -> None:
        self.processes = list(processes)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: self.processes)
        for kind in ("MPSCompute", "Graphics"):
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses", lambda handle: [])


def test_impossible_pids_are_dropped_and_the_list_is_called_unreliable(monkeypatch: pytest.MonkeyPatch) -> None:
    Listing(monkeypatch, raw(0), raw(0xFFFFFFFF), raw(32769), raw(12, used=0xFFFFFFFFFFFFFFFF))
    probe = Probe()
    found = ProcessList(Pids(32768, anyone)).read(None, probe)
    assert [(one.pid, one.memory_used_bytes, one.gpu_instance) for one in found or []] == [(12, None, None)]
    assert probe.missing == {"processes": "unreliable"}


def test_a_process_that_has_just_ended_is_no_reason_for_distrust_one_that_never_was_is(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, alive = Listing(monkeypatch, raw(12), raw(13)), {12}
    processes = ProcessList(Pids(32768, alive.__contains__))

    def read() -> tuple[list[int], dict[str, str]]:
        probe = Probe()
        return [one.pid for one in processes.read(None, probe) or []], probe.missing

    assert read() == ([12], {})
    listing.processes = [raw(12)]
    assert read() == ([12], {})
    listing.processes = [raw(12), raw(99)]
    assert read() == ([12], {})
    assert read() == ([12], {"processes": "unreliable"})


def test_the_instances_of_a_slice_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Listing(monkeypatch, raw(12, instance=3))
    found = ProcessList(Pids(32768, anyone)).read(None, Probe())
    assert [(one.gpu_instance, one.compute_instance) for one in found or []] == [(3, 3)]


@given(st.sets(st.integers(0, 255)))
def test_cores_are_written_as_ranges(cores: set[int]) -> None:
    words = [sum(1 << core % 64 for core in cores if core // 64 == place) for place in range(4)]
    assert members(words) == sorted(cores)
    written = [tuple(map(int, part.split("-"))) for part in ranges(sorted(cores)).split(",") if part]
    assert {core for span in written for core in range(span[0], span[-1] + 1)} == cores
    assert all(a[-1] + 1 < b[0] for a, b in pairwise(written))
