"""A card on its way from whole to cut and back, as the database and the node see it."""

import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from portal.models import Event, Gpu, HardwareOrder, Node
from portal.scheduler.decisions import Placement, Start
from portal.services import desired, mig, nodes, orders, scheduling, starting
from portal.services.errors import Problem
from portal.services.transitions import Conflict
from tests.portal.conftest import GIB, Cast, gpu_uuid, make_node
from tests.portal.orders import SUCCEEDED, fresh, report, started, submitted
from wire.hardware import MigOrder, OrderResult
from wire.reports import GpuInfo, Inventory

NAME = "NVIDIA H100 80GB HBM3"


def a_slice(profile: str) -> dict[str, Any]:
    return {"gpus": 1, "mig": profile}


def cut_card(name: str = "n1", gpus: int = 2) -> Gpu:
    """GPU 0 of a node of H100; the other one is left alone."""
    node = make_node(name, gpus=gpus)
    node.gpus.update(name=NAME, memory_total_bytes=81559 << 20)
    return card(node)


def card(node: Node) -> Gpu:
    return Gpu.objects.select_related("node").get(node=node, index=0, mig_profile="")


def slice_uuid(node: Node, place: int) -> str:
    return "MIG" + gpu_uuid(f"{node.name}/slice", place)[3:]


def shows(node: Node, *profiles: str, enabled: bool | None = None) -> None:
    """The node's inventory lists GPU 0 cut like this, and GPU 1 whole."""
    on = bool(profiles) if enabled is None else enabled
    base: dict[str, Any] = {"vendor": "nvidia", "memory_total_bytes": 81559 << 20}
    infos = [
        GpuInfo(uuid=gpu_uuid(node.name, 0), index=0, name=NAME, mig_enabled=on, mig_capable=True, **base),
        GpuInfo(uuid=gpu_uuid(node.name, 1), index=1, name=NAME, mig_enabled=False, mig_capable=True, **base),
    ]
    for place, profile in enumerate(profiles):
        infos.append(GpuInfo(
            uuid=slice_uuid(node, place), index=0, vendor="nvidia", name=f"{NAME} MIG {profile}", mig_profile=profile,
            parent_uuid=gpu_uuid(node.name, 0), memory_total_bytes=10 * GIB,
        ))  # fmt: skip
    nodes.inventory(node, Inventory(digest="x", boot_id="boot-1", hostname=node.name, agent_version="1", gpus=infos))
    starts = {"3g.40gb": [4, 0], "2g.20gb": [0, 2, 4], "1g.10gb": [0, 1, 2, 3, 4, 5, 6], "7g.80gb": [0]}
    instances = [
        {"uuid": slice_uuid(node, place), "profile": profile, "start": starts[profile].pop(0), "size": 1,
         "gpu_instance": place, "compute_instance": 0}
        for place, profile in enumerate(profiles)
    ]  # fmt: skip
    hardware = {"uuid": gpu_uuid(node.name, 0), "mig": {"enabled": on, "pending": on, "instances": instances}}
    Gpu.objects.filter(uuid=gpu_uuid(node.name, 0)).update(hardware=hardware)


def answered(order: HardwareOrder, state: str, message: str = "") -> bool:
    return orders.result(order.node, OrderResult(id=str(order.pk), at=time.time(), state=state, message=message))


def again(order: HardwareOrder) -> HardwareOrder:
    return HardwareOrder.objects.select_related("gpu", "node").get(pk=order.pk)


def cut(gpu: Gpu, layout: str, *shown: str, actor: Any = None) -> HardwareOrder:
    """The whole way, on a card that nobody holds."""
    order = mig.apply(gpu, layout, actor=actor)
    assert mig.advance() == 1 and answered(order, "done")
    shows(gpu.node, *shown)
    assert mig.advance() == 1
    return again(order)


