"""The turns of the reading process, without a process: what it sends, and in which order."""

import time

import pytest
from desk import Make, SetDesk, make_desk

from wire.hardware import MigOrder, MigSlice
from workers.gpus import DriverUnavailable
from workers.gpus.faults import Faults, Return
from workers.gpus.frames import Detailed, Frame, Listed, Noticed, Outcome, Read
from workers.gpus.reading import Pace, Reading

__all__ = ["make_desk"]


class Turns:
    def __init__(self, desk: SetDesk) -> None:
        self.desk, self.sent = desk, list[Frame]()
        self.reading = Reading(desk.driver, Pace(1.0, 3.0, 60.0, details_every_s=3600.0), self.sent.append)
        self.turn()

    def turn(self) -> list[Frame]:
        self.sent.clear()
        self.desk.now += 1
        self.reading._turn(time.monotonic())
        return list(self.sent)


def kinds(frames: list[Frame]) -> list[str]:
    return [event.kind for frame in frames if isinstance(frame, Noticed) for event in frame.events]


def read(frames: list[Frame]) -> dict[str, dict[str, str]]:
    return {reading.uuid: reading.missing for frame in frames if isinstance(frame, Read) for reading in frame.readings}


def test_a_quiet_second_sends_readings_and_nothing_else(make_desk: Make) -> None:
    (frame,) = Turns(make_desk("DGX-H100-8")).turn()
    assert isinstance(frame, Read) and len(frame.readings) == 8 and frame.took_s


def test_a_loss_is_listed_before_it_is_read_and_told_with_its_xid(make_desk: Make) -> None:
    turns = Turns(make_desk("DGX-H100-8", "gpu3:lost@4s"))
    turns.turn()
    turns.desk.now += 5
    frames = turns.turn()
    assert kinds(frames) == ["xid", "lost"]
    listed = next(frame for frame in frames if isinstance(frame, Listed))
    assert len(listed.gpus.infos) == 7
    assert read(frames)[turns.desk.uuid(3)] == {"gpu": "gpu_lost"}
    assert frames.index(listed) < next(place for place, frame in enumerate(frames) if isinstance(frame, Read))
    assert any(isinstance(frame, Detailed) for frame in frames)
    assert kinds(turns.turn()) == []


def test_one_bad_moment_of_a_gpu_is_no_loss(make_desk: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(make_desk("HGX-H100-4"))
    turns.desk.faults = Faults(returns=[Return(symbol=f"nvmlDeviceGet{name}", gpu=1, code=999) for name in (
        "UtilizationRates", "MemoryInfo_v2", "TemperatureV", "PowerUsage", "ClockInfo")])
    renew = turns.desk.driver.renew

    def recover() -> bool:
        turns.desk.faults = Faults()
        return renew()

    monkeypatch.setattr(turns.desk.driver, "renew", recover)
    frames = turns.turn()
    assert kinds(frames) == [] and not any("gpu" in missing for missing in read(frames).values())


def test_a_slice_that_somebody_else_cut_away_is_gone_and_not_lost(make_desk: Make) -> None:
    turns = Turns(make_desk("A100-2-MIG"))
    gpu = turns.desk.machine.gpus[1]
    before = set(read(turns.turn()))
    turns.desk.driver.set_mig(MigOrder(id="x", gpu_uuid=gpu.uuid, layout=[MigSlice("3g.40gb", 4)]))
    frames = turns.turn()
    left = set(read(frames))
    assert "lost" not in kinds(frames) and len(left) < len(before)
    assert left == {turns.desk.uuid(0), gpu.uuid, *(piece.uuid for piece in gpu.slices)}


@pytest.mark.parametrize("code", [9, 18])
def test_when_the_driver_goes_no_gpu_is_called_lost(make_desk: Make, code: int) -> None:
    turns = Turns(make_desk("DGX-H100-8"))
    turns.desk.faults = Faults(everything=code)
    with pytest.raises(DriverUnavailable):
        turns.turn()
    assert kinds(turns.sent) == [] and read(turns.sent) == {}


def test_a_cut_tells_the_new_list_and_the_new_details_before_its_result(make_desk: Make) -> None:
    turns = Turns(make_desk("DGX-H100-8"))
    turns.sent.clear()
    turns.reading._cut(MigOrder(id="x", gpu_uuid=turns.desk.uuid(2), layout=[MigSlice("7g.80gb", 0)]))
    assert [type(frame) for frame in turns.sent] == [Outcome, Listed, Detailed, Outcome]
    last = turns.sent[-1]
    assert isinstance(last, Outcome) and last.result.state == "done"
