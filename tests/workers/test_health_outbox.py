"""Health events on their way home: merged, kept through restarts, sent again, given up only when they arrived."""

from pathlib import Path

import pytest

from wire.hardware import GpuHardware, Hardware, HealthEvent, Nic, NvLink
from wire.reports import GpuInfo, GpuProcess, GpuReading, Report
from workers.health import KEPT_MOST, HardwareDesk, HealthOutbox, claim, located
from workers.outbox import Pulse
from workers.publish import BrokerDown


class Wire:
    """Where a publisher would send to."""

    def __init__(self) -> None:
        self.sent: list[Report] = []
        self.down = False

    def send_all(self, reports: list[Report]) -> None:
        if self.down:
            raise BrokerDown("down")
        self.sent += reports

    def send(self, report: Report) -> None:
        self.send_all([report])


class Bench:
    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.path, self.wire, self.pulse = path, Wire(), Pulse(lambda: self.now)
        self.restart()

    def restart(self) -> None:
        self.outbox = HealthOutbox(self.path, self.wire, self.pulse, lambda: self.now)  # type: ignore[arg-type]

    def at(self, now: float) -> int:
        self.now = now
        return self.outbox.run_once()

    def beat(self) -> None:
        self.pulse.heard(self.pulse.beat())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "health")


def xid(at: float, code: int = 79, uuid: str | None = "GPU-1", source: str = "nvml", message: str = "") -> HealthEvent:
    return HealthEvent(at=at, key=f"xid/{uuid}/{code}/{at}", kind="xid", gpu_uuid=uuid, code=code, source=source,
                       message=message)  # fmt: skip


def test_an_event_is_sent_at_once_and_again_for_ten_minutes(bench: Bench) -> None:
    bench.outbox.add([xid(1.0)])
    assert [bench.at(now) for now in (0, 1, 9, 10, 30, 60, 500, 600, 700)] == [1, 0, 0, 1, 0, 1, 0, 1, 0]
    assert len(bench.outbox) == 1, "no heartbeat came back: nothing proves that it arrived"
    bench.beat()
    bench.at(701)
    assert len(bench.outbox) == 0
    bench.restart()
    assert len(bench.outbox) == 0


def test_a_broker_that_is_down_delays_and_loses_nothing(bench: Bench) -> None:
    bench.wire.down = True
    bench.outbox.add([xid(1.0), xid(2.0, uuid="GPU-2")])
    with pytest.raises(BrokerDown):
        bench.at(0)
    bench.wire.down = False
    assert bench.at(5) == 2


def test_a_restarted_worker_sends_what_it_finds(bench: Bench) -> None:
    bench.outbox.add([xid(1.0)])
    bench.at(0)
    bench.restart()
    assert bench.at(1) == 1 and bench.wire.sent[0] == bench.wire.sent[1]


def test_a_file_that_is_no_longer_readable_costs_only_what_was_in_it(bench: Bench) -> None:
    bench.path.write_bytes(b"\xc1 not ours")
    bench.restart()
    bench.outbox.add([xid(1.0)])
    bench.restart()
    assert len(bench.outbox) == 1


@pytest.mark.parametrize("order", [("nvml", "kernel_log"), ("kernel_log", "nvml")])
def test_two_sources_tell_of_one_event(bench: Bench, order: tuple[str, str]) -> None:
    said = {"nvml": "", "kernel_log": "Xid 79, pid=7, name=python"}
    first, second = (xid(at, source=source, message=said[source]) for at, source in zip((1.0, 4.0), order, strict=True))
    bench.outbox.add([first])
    bench.at(0)
    bench.outbox.add([second])
    bench.at(10)
    keys = {report.key for report in bench.wire.sent if isinstance(report, HealthEvent)}
    last = bench.wire.sent[-1]
    assert isinstance(last, HealthEvent)
    assert (keys, last.message, last.count) == ({first.key}, "Xid 79, pid=7, name=python", 1)


