"""Slow-moving details and what a driver tells by itself, through the real binding."""

import psutil
import pynvml
import pytest
from desk import Make, holder, make_desk

from workers.gpus import DriverUnavailable, nvml
from workers.gpus.faults import Faults, Return

__all__ = ["make_desk"]


def test_an_h100_tells_its_links_its_pcie_and_its_memory(make_desk: Make) -> None:
    found = make_desk("DGX-H100-8").hardware(0)
    assert len(found.links) == 18 and {link.active for link in found.links} == {True}
    assert {(link.version is None, link.remote_kind, link.crc_errors) for link in found.links} == {(False, "switch", 0)}
    assert (found.pcie_generation, found.pcie_width, found.pcie_generation_max, found.pcie_width_max) == (5, 16, 5, 16)
    assert (found.ecc_enabled, found.ecc_uncorrected_total, found.row_remap_failed) == (True, 0, False)
    assert (found.recovery_action, found.missing) == (0, {})


def test_gpus_that_are_bridged_know_each_other(make_desk: Make) -> None:
    desk = make_desk("HGX-H100-4")
    buses = {gpu.bus_id for gpu in desk.machine.gpus}
    ends = [{link.remote_pci_bus_id for link in desk.hardware(index).links if link.active} for index in range(4)]
    assert all(end == buses - {gpu.bus_id} for end, gpu in zip(ends, desk.machine.gpus, strict=True))
    assert {link.remote_kind for link in desk.hardware(0).links if link.active} == {"gpu"}


def test_a_board_without_links_ecc_or_mig_says_what_it_has_not(make_desk: Make) -> None:
    found = make_desk("RTX4090-8-PCIe").hardware(0)
    assert (found.links, found.mig, found.ecc_enabled, found.row_remap_pending) == ([], None, None, None)
    assert found.missing["ecc_enabled"] == found.missing["row_remap_pending"] == "not_supported"


def test_the_limits_of_a_board_are_part_of_what_it_is(make_desk: Make) -> None:
    info = make_desk("DGX-H100-8").gpus.infos[5]
    assert (info.power_limit_min_mw, info.power_limit_max_mw) == (200_000, 700_000)
    assert info.power_limit_default_mw == 700_000
    assert info.temperature_slowdown_c and info.temperature_shutdown_c
    assert info.temperature_shutdown_c > info.temperature_slowdown_c
    assert (info.nvlink_count, info.mig_capable, info.mig_enabled, info.virtual) == (18, True, False, None)
    assert info.sm_clock_max_mhz == 1980 and info.cpu_affinity and info.vbios and info.missing == {}


@pytest.mark.parametrize(("mode", "word"), [(0, None), (1, "passthrough"), (2, "vgpu"), (3, None)])
def test_a_guest_knows_that_it_is_one(
    make_desk: Make, monkeypatch: pytest.MonkeyPatch, mode: int, word: str | None
) -> None:
    desk = make_desk("HGX-H100-4")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetVirtualizationMode", lambda handle: mode)
    assert {info.virtual for info in desk.driver.enumerate().infos} == {word}


def test_a_chip_without_memory_of_its_own_is_not_lost_for_that(make_desk: Make) -> None:
    desk = make_desk("HGX-H100-4")
    desk.faults = Faults(returns=[Return(symbol=f"nvmlDeviceGetMemoryInfo{version}", gpu=1,
                                         code=pynvml.NVML_ERROR_NOT_SUPPORTED) for version in ("", "_v2")])
    info = desk.driver.enumerate().infos[1]
    assert info.memory_total_bytes == psutil.virtual_memory().total
    assert info.missing["memory_total_bytes"] == "shared_with_host"
    reading = desk.reading(desk.uuid(1))
    assert reading.memory_used_bytes is None and reading.missing["memory_used_bytes"] == "not_supported"
    assert "gpu" not in reading.missing and reading.power_mw is not None


