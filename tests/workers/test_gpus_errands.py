"""Orders to the reading process: handed over, carried out, and told of whatever happens to it."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wire.hardware import Hardware, HealthEvent, MigOrder, MigSlice, OrderResult, ReleaseOrder
from wire.reports import GpuReading
from workers.gpus.errands import WAITS_MOST_S, Errands
from workers.gpus.frames import Command
from workers.telemetry import Limits, Reader

PATIENCE_S = 20.0
LIMITS = Limits(deadline_s=1.0, start_deadline_s=20.0, restart_delays_s=(0.05, 0.05, 0.05), retry_silent_s=600.0,
                details_every_s=0.3)
SEVEN = [MigSlice("1g.10gb", start) for start in range(7)]


class Watched:
    """A reader, and all that it told."""

    def __init__(self, topology: str = "DGX-H100-8") -> None:
        self.reader = Reader("simulated", topology, f"errands-{os.getpid()}", interval_s=0.1, limits=LIMITS)
        self.results: list[OrderResult] = []
        self.events: list[HealthEvent] = []
        self.readings: list[GpuReading] = []
        self.hardware: Hardware | None = None
        self.reader.start()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen: {self.reader.status}, {self.results}"
            time.sleep(0.02)
            self.results += self.reader.results()
            self.events += self.reader.health()
            self.readings += self.reader.latest()
            self.hardware = self.reader.hardware() or self.hardware

    def uuid(self, index: int) -> str:
        gpus = self.reader.inventory()
        assert gpus is not None
        return next(info.uuid for info in gpus.infos if info.index == index and not info.parent_uuid)

    def result(self, order: str) -> OrderResult:
        self.until(lambda: any(one.id == order and one.state != "running" for one in self.results))
        return next(one for one in self.results if one.id == order and one.state != "running")

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    running: list[Watched] = []

    def start(topology: str = "DGX-H100-8") -> Watched:
        running.append(Watched(topology))
        return running[-1]

    yield start
    for one in running:
        one.reader.stop()


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    path = tmp_path / "faults.json"
    monkeypatch.setenv("GPUYARD_SIM_FAULTS", str(path))

    def inject(**kinds: object) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(kinds))
        fresh.rename(path)

    return inject


def test_details_come_and_come_again_when_they_change(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_SIM_FAULTS_SCRIPT", "gpu2:nvlink3down@2s")
    one = watch()
    one.until(lambda: one.hardware)
    assert one.hardware is not None and len(one.hardware.gpus) == 8
    assert one.reader.hardware() is None  # drained
    one.until(lambda: "link_down" in one.kinds())
    one.until(lambda: any(link.active is False for gpu in one.hardware.gpus for link in gpu.links))  # type: ignore[union-attr]
    down = {(gpu.uuid, link.link) for gpu in one.hardware.gpus for link in gpu.links if link.active is False}
    assert down == {(one.uuid(2), 3)}


def test_a_cut_is_carried_out_and_seen_in_the_list_and_the_details(watch: Callable[..., Watched]) -> None:
    one = watch()
    uuid = one.uuid(2)
    one.reader.carry_out(MigOrder(id="a", gpu_uuid=uuid, layout=SEVEN))
    assert one.result("a").state == "done"
    assert [each.state for each in one.results] == ["running", "done"]
    gpus = one.reader.inventory()
    assert gpus is not None
    slices = {info.uuid for info in gpus.infos if info.parent_uuid == uuid}
    assert len(slices) == 7
    one.until(lambda: slices <= {reading.uuid for reading in one.readings})
    assert one.hardware is not None
    cut = next(gpu.mig for gpu in one.hardware.gpus if gpu.uuid == uuid)
    assert cut is not None and {instance.uuid for instance in cut.instances} == slices
    assert one.reader.status == "ok"


def test_a_cut_that_is_impossible_is_undone_and_reading_goes_on(watch: Callable[..., Watched]) -> None:
    one = watch()
    uuid = one.uuid(2)
    one.reader.carry_out(MigOrder(id="a", gpu_uuid=uuid, layout=[MigSlice("9g.90gb", 0)]))
    assert (one.result("a").state, "no place 0 for 9g.90gb" in one.result("a").message) == ("undone", True)
    one.readings.clear()
    one.until(lambda: len({reading.uuid for reading in one.readings}) == 8)


def test_a_change_may_take_longer_than_a_reading_and_the_rest_goes_on_afterwards(
    watch: Callable[..., Watched], faults: Callable[..., None]
) -> None:
    faults(delays=[{"symbol": "nvmlDeviceSetMigMode", "seconds": 3 * LIMITS.deadline_s}])
    one = watch()
    uuid, pid = one.uuid(2), one.reader.pid
    one.reader.carry_out(MigOrder(id="a", gpu_uuid=uuid, layout=SEVEN))
    assert one.result("a").state == "done"
    assert one.reader.pid == pid and "hang" not in one.kinds()


def test_a_release_is_told_in_the_readings_and_ends_by_itself(watch: Callable[..., Watched]) -> None:
    one = watch()
    one.until(lambda: one.readings)
    one.reader.carry_out(ReleaseOrder(id="r", duration_s=0.5))
    one.until(lambda: any(reading.missing.get("gpu") == "released" for reading in one.readings))
    assert one.result("r").state == "done"
    one.readings.clear()
    one.until(lambda: len({reading.uuid for reading in one.readings if "gpu" not in reading.missing}) == 8)
    assert not {"lost", "back", "hang"} & set(one.kinds())


def test_a_reader_that_ends_in_the_middle_of_an_order_leaves_no_order_unanswered(
    watch: Callable[..., Watched], faults: Callable[..., None]
) -> None:
    faults(delays=[{"symbol": "nvmlDeviceSetMigMode", "seconds": 3600}])
    one = watch()
    one.reader.carry_out(MigOrder(id="a", gpu_uuid=one.uuid(2), layout=SEVEN))
    one.until(lambda: one.results)
    assert one.reader.pid is not None
    os.kill(one.reader.pid, signal.SIGKILL)
    assert one.result("a").state == "failed" and "did not come back" in one.result("a").message


def test_a_hang_and_a_mismatch_are_events(watch: Callable[..., Watched], faults: Callable[..., None]) -> None:
    one = watch()
    hung = one.uuid(3)
    faults(delays=[{"symbol": "nvmlDeviceGetPowerUsage", "gpu": 3, "seconds": 3600}])
    one.until(lambda: ("hang", hung) in [(event.kind, event.gpu_uuid) for event in one.events])
    faults(everything=18)
    one.until(lambda: "driver" in one.kinds())
    told = next(event for event in one.events if event.kind == "driver")
    assert "versions differ" in told.message and told.gpu_uuid is None
    assert "lost" not in one.kinds()


@pytest.mark.parametrize("symbol", ["nvmlDeviceGetEccMode", "nvmlDeviceGetNvLinkErrorCounter"])
def test_a_detail_that_hangs_costs_only_its_gpu(
    watch: Callable[..., Watched], faults: Callable[..., None], symbol: str
) -> None:
    faults(delays=[{"symbol": symbol, "gpu": 2, "seconds": 3600}])
    one = watch()
    hung = one.uuid(2)
    one.until(lambda: one.hardware and len(one.hardware.gpus) == 7)
    assert [(event.kind, event.gpu_uuid) for event in one.events] == [("hang", hung)]
    assert one.reader.status == "hung"


def test_a_lost_gpu_is_an_event_with_its_xid_and_again_when_it_is_back(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_SIM_FAULTS_SCRIPT", "gpu6:lost@1s+3s")
    one = watch()
    one.until(lambda: "back" in one.kinds())
    assert {(event.kind, event.code) for event in one.events if event.gpu_uuid == one.uuid(6)} >= {
        ("xid", 79), ("lost", None), ("back", None)}
    assert {event.gpu_uuid for event in one.events} == {one.uuid(6)}


ORDER = MigOrder(id="a", gpu_uuid="GPU-1")


class Desk:
    def __init__(self) -> None:
        self.now, self.sent = 0.0, list[Command]()
        self.errands = Errands(lambda: self.now)

    def outcome(self) -> list[tuple[str, str]]:
        return [(result.id, result.state) for result in self.errands.results()]


def test_an_order_that_had_not_begun_waits_for_the_next_process() -> None:
    desk = Desk()
    desk.errands.take(ORDER)
    desk.errands.send(desk.sent.append)
    assert desk.errands.are_under_way
    desk.errands.carrier_ended()
    desk.errands.send(desk.sent.append)
    assert desk.sent == [ORDER, ORDER] and desk.outcome() == []


def test_an_order_that_nobody_takes_fails_with_the_reason() -> None:
    desk = Desk()
    desk.errands.take(ORDER)
    desk.now = WAITS_MOST_S - 1
    desk.errands.give_up("failed: no driver")
    assert desk.outcome() == []
    desk.now = WAITS_MOST_S + 1
    desk.errands.give_up("failed: no driver")
    (result,) = desk.errands.results()
    assert (result.state, "no driver" in result.message) == ("failed", True)
    desk.errands.send(desk.sent.append)
    assert desk.sent == []


def test_a_final_result_ends_an_order() -> None:
    desk = Desk()
    desk.errands.take(ORDER)
    desk.errands.send(desk.sent.append)
    for state in ("running", "undone"):
        desk.errands.note(OrderResult(id="a", at=0.0, state=state))
    assert not desk.errands.are_under_way
    desk.errands.carrier_ended()
    assert desk.outcome() == [("a", "running"), ("a", "undone")]