def test_a_storm_is_one_event_whose_count_grows(bench: Bench) -> None:
    for number in range(1000):
        bench.outbox.add([xid(1.0 + number / 1000, code=13)])
        bench.at(number / 1000)
    assert len(bench.wire.sent) == 1 and len(bench.outbox) == 1
    assert bench.at(6.0) == 1
    last = bench.wire.sent[-1]
    assert isinstance(last, HealthEvent) and last.count == 1000


def test_other_codes_other_gpus_and_later_ones_are_events_of_their_own(bench: Bench) -> None:
    bench.outbox.add([xid(1.0), xid(1.0, code=48), xid(1.0, uuid="GPU-2"), xid(30.0)])
    assert bench.at(0) == 4


def test_comings_and_goings_are_never_merged(bench: Bench) -> None:
    bench.outbox.add([HealthEvent(at=1.0 + n, key=f"k{n}", kind=kind, gpu_uuid="GPU-1")
                      for n, kind in enumerate(("lost", "back", "lost"))])  # fmt: skip
    bench.at(0)
    assert [report.kind for report in bench.wire.sent if isinstance(report, HealthEvent)] == ["lost", "back", "lost"]


def test_the_outbox_does_not_grow_without_end(bench: Bench) -> None:
    bench.outbox.add([xid(1.0, code=code) for code in range(KEPT_MOST + 20)])
    assert len(bench.outbox) == KEPT_MOST


def test_a_place_on_the_bus_becomes_a_uuid() -> None:
    infos = [GpuInfo(uuid="GPU-1", index=0, vendor="nvidia", name="x", pci_bus_id="00000000:07:00.0"),
             GpuInfo(uuid="MIG-1", index=0, vendor="nvidia", name="x", pci_bus_id="0000:07:00", parent_uuid="GPU-1"),
             GpuInfo(uuid="GPU-2", index=1, vendor="nvidia", name="x")]  # fmt: skip
    for place, uuid in (("0000:07:00", "GPU-1"), ("0000:07:00.0", "GPU-1"), ("0000:08:00", None), ("nonsense", None)):
        event = HealthEvent(at=1.0, key="k", kind="xid", pci_bus_id=place)
        assert located(event, infos).gpu_uuid == uuid


def test_a_process_that_hides_its_attempt_is_known_by_its_group() -> None:
    class Attempts:
        def active(self) -> list[str]:
            return ["a", "b"]

        def processes(self, attempt: str) -> set[int]:
            return {"a": {1, 2}, "b": {3}}[attempt]

    hidden, foreign, named = GpuProcess(pid=3), GpuProcess(pid=9), GpuProcess(pid=1, attempt="a")
    claim([GpuReading(uuid="GPU-1", at=1.0, processes=[hidden, foreign, named]), GpuReading(uuid="GPU-2", at=1.0)],
          Attempts())  # fmt: skip
    assert (hidden.attempt, foreign.attempt, named.attempt) == ("b", None, "a")


def test_details_go_every_half_minute_and_at_once_when_more_than_a_counter_changed() -> None:
    now, wire, waiting = [0.0], Wire(), [Hardware(at=0.0)]

    def details(sent_bytes: int, active: bool) -> Hardware:
        link = NvLink(link=0, active=active, transmitted_bytes=sent_bytes)
        return Hardware(at=now[0], gpus=[GpuHardware(uuid="GPU-1", links=[link])])

    desk = HardwareDesk(lambda: waiting.pop() if waiting else None, lambda: [Nic(name="eth0")], wire.send,
                        lambda: now[0])  # fmt: skip
    told = []
    for second, newest in ((0, details(1, True)), (10, details(2, True)), (20, details(3, False)), (21, None),
                           (49, details(4, False)), (50, details(5, False)), (90, None)):  # fmt: skip
        now[0] = second
        waiting[:] = [newest] if newest else []
        before = len(wire.sent)
        desk.turn()
        told.append(len(wire.sent) - before)
    assert told == [1, 0, 1, 0, 0, 1, 0]
    assert isinstance(wire.sent[-1], Hardware) and wire.sent[-1].nics[0].name == "eth0"