def test_a_free_card_is_drained_cut_and_given_back(cast: Cast) -> None:
    gpu = cut_card()
    order = mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    assert order.state == "waiting" and again(order).requested_by == cast.alice
    assert card(gpu.node).draining == "It is about to be cut into 2 × 3g.40gb."
    assert desired.compose(gpu.node).orders == []
    serial = Node.objects.get(pk=gpu.node_id).desired_serial

    assert mig.advance() == 1
    (sent,) = desired.compose(gpu.node).orders
    assert isinstance(sent, MigOrder) and (sent.id, sent.gpu_uuid) == (str(order.pk), gpu.uuid)
    assert [(piece.profile, piece.start) for piece in sent.layout] == [("3g.40gb", 0), ("3g.40gb", 4)]
    assert Node.objects.get(pk=gpu.node_id).desired_serial > serial
    assert mig.advance() == 0, "it waits for the node"

    assert answered(order, "running") and not answered(order, "running")
    assert answered(order, "done", "Cut.") and not answered(order, "done")
    assert not answered(order, "failed"), "a late answer changes nothing"
    assert desired.compose(gpu.node).orders == []
    assert mig.advance() == 0 and card(gpu.node).draining, "the inventory does not show it yet"

    shows(gpu.node, "3g.40gb", "3g.40gb")
    assert card(gpu.node).mig_enabled and mig.advance() == 1
    over = again(order)
    assert over.state == "done" and over.finished_at and over.message == "GPU 0 is cut into 2 × 3g.40gb."
    assert not Gpu.objects.exclude(draining="").exists()
    told = list(Event.objects.filter(node=gpu.node, kind__in=["order.state", "order.finished", "gpu.resumed"])
                .values_list("kind", "to_state"))  # fmt: skip
    assert told == [
        ("order.state", "waiting"), ("order.state", "sent"), ("order.state", "running"), ("order.state", "done"),
        ("order.finished", "done"), ("gpu.resumed", ""),
    ]  # fmt: skip


def test_a_card_that_is_being_drained_gets_no_job_and_its_neighbour_does(cast: Cast) -> None:
    gpu = cut_card()
    mig.apply(gpu, "7 × 1g.10gb", actor=cast.alice)
    first, second = submitted(cast.bob), submitted(cast.bob)
    assert scheduling.run_cycle().started == [first.pk]
    assert first.attempts.get().allocations.get().gpu.index == 1
    assert fresh(second).hold_code == "wait_gpus"
    stale = Start(second.pk, (Placement("n1", (gpu.uuid,)),))
    with pytest.raises(Conflict):
        starting.start(stale)


def test_a_change_waits_for_the_job_on_the_card_and_says_whose_it_is(cast: Cast) -> None:
    gpu = cut_card(gpus=1)
    attempt = started(cast.bob)
    order = mig.apply(gpu, "7 × 1g.10gb", actor=cast.alice)
    assert order.message == "Waits for 1 job (bob)."
    assert mig.advance() == 0 and desired.compose(gpu.node).orders == []
    report(attempt.shares.get(), SUCCEEDED)
    assert mig.advance() == 1
    assert len(desired.compose(gpu.node).orders) == 1


def test_a_change_of_slices_waits_for_the_job_on_one_of_them(cast: Cast) -> None:
    gpu = cut_card()
    cut(gpu, "2 × 3g.40gb", "3g.40gb", "3g.40gb")
    attempt = started(cast.bob, resources=a_slice("3g.40gb"))
    order = mig.apply(card(gpu.node), "off", actor=cast.alice)
    assert mig.advance() == 0 and order.message == "Waits for 1 job (bob)."
    behind = submitted(cast.bob, resources=a_slice("3g.40gb"))
    assert scheduling.run_cycle().started == [] and fresh(behind).hold_code == "wait_gpus"
    report(attempt.shares.get(), SUCCEEDED)
    assert mig.advance() == 1 and answered(order, "done")
    shows(gpu.node)
    assert mig.advance() == 1
    assert again(order).message == "GPU 0 is given back whole, with MIG off."
    assert not card(gpu.node).mig_enabled


def test_a_job_asks_for_a_slice_and_sees_that_slice_alone(cast: Cast) -> None:
    gpu = cut_card()
    cut(gpu, "3g.40gb + 1g.10gb", "3g.40gb", "1g.10gb")
    small, whole = started(cast.bob, resources=a_slice("1g.10gb")), started(cast.charlie, gpus=1)
    assert [slot["uuid"] for slot in small.shares.get().launch["gpus"]] == [slice_uuid(gpu.node, 1)]
    assert whole.allocations.get().gpu.index == 1 and not whole.allocations.get().gpu.mig_profile
    assert Event.objects.get(job=small.job, to_state="starting").message == "On n1: slice 1g.10gb of GPU 0."
    held = submitted(cast.bob, resources=a_slice("1g.10gb"))
    scheduling.run_cycle()
    assert fresh(held).hold_message == "Waiting for 1 slice 1g.10gb. None is free."


