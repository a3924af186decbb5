"""Cutting a GPU into MIG slices by order, and bringing back what was there when it fails."""

import pynvml
import pytest
from desk import Make, SetDesk, holder, make_desk

from wire.hardware import MigOrder, MigSlice, MigStatus
from workers.gpus import OrderFailed
from workers.gpus.faults import Faults, Return
from workers.gpus.nvml_mig import profile_name

__all__ = ["make_desk"]

SEVEN = [("1g.10gb", start) for start in range(7)]
MIXED = [("3g.40gb", 4), ("2g.20gb", 0), ("1g.10gb", 2)]


def cut(desk: SetDesk, index: int, layout: list[tuple[str, int]]) -> None:
    desk.driver.set_mig(MigOrder(id="o", gpu_uuid=desk.uuid(index), layout=[MigSlice(*one) for one in layout]))


def failed(desk: SetDesk, index: int, layout: list[tuple[str, int]]) -> OrderFailed:
    with pytest.raises(OrderFailed) as failure:
        cut(desk, index, layout)
    return failure.value


def status(desk: SetDesk, index: int) -> MigStatus:
    desk.gpus = desk.driver.enumerate()
    found = desk.hardware(index).mig
    assert found is not None
    return found


def layout(desk: SetDesk, index: int) -> list[tuple[str, int]]:
    return [(one.profile, one.start) for one in status(desk, index).instances]


@pytest.mark.parametrize("wanted", [SEVEN, MIXED, [("7g.80gb", 0)], [("1g.10gb+me", 0), ("1g.10gb", 1)],
                                    [("1g.20gb", 0), ("1g.20gb", 2)]])
def test_a_whole_gpu_is_cut_as_ordered(make_desk: Make, wanted: list[tuple[str, int]]) -> None:
    desk = make_desk("DGX-H100-8")
    cut(desk, 2, wanted)
    assert layout(desk, 2) == sorted(wanted, key=lambda one: one[1])
    slices = [info for info in desk.gpus.infos if info.parent_uuid == desk.uuid(2)]
    assert sorted(info.mig_profile or "" for info in slices) == sorted(profile for profile, _ in wanted)
    assert {one.uuid for one in status(desk, 2).instances} == {info.uuid for info in slices}
    assert desk.gpus.problem is None and len(desk.gpus.infos) == 8 + len(wanted)


