"""What is seen to be wrong with a GPU although its driver does not say so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.hardware import GpuHardware, HealthEvent, NvLink
from wire.reports import GpuReading
from workers.gpus.symptoms import Symptoms

UUID = "GPU-1"
HOT, POWER_BRAKE, POWER_CAP = 0x08 | 0x40, 0x08 | 0x80, 0x04


class Patient:
    def __init__(self) -> None:
        self.symptoms, self.now = Symptoms(), 1000.0

    def second(self, **values: object) -> list[str]:
        return [event.kind for event in self.seconds(1, **values)]

    def seconds(self, count: int, **values: object) -> list[HealthEvent]:
        events: list[HealthEvent] = []
        for _ in range(count):
            self.now += 1
            reading = GpuReading(uuid=UUID, at=self.now, **values)  # type: ignore[arg-type]
            events += self.symptoms.of_readings([reading])
        return events

    def look(self, **values: object) -> list[HealthEvent]:
        self.now += 10
        hardware = GpuHardware(uuid=UUID, **values)  # type: ignore[arg-type]
        return self.symptoms.of_hardware([hardware], self.now)


@pytest.fixture
def gpu() -> Patient:
    return Patient()


def test_a_healthy_gpu_gives_no_events(gpu: Patient) -> None:
    assert gpu.seconds(100, ecc_uncorrected=0, throttle_reasons=POWER_CAP, utilization_percent=100.0) == []
    assert gpu.look(pcie_generation=5, pcie_width=16, pcie_generation_max=5, pcie_width_max=16, recovery_action=0,
                    row_remap_pending=False, row_remap_failed=False, links=[NvLink(link=0, active=True)]) == []


def test_a_gpu_is_lost_once_and_back_once(gpu: Patient) -> None:
    assert gpu.second() == []
    assert gpu.second(missing={"gpu": "gpu_lost"}) == ["lost"]
    assert gpu.second(missing={"gpu": "gpu_lost"}) == []
    assert gpu.second() == ["back"]
    assert gpu.second() == []


def test_a_gpu_that_was_released_on_purpose_is_not_lost(gpu: Patient) -> None:
    gpu.second()
    assert gpu.second(missing={"gpu": "released"}) == []
    assert gpu.second() == []


def test_only_new_uncorrectable_errors_are_events(gpu: Patient) -> None:
    assert gpu.second(ecc_uncorrected=5) == []
    (event,) = gpu.seconds(1, ecc_uncorrected=7)
    assert (event.kind, event.gpu_uuid, event.source) == ("ecc", UUID, "reader")
    assert "2 uncorrectable memory errors, 7 since" in event.message
    assert gpu.second(ecc_uncorrected=None, missing={"ecc_uncorrected": "timeout"}) == []
    assert gpu.second(ecc_uncorrected=0) == []  # the driver was loaded anew
    assert gpu.second(ecc_uncorrected=1) == ["ecc"]


def test_heat_that_lasts_is_an_event_and_a_short_one_is_not(gpu: Patient) -> None:
    assert gpu.seconds(29, throttle_reasons=HOT) == []
    assert gpu.seconds(1, throttle_reasons=0) == []
    assert gpu.seconds(30, throttle_reasons=HOT) == []
    (event,) = gpu.seconds(100, throttle_reasons=HOT)
    assert event.kind == "throttle" and "its temperature" in event.message


def test_throttling_that_flickers_is_told_once(gpu: Patient) -> None:
    told = []
    for _ in range(5):
        told += gpu.seconds(40, throttle_reasons=POWER_BRAKE)
        told += gpu.seconds(20, throttle_reasons=0)
    assert [event.kind for event in told] == ["throttle"] and "power brake" in told[0].message
    gpu.seconds(90, throttle_reasons=0)
    assert len(gpu.seconds(40, throttle_reasons=POWER_BRAKE)) == 1


def test_rows_to_be_remapped_are_one_event_by_their_count_also_for_another_reader(gpu: Patient) -> None:
    (event,) = gpu.look(row_remap_pending=True, rows_remapped_correctable=0, rows_remapped_uncorrectable=1)
    assert event.kind == "row_remap"
    assert gpu.look(row_remap_pending=True, rows_remapped_correctable=0, rows_remapped_uncorrectable=1) == []
    again = Patient().look(row_remap_pending=True, rows_remapped_correctable=0, rows_remapped_uncorrectable=1)
    assert [one.key for one in again] == [event.key]
    (other,) = gpu.look(row_remap_pending=True, rows_remapped_correctable=0, rows_remapped_uncorrectable=2)
    assert other.key != event.key
    (failed,) = gpu.look(row_remap_failed=True)
    assert "replaced" in failed.message


def test_a_link_that_was_up_and_is_down_is_an_event_one_that_never_was_is_not(gpu: Patient) -> None:
    assert gpu.look(links=[NvLink(link=0, active=True), NvLink(link=1, active=False)]) == []
    (event,) = gpu.look(links=[NvLink(link=0, active=False), NvLink(link=1, active=False)])
    assert event.kind == "link_down" and "NVLink 0 is down, 0 of 2 are up" in event.message
    assert gpu.look(links=[NvLink(link=0, active=False)]) == []
    assert gpu.look(links=[NvLink(link=0, active=None)]) == []
    assert gpu.look(links=[NvLink(link=0, active=True)]) == []
    assert len(gpu.look(links=[NvLink(link=0, active=False)])) == 1


SLOW = {"pcie_generation": 1, "pcie_width": 4, "pcie_generation_max": 5, "pcie_width_max": 16}
FAST = {"pcie_generation": 5, "pcie_width": 16, "pcie_generation_max": 5, "pcie_width_max": 16}


def test_a_slow_link_counts_under_load_and_when_it_lasts(gpu: Patient) -> None:
    gpu.second(utilization_percent=0.0)
    assert gpu.look(**SLOW) + gpu.look(**SLOW) + gpu.look(**SLOW) == []
    gpu.second(utilization_percent=95.0)
    assert gpu.look(**SLOW) == []
    (event,) = gpu.look(**SLOW)
    assert event.kind == "slow_link" and "generation 1 x4, it could at generation 5 x16" in event.message
    assert gpu.look(**SLOW) == []
    assert gpu.look(**FAST) == []
    assert gpu.look(**SLOW) + gpu.look(**SLOW) != []


def test_what_is_unknown_of_a_link_is_no_fault(gpu: Patient) -> None:
    gpu.second(utilization_percent=95.0)
    assert [gpu.look(pcie_generation=1, pcie_width=None, pcie_width_max=16) for _ in range(3)] == [[], [], []]


def test_what_the_driver_wants_done_is_an_event_when_it_changes(gpu: Patient) -> None:
    assert gpu.look(recovery_action=0) == []
    (event,) = gpu.look(recovery_action=2)
    assert (event.kind, event.code) == ("recovery", 2) and "reboot" in event.message
    assert gpu.look(recovery_action=2) == []
    assert gpu.look(recovery_action=None) == []
    assert gpu.look(recovery_action=0) == []


@given(st.lists(st.booleans(), max_size=40))
def test_lost_and_back_alternate(answers: list[bool]) -> None:
    gpu = Patient()
    kinds = [kind for answer in answers for kind in gpu.second(missing={} if answer else {"gpu": "gpu_lost"})]
    assert kinds == (["lost", "back"] * len(kinds))[:len(kinds)]