def test_a_card_that_is_cut_is_not_given_out_whole(cast: Cast) -> None:
    gpu = cut_card()
    cut(gpu, "7 × 1g.10gb", *["1g.10gb"] * 7)
    assert started(cast.bob).allocations.get().gpu.index == 1
    with pytest.raises(Problem, match="the largest node has 1 GPU"):
        submitted(cast.bob, gpus=2)
    with pytest.raises(Problem, match=r"no GPU has a slice 2g\.20gb; there are: 1g\.10gb"):
        submitted(cast.bob, resources=a_slice("2g.20gb"))


def test_slices_that_were_cut_away_are_gone_and_not_broken(cast: Cast) -> None:
    gpu = cut_card()
    cut(gpu, "2 × 3g.40gb", "3g.40gb", "3g.40gb")
    cut(card(gpu.node), "off")
    gone = Gpu.objects.filter(parent_uuid=gpu.uuid)
    assert {(one.present, one.state) for one in gone} == {(False, "ok")}
    assert Event.objects.filter(node=gpu.node, kind="gpu.uncut").count() == 2
    cut(card(gpu.node), "2 × 3g.40gb", "3g.40gb", "3g.40gb")
    assert gone.filter(present=True).count() == 2 and gone.count() == 2, "the same places give the same slices"
    assert started(cast.bob, resources=a_slice("3g.40gb"))


@pytest.mark.parametrize("state", ["failed", "undone"])
def test_a_change_that_failed_gives_the_card_back_with_the_reason(cast: Cast, state: str) -> None:
    gpu = cut_card(gpus=1)
    order = mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    assert mig.advance() == 1
    assert answered(order, state, "GPU 0 is in use by process 4711.")
    assert mig.advance() == 1
    over = again(order)
    assert (over.state, over.message) == (state, "GPU 0 is in use by process 4711.") and over.finished_at
    assert not card(gpu.node).draining and started(cast.bob)
    assert mig.apply(card(gpu.node), "2 × 3g.40gb", actor=cast.alice).state == "waiting"


def test_a_change_that_never_shows_is_said_to_have_failed_and_the_card_goes_on(cast: Cast) -> None:
    gpu = cut_card(gpus=1)
    order = mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    assert mig.advance() == 1 and answered(order, "done")
    late = timezone.now() - mig.SHOWN_WITHIN - timedelta(seconds=1)
    HardwareOrder.objects.update(answered_at=late)
    assert mig.advance() == 1
    over = again(order)
    assert (over.state, over.message) == ("failed", "n1 said that it was done, but its inventory shows no slices.")
    assert not card(gpu.node).draining


def test_a_node_that_does_not_answer_is_said_to_be_silent_and_asked_on(cast: Cast) -> None:
    gpu = cut_card()
    order = mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    assert mig.advance() == 1 and mig.advance() == 0
    HardwareOrder.objects.update(sent_at=timezone.now() - mig.ANSWER_WITHIN)
    assert mig.advance() == 1 and mig.advance() == 0, "said once"
    assert "has not said how it went" in again(order).message
    assert len(desired.compose(gpu.node).orders) == 1 and card(gpu.node).draining


def test_a_node_out_of_contact_is_not_told_until_it_is_back(cast: Cast) -> None:
    gpu = cut_card()
    order = mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    Node.objects.filter(pk=gpu.node_id).update(state="unreachable")
    mig.advance()
    assert (again(order).state, again(order).message) == ("waiting", "Waits for n1, which is unreachable.")
    Node.objects.filter(pk=gpu.node_id).update(state="ready")
    assert mig.advance() == 1 and again(order).state == "sent"


def test_a_process_that_no_job_explains_is_waited_for(cast: Cast) -> None:
    gpu = cut_card()
    mine = {"pid": 5, "user": "bob", "attempt": "a1", "start_time": 1.0}
    Gpu.objects.filter(pk=gpu.pk).update(latest={"processes": [{"pid": 4711, "user": "root"}, mine]})
    order = mig.apply(card(gpu.node), "2 × 3g.40gb", actor=cast.alice)
    assert order.message == "Waits for process 4711 of root." and mig.advance() == 0
    Gpu.objects.filter(pk=gpu.pk).update(latest={"processes": []})
    assert mig.advance() == 1