def test_what_the_new_layout_keeps_is_not_touched(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    cut(desk, 2, MIXED)
    before = {(one.profile, one.start): one.uuid for one in status(desk, 2).instances}
    cut(desk, 2, [("3g.40gb", 4), ("1g.10gb", 0)])
    after = {(one.profile, one.start): one.uuid for one in status(desk, 2).instances}
    assert after.keys() == {("3g.40gb", 4), ("1g.10gb", 0)}
    assert after["3g.40gb", 4] == before["3g.40gb", 4]


def test_an_empty_layout_switches_mig_off(make_desk: Make) -> None:
    desk = make_desk("A100-2-MIG")
    assert status(desk, 1).enabled
    cut(desk, 1, [])
    found = status(desk, 1)
    assert (found.enabled, found.pending, found.instances) == (False, False, [])
    assert [info.parent_uuid for info in desk.gpus.infos] == [None, None]
    cut(desk, 1, [])  # again without harm


def test_the_status_offers_every_profile_with_its_places(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    cut(desk, 0, [("3g.40gb", 4)])
    offered = {profile.name: profile for profile in status(desk, 0).profiles}
    assert offered["3g.40gb"].placements == [0, 4] and offered["3g.40gb"].size == 4
    assert (offered["1g.10gb"].placements, offered["1g.10gb"].instances_max) == (list(range(7)), 7)
    assert offered["1g.10gb+me"].instances_max == 1


def test_a_gpu_in_use_is_left_alone(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    desk.hold(holder(4711, desk.uuid(2)))
    failure = failed(desk, 2, SEVEN)
    assert "in use by process 4711" in str(failure) and not failure.undone
    assert not status(desk, 2).enabled


def test_a_slice_in_use_protects_the_whole_gpu(make_desk: Make) -> None:
    desk = make_desk("A100-2-MIG")
    before = layout(desk, 1)
    desk.hold(holder(4711, desk.machine.gpus[1].slices[0].uuid))
    assert "4711" in str(failed(desk, 1, []))
    assert layout(desk, 1) == before


def test_a_layout_that_does_not_fit_brings_the_former_one_back(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    cut(desk, 2, MIXED)
    failure = failed(desk, 2, [("4g.40gb", 0), ("2g.20gb", 2)])
    assert failure.undone
    assert "2g.20gb at 2 cannot be made" in str(failure) and "is back" in str(failure)
    assert layout(desk, 2) == sorted(MIXED, key=lambda one: one[1])


def test_an_unknown_profile_on_a_whole_gpu_leaves_it_whole(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    failure = failed(desk, 2, [("5g.50gb", 0)])
    assert failure.undone and "no place 0 for 5g.50gb; its profiles: 1g.10gb" in str(failure)
    assert not status(desk, 2).enabled


def test_a_compute_instance_that_cannot_be_made_is_undone(make_desk: Make) -> None:
    desk = make_desk("A100-2-MIG")
    before = layout(desk, 1)
    made = [0]
    create = pynvml.nvmlGpuInstanceCreateComputeInstance

    def second_fails(*arguments: object) -> object:
        made[0] += 1
        if made[0] == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
        return create(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlGpuInstanceCreateComputeInstance", second_fails)
        failure = failed(desk, 1, [("1g.10gb", 0), ("1g.10gb", 1), ("1g.10gb", 2)])
    assert failure.undone and "there is no room for it" in str(failure)
    assert layout(desk, 1) == before


def test_when_not_even_the_former_layout_comes_back_it_says_so(make_desk: Make) -> None:
    desk = make_desk("A100-2-MIG")
    desk.faults = Faults(returns=[Return(symbol="nvmlDeviceCreateGpuInstanceWithPlacement",
                                         code=pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)])
    failure = failed(desk, 1, [("1g.10gb", 0)])
    assert not failure.undone and "could not be brought back either" in str(failure)


def test_a_mode_that_waits_for_a_reset_is_said_with_the_way_out(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceSetMigMode", lambda handle, mode: pynvml.NVML_ERROR_RESET_REQUIRED)
        failure = failed(desk, 2, SEVEN)
    assert not failure.undone
    assert f"nvidia-smi --gpu-reset -i {desk.machine.gpus[2].bus_id}" in str(failure)


def test_without_root_it_says_who_must_do_it(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8")
    desk.faults = Faults(returns=[Return(symbol="nvmlDeviceSetMigMode", code=pynvml.NVML_ERROR_NO_PERMISSION)])
    failure = failed(desk, 2, SEVEN)
    assert failure.undone and "needs root" in str(failure)


def test_a_board_without_mig_and_a_gpu_that_is_not_here_refuse(make_desk: Make) -> None:
    desk = make_desk("RTX4090-8-PCIe")
    assert "does not support it" in str(failed(desk, 0, SEVEN))
    with pytest.raises(OrderFailed, match="GPU-none does not answer"):
        desk.driver.set_mig(MigOrder(id="o", gpu_uuid="GPU-none"))


def test_events_go_on_after_a_cut(make_desk: Make) -> None:
    desk = make_desk("DGX-H100-8", "gpu2:xid31@5s")
    cut(desk, 2, SEVEN)
    desk.gpus = desk.driver.enumerate()
    desk.now += 6
    assert [event.code for event in desk.driver.events()] == [31]


class OldInfo:
    """What drivers before names say of a profile."""

    def __init__(self, slices: int, mebibytes: int) -> None:
        self.sliceCount, self.memorySizeMB = slices, mebibytes


@pytest.mark.parametrize(("info", "number", "name"), [
    (OldInfo(1, 4864), 0, "1g.5gb"), (OldInfo(1, 4864), 7, "1g.5gb+me"), (OldInfo(3, 20091), 2, "3g.20gb"),
    (OldInfo(7, 40448), 4, "7g.40gb"), (OldInfo(2, 19968), 1, "2g.20gb"),
])
def test_profiles_without_a_name_get_the_usual_one(info: OldInfo, number: int, name: str) -> None:
    assert profile_name(info, number) == name