def test_one_broken_detail_hides_no_other(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    desk.faults = Faults(returns=[Return(symbol="nvmlDeviceGetEccMode", gpu=1, code=pynvml.NVML_ERROR_UNKNOWN)])
    broken, whole = desk.hardware(1), desk.hardware(2)
    assert broken.ecc_enabled is None and broken.missing == {"ecc_enabled": "error:999"}
    assert broken.pcie_width == 16 and whole.missing == {}


def test_a_lost_gpu_has_no_details_and_the_others_have(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    desk.faults = Faults(lost=[3])
    desk.driver.enumerate()
    assert [found.uuid for found in desk.driver.hardware()] == [desk.uuid(index) for index in range(8) if index != 3]


def test_an_xid_is_told_once_with_its_gpu(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8", "gpu1:xid31@5s")
    assert desk.driver.events() == []
    desk.now += 6
    (event,) = desk.driver.events()
    assert (event.kind, event.code, event.gpu_uuid, event.source) == ("xid", 31, desk.uuid(1), "nvml")
    assert event.pci_bus_id == desk.machine.gpus[1].bus_id
    assert event.key == f"xid/{desk.uuid(1)}/31/1006000"
    assert desk.driver.events() == []


def test_a_gpu_that_falls_off_the_bus_still_tells_its_last_word(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8", "gpu3:lost@5s")
    desk.now += 6
    assert desk.reading(desk.uuid(3)).missing["gpu"] == "gpu_lost"
    assert [(event.code, event.gpu_uuid) for event in desk.driver.events()] == [(79, desk.uuid(3))]


def test_a_double_bit_error_comes_with_what_the_driver_wants_done(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8", "gpu5:ecc@5s")
    desk.now += 6
    told = {(event.kind, event.code) for event in desk.driver.events()}
    assert {("ecc", None), ("xid", 48), ("recovery", 4)} == told
    found = desk.hardware(5)
    assert found.row_remap_pending is True and found.recovery_action == 4


def test_a_driver_without_events_is_read_all_the_same(make_desk: Make) -> None:
    desk = make_desk("HGX-H100-4", "gpu1:xid31@5s")
    desk.faults = Faults(missing=["nvmlEventSetCreate"])
    desk.driver.close()
    desk.driver.start()
    desk.driver.enumerate()
    desk.now += 6
    assert desk.driver.events() == []
    assert desk.reading(desk.uuid(1)).power_mw is not None


def test_events_go_on_after_the_set_was_lost(make_desk: Make) -> None:
    desk = make_desk("HGX-H100-4", "gpu1:xid31@5s gpu1:xid13@9s")
    desk.now += 6
    desk.faults = Faults(returns=[Return(symbol="nvmlEventSetWait_v2", code=pynvml.NVML_ERROR_UNKNOWN)])
    assert desk.driver.events() == []
    desk.faults = Faults()
    desk.driver.enumerate()
    desk.now += 4
    assert {event.code for event in desk.driver.events()} == {31, 13}


def test_the_library_is_opened_anew_after_a_loss_and_ever_more_rarely(
    make_desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk("DGX-H100-8")
    now = [500.0]
    monkeypatch.setattr(nvml, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    opened: list[float] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: opened.append(now[0]))
    desk.driver.read()
    assert not desk.driver.renew()
    desk.faults = Faults(lost=[3])
    for _ in range(40):
        desk.driver.read()
        if desk.driver.renew():
            desk.driver.enumerate()
        now[0] += 1
    assert opened == [500.0, 505.0, 515.0, 535.0]

    desk.faults = Faults()
    desk.driver.enumerate()
    assert len([reading for reading in desk.driver.read() if not reading.missing.get("gpu")]) == 8
    now[0] += 300
    assert not desk.driver.renew()


def test_a_driver_that_does_not_open_again_says_why(make_desk: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make_desk("DGX-H100-8")
    desk.faults = Faults(lost=[3])
    desk.driver.read()
    desk.faults = Faults(everything=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(DriverUnavailable, match="versions differ"):
        desk.driver.renew()


def test_gpus_that_move_up_when_one_is_gone_are_neither_lost_nor_doubled(
    make_desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk("HGX-H100-4")
    uuids = [info.uuid for info in desk.gpus.infos]
    handle = pynvml.nvmlDeviceGetHandleByIndex
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: handle(index if index < 1 else index + 1))
    gpus = desk.driver.enumerate()
    assert [info.uuid for info in gpus.infos] == [uuids[0], uuids[2], uuids[3]]
    assert f"GPU 1 ({uuids[1]}) does not answer (gpu_lost)" in (gpus.problem or "")
    readings = desk.driver.read()
    assert sorted(reading.uuid for reading in readings) == sorted(uuids)
    assert [reading.uuid for reading in readings if "gpu" in reading.missing] == [uuids[1]]


def test_a_released_driver_lets_go_to_the_last_reference_and_comes_back(
    make_desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk("DGX-H100-8")
    desk.driver.start()  # counted twice by the library
    left = [2]

    def shut_down() -> None:
        if not left[0]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        left[0] -= 1

    monkeypatch.setattr(pynvml, "nvmlShutdown", shut_down)
    desk.driver.release()
    assert left == [0]
    desk.driver.start()
    assert desk.driver.enumerate() == desk.gpus
    desk.hold(holder(9, desk.uuid(0)))
    assert [process.pid for process in desk.reading(desk.uuid(0)).processes or []] == [9]