def test_a_waiting_change_can_be_cancelled_and_one_underway_cannot(cast: Cast) -> None:
    gpu = cut_card(gpus=1)
    order = mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    assert orders.cancel(order, actor=cast.alice).state == "cancelled"
    assert orders.cancel(order, actor=cast.alice).state == "cancelled"
    assert not card(gpu.node).draining and mig.advance() == 0
    second = mig.apply(card(gpu.node), "2 × 3g.40gb", actor=cast.alice)
    assert mig.advance() == 1
    with pytest.raises(Problem, match="cannot be cancelled any more"):
        orders.cancel(second, actor=cast.alice)


def test_a_card_is_changed_by_one_at_a_time(cast: Cast) -> None:
    gpu = cut_card()
    mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    with pytest.raises(Problem, match="already being changed") as refused:
        mig.apply(gpu, "7 × 1g.10gb", actor=cast.alice)
    assert refused.value.status == 409 and HardwareOrder.objects.count() == 1


def test_what_exists_and_is_wanted_again_stays(cast: Cast) -> None:
    gpu = cut_card()
    cut(gpu, "3g.40gb + 1g.10gb", "3g.40gb", "1g.10gb")
    planned = mig.plan(card(gpu.node), "3g.40gb + 2g.20gb")
    assert [(piece.profile, piece.start) for piece in planned.kept] == [("3g.40gb", 4)]
    assert [piece.profile for piece in planned.destroyed] == ["1g.10gb"]
    assert [piece.profile for piece in planned.created] == ["2g.20gb"]
    with pytest.raises(Problem, match="cut like this already"):
        mig.apply(card(gpu.node), "1g.10gb + 3g.40gb", actor=cast.alice)


def test_slices_whose_places_are_not_known_yet_are_not_planned_upon(cast: Cast) -> None:
    gpu = cut_card()
    shows(gpu.node, "3g.40gb", "3g.40gb")
    Gpu.objects.update(hardware={})
    with pytest.raises(Problem, match="has not said yet where the slices"):
        mig.plan(card(gpu.node), "off")


def test_a_card_that_no_table_has_is_cut_as_its_driver_says(cast: Cast) -> None:
    gpu = cut_card()
    profiles = [
        {"name": "1g.24gb", "id": 5, "slices": 1, "memory_bytes": 24 * GIB, "instances_max": 4,
         "placements": [0, 1, 2, 3]},
        {"name": "2g.48gb", "id": 6, "slices": 2, "memory_bytes": 48 * GIB, "instances_max": 2, "placements": [0, 2],
         "size": 2},
    ]  # fmt: skip
    told = {"mig": {"enabled": False, "pending": False, "profiles": profiles}}
    Gpu.objects.filter(pk=gpu.pk).update(name="NVIDIA RTX PRO 6000", hardware=told)
    planned = mig.plan(card(gpu.node), "2g.48gb + 2 × 1g.24gb")
    assert {piece.profile for piece in planned.layout} == {"2g.48gb", "1g.24gb"} and not planned.destroyed
    with pytest.raises(Problem, match="needs 5 of 4 compute slices"):
        mig.plan(card(gpu.node), "2 × 2g.48gb + 1g.24gb")


def test_an_answer_from_another_node_or_to_nothing_changes_nothing(cast: Cast) -> None:
    gpu, other = cut_card(), make_node("n2", gpus=1)
    order = mig.apply(gpu, "2 × 3g.40gb", actor=cast.alice)
    assert not answered(order, "done"), "it was not sent yet"
    mig.advance()
    for identity in (str(order.pk), "no uuid", "00000000-0000-0000-0000-000000000000"):
        assert not orders.result(other, OrderResult(id=identity, at=0.0, state="done"))
    assert not answered(order, "perhaps") and again(order).state == "sent"


def test_the_driver_is_released_and_a_stranger_ended_at_once(cast: Cast) -> None:
    gpu = cut_card()
    release = orders.release_driver(gpu.node, 90.0, actor=cast.alice)
    stop = orders.stop_foreign(gpu, 4711, 1000.0)
    assert orders.stop_foreign(gpu, 4711, 1000.5) == stop, "the same process, the same order"
    assert orders.stop_foreign(gpu, 4711, 2000.0) != stop, "the number of a process that is gone was given again"
    ids = [order.id for order in desired.compose(gpu.node).orders]
    assert ids[:2] == [str(release.pk), str(stop.pk)] and len(ids) == 3
    assert answered(stop, "done") and again(stop).finished_at
    assert str(stop.pk) not in {order.id for order in desired.compose(gpu.node).orders}
    with pytest.raises(Problem, match="between 1 and 3600 seconds"):
        orders.release_driver(gpu.node, 1e6)
