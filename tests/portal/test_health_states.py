"""What is found about a GPU, the state that follows from it, and who gets it back into service."""

import time
from typing import Any

import pytest

from portal.models import Event, Gpu, Health, Node
from portal.services import hardware_reports, health, nodes, scheduling
from portal.services.errors import Problem
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import FAILED, RUNNING, STARTING, fresh, report, started, submitted
from wire.hardware import GpuHardware, Hardware, HealthEvent, Nic, NvLink
from wire.reports import GpuInfo, Heartbeat, Inventory


def card(node: Node, index: int = 0) -> Gpu:
    return Gpu.objects.select_related("node").get(node=node, index=index)


def state(node: Node, index: int = 0) -> str:
    return card(node, index).state


def event(kind: str, gpu: Gpu | None = None, **fields: Any) -> HealthEvent:
    at = fields.pop("at", time.time())
    key = fields.pop("key", f"{kind}/{gpu.uuid if gpu else 'node'}/{fields.get('code')}/{at}")
    return HealthEvent(at=at, key=key, kind=kind, gpu_uuid=gpu.uuid if gpu else None, **fields)


def listed(node: Node, indices: list[int], *, problem: str | None = None) -> None:
    infos = [
        GpuInfo(uuid=card(node, index).uuid, index=index, vendor="nvidia", name="NVIDIA H100", memory_total_bytes=1)
        for index in indices
    ]
    inventory = Inventory(
        digest=f"{indices}", boot_id="boot-1", hostname="h", agent_version="1", gpus=infos, problem=problem
    )
    nodes.inventory(Node.objects.get(pk=node.pk), inventory)


@pytest.mark.parametrize(("kind", "fields", "becomes", "severity"), [
    ("xid", {"code": 79}, "quarantined", "critical"),
    ("xid", {"code": 64}, "quarantined", "critical"),
    ("xid", {"code": 48}, "suspect", "critical"),
    ("xid", {"code": 119}, "suspect", "critical"),
    ("xid", {"code": 31}, "ok", "info"),
    ("xid", {"code": 94}, "ok", "warning"),
    ("xid", {"code": 9999}, "ok", "warning"),
    ("ecc", {"message": "2 uncorrectable errors"}, "suspect", "critical"),
    ("row_remap", {"code": 1}, "suspect", "critical"),
    ("row_remap", {"code": 2}, "quarantined", "critical"),
    ("recovery", {"code": 1}, "suspect", "critical"),
    ("recovery", {"code": 3}, "ok", "warning"),
    ("hang", {}, "suspect", "critical"),
    ("lost", {}, "lost", "critical"),
    ("throttle", {}, "ok", "warning"),
    ("slow_link", {}, "ok", "warning"),
    ("link_down", {}, "ok", "warning"),
])  # fmt: skip
def test_an_event_fences_the_gpu_as_the_table_says(
    cast: Cast, kind: str, fields: dict[str, Any], becomes: str, severity: str
) -> None:
    node = make_node(gpus=2)
    assert health.report(node, event(kind, card(node), **fields))
    row = Health.objects.get()
    assert (state(node), state(node, 1), row.severity) == (becomes, "ok", severity)
    assert row.meaning and row.advice
    assert (row.resolved_at is not None) == (severity == "info"), "what asks for nothing is no open matter"
    assert (card(node).state_since > Gpu.objects.get(node=node, index=1).state_since) == (becomes != "ok")


def test_a_fenced_gpu_is_not_offered_and_its_neighbours_are(cast: Cast) -> None:
    node = make_node(gpus=2)
    health.report(node, event("xid", card(node), code=48))
    attempt = started(cast.bob, gpus=1)
    assert attempt.allocations.get().gpu == card(node, 1)
    waiting = submitted(cast.bob, gpus=1)
    scheduling.run_cycle()
    assert fresh(waiting).state == "waiting"
    health.release(card(node), actor=cast.alice)
    assert scheduling.run_cycle().started == [waiting.pk]


def test_the_same_event_again_changes_nothing_but_may_say_more(cast: Cast) -> None:
    node = make_node(gpus=1)
    told = event("xid", card(node), code=48, key="k", message="Xid 48")
    assert health.report(node, told)
    more = event("xid", card(node), code=48, key="k", message="pid=77, name=python, DBE in row 12", count=3)
    assert not health.report(node, more)
    assert not health.report(node, told)
    row = Health.objects.get()
    assert (row.count, row.message) == (3, "pid=77, name=python, DBE in row 12")
    health.release(card(node), actor=cast.alice)
    assert not health.report(node, told)
    assert state(node) == "ok", "an event that comes again after the release fences nothing"


def test_a_report_that_comes_late_opens_nothing_again(cast: Cast) -> None:
    node = make_node(gpus=1)
    before = time.time() - 5
    health.report(node, event("ecc", card(node), at=before, key="a"))
    health.release(card(node), actor=cast.alice)
    assert not health.report(node, event("ecc", card(node), at=before + 1, key="b"))
    assert state(node) == "ok"
    assert health.report(node, event("ecc", card(node), at=time.time() + 1, key="c")), "a new one counts"
    assert state(node) == "suspect"


def test_the_worst_of_several_findings_counts_and_a_release_ends_them_all(cast: Cast) -> None:
    node = make_node(gpus=1)
    health.report(node, event("xid", card(node), code=79))
    health.report(node, event("ecc", card(node), message="1 uncorrectable error"))
    assert (state(node), card(node).state_reason) == (
        "quarantined", "Xid 79: The GPU fell off the bus: the machine cannot reach it any more.")  # fmt: skip
    health.release(card(node), actor=cast.alice)
    assert (state(node), card(node).state_reason) == ("ok", "")
    assert set(Health.objects.values_list("resolved_by__username", flat=True)) == {"alice"}
    assert Event.objects.filter(kind="gpu.released", actor=cast.alice).count() == 1


def test_an_event_finds_its_gpu_by_the_place_on_the_bus(cast: Cast) -> None:
    node, other = make_node(gpus=2), make_node("n2", gpus=1)
    Gpu.objects.filter(node=node, index=1).update(pci_bus_id="00000000:07:00.0")
    health.report(node, HealthEvent(at=time.time(), key="x", kind="xid", code=79, pci_bus_id="0000:07:00"))
    assert (state(node, 0), state(node, 1)) == ("ok", "quarantined")
    health.report(node, event("xid", card(other), code=79))
    assert state(other) == "ok", "a node tells of its own GPUs, of no others"


def test_what_a_program_caused_belongs_to_its_job(cast: Cast) -> None:
    node = make_node(gpus=1)
    attempt = started(cast.bob)
    share = attempt.shares.get()
    report(share, STARTING, RUNNING)
    health.report(node, event("xid", card(node), code=31, message="pid=7"))
    report(share, FAILED, first_seq=3, exit_code=1, message="CUDA error")
    told = Event.objects.get(kind="gpu.health")
    assert (told.job, told.attempt, told.reason, state(node)) == (attempt.job, attempt, "xid_31", "ok")
    assert fresh(attempt.job).end_message == (
        "Exited with code 1: CUDA error. While it ran, GPU 0: Xid 31: "
        "A program touched GPU memory that is not its own or no longer there."
    )


def test_a_lost_card_stays_in_sight_and_comes_back_as_it_was(cast: Cast) -> None:
    node = make_node(gpus=3)
    listed(node, [0, 1, 2])
    health.report(node, event("xid", card(node, 2), code=79))
    listed(node, [0], problem="GPU 1 and 2 do not answer")
    assert [gpu.state for gpu in Gpu.objects.present().filter(node=node)] == ["ok", "lost", "lost"]
    listed(node, [0, 1, 2])
    assert [state(node, index) for index in range(3)] == ["ok", "ok", "quarantined"]
    assert not Health.objects.filter(kind="lost", resolved_at=None).exists()


def test_a_lost_card_that_somebody_lets_go_of_is_out_of_sight(cast: Cast) -> None:
    node = make_node(gpus=2)
    listed(node, [0])
    assert Gpu.objects.present().filter(node=node).count() == 2
    health.release(card(node, 1), actor=cast.alice)
    assert [gpu.index for gpu in Gpu.objects.present().filter(node=node)] == [0]


@pytest.mark.parametrize("event_first", [True, False])
def test_a_gpu_that_hangs_is_suspect_while_it_does(cast: Cast, event_first: bool) -> None:
    node = make_node(gpus=2)
    hang = event("hang", card(node, 1), message="GPU 1 does not answer since 12:00.")
    if event_first:
        health.report(node, hang)
    listed(node, [0], problem="GPU 1 does not answer")
    if not event_first:
        health.report(node, hang)
    assert (state(node), state(node, 1)) == ("ok", "suspect")
    with pytest.raises(Problem, match="cannot be released while this lasts"):
        health.release(card(node, 1), actor=cast.alice)
    listed(node, [0, 1])
    assert (state(node, 1), card(node, 1).state_reason) == ("ok", "")


def test_a_quarantine_by_hand_lasts_until_the_release(cast: Cast) -> None:
    node = make_node(gpus=1)
    health.quarantine(card(node), "fan rattles", actor=cast.alice)
    assert (state(node), card(node).state_reason) == ("quarantined", "Quarantined by alice: fan rattles")
    listed(node, [0])
    assert state(node) == "quarantined"
    health.release(card(node), actor=cast.alice)
    assert state(node) == "ok"


def test_what_was_read_before_somebody_else_changed_it_does_no_harm(cast: Cast) -> None:
    node = make_node(gpus=1)
    early, later = card(node), card(node)
    health.quarantine(early, "smoke", actor=cast.alice)
    assert health.release(later, actor=cast.alice).state == "ok" == state(node)
    health.report(node, event("ecc", early, message="uncorrectable"))
    assert health.release(early, actor=cast.alice).state == "ok" == state(node)


def test_findings_about_a_card_fence_its_slices_and_those_of_a_slice_no_other(cast: Cast) -> None:
    node = make_node(gpus=1)
    parent = card(node)
    Gpu.objects.filter(pk=parent.pk).update(mig_enabled=True)
    for number in (1, 2):
        Gpu.objects.create(node=node, uuid=f"MIG-{number}", index=0, vendor="nvidia", name="H100 MIG 1g", model="H100",
                           parent_uuid=parent.uuid, mig_profile="1g.10gb")  # fmt: skip
    one, two = (Gpu.objects.select_related("node").get(uuid=f"MIG-{number}") for number in (1, 2))
    health.open_finding(one, "foreign", "Process 7 uses it.", key="foreign/7/MIG-1/1", source="readings")
    assert {gpu.uuid: gpu.state for gpu in Gpu.objects.filter(parent_uuid=parent.uuid)} == {
        "MIG-1": "dirty", "MIG-2": "ok"}  # fmt: skip
    health.report(node, event("ecc", parent, message="uncorrectable"))
    assert {Gpu.objects.get(pk=gpu.pk).state for gpu in (parent, one, two)} == {"suspect"}
    health.release(Gpu.objects.select_related("node").get(pk=parent.pk), actor=cast.alice)
    assert [Gpu.objects.get(pk=gpu.pk).state for gpu in (parent, one, two)] == ["ok", "dirty", "ok"]


def test_hardware_is_kept_and_a_condition_counts_when_it_begins(cast: Cast) -> None:
    node = make_node(gpus=2)
    sick = GpuHardware(uuid=card(node).uuid, row_remap_pending=True, recovery_action=1, pcie_width=16)
    fit = GpuHardware(uuid=card(node, 1).uuid, row_remap_pending=False, recovery_action=0)
    told = Hardware(at=1.0, gpus=[sick, fit], nics=[Nic(name="mlx5_0", rdma=True)])
    assert hardware_reports.apply(node, told) == 2
    assert (state(node), state(node, 1), card(node).hardware["pcie_width"]) == ("suspect", "ok", 16)
    assert Node.objects.get(pk=node.pk).nics[0]["name"] == "mlx5_0"
    assert sorted(Health.objects.values_list("kind", flat=True)) == ["recovery", "row_remap"]
    health.release(card(node), actor=cast.alice)
    assert hardware_reports.apply(node, told) == 0
    sick.pcie_width = 8
    hardware_reports.apply(node, told)
    assert state(node) == "ok", "the release holds although the condition stands"
    sick.row_remap_failed = True
    hardware_reports.apply(node, told)
    assert state(node) == "quarantined"


def test_a_report_of_strange_kind_or_time_does_no_harm(cast: Cast) -> None:
    node = make_node(gpus=1)
    assert not health.report(node, event("quarantine", card(node)))
    for number, at in enumerate((float("nan"), float("inf"), -1.0, 1e308, 4e9)):
        assert health.report(node, event("xid", card(node), code=31, at=at, key=f"{number}"))
    assert health.report(node, event("xid", card(node), code=48, key="\0" * 300, message="\0\ud800" * 900))
    assert state(node) == "suspect"


def test_a_fatal_error_of_a_switch_is_shown_with_the_node(cast: Cast) -> None:
    node = make_node(gpus=1)
    health.report(node, event("sxid", code=12028, message="SXid 12028, Non-fatal, Link 47"))
    health.report(node, event("sxid", code=20034, message="SXid 20034, Fatal, Link 30"))
    assert sorted(Health.objects.values_list("code", "severity")) == [(12028, "info"), (20034, "critical")]
    assert state(node) == "ok"


def test_a_driver_that_works_again_ends_what_was_said_about_it(cast: Cast) -> None:
    node = make_node(gpus=1)
    health.report(node, event("driver", message="The driver and its library are of two versions."))
    assert Health.objects.get().resolved_at is None and state(node) == "ok"
    listed(node, [0], problem="still two versions")
    assert Health.objects.get().resolved_at is None
    listed(node, [0])
    assert Health.objects.get().resolved_at is not None


def test_an_old_return_that_is_told_again_does_not_bring_a_lost_gpu_back(cast: Cast) -> None:
    node = make_node(gpus=1)
    lost, back, again = (event(kind, card(node), key=str(n)) for n, kind in enumerate(("lost", "back", "lost")))
    health.report(node, lost)
    assert state(node) == "lost"
    assert health.report(node, back) and state(node) == "ok"
    again.at = time.time() + 1
    health.report(node, again)
    assert not health.report(node, back)
    assert state(node) == "lost"


def test_warnings_about_links_end_when_the_links_are_well(cast: Cast) -> None:
    node = make_node(gpus=1)
    uuid = card(node).uuid
    health.report(node, event("slow_link", card(node)))
    health.report(node, event("link_down", card(node)))

    def tell(width: int, generation: int, active: bool) -> list[str]:
        hardware_reports.apply(node, Hardware(at=1.0, gpus=[GpuHardware(
            uuid=uuid, pcie_width=width, pcie_width_max=16, pcie_generation=generation, pcie_generation_max=5,
            links=[NvLink(link=0, active=True), NvLink(link=1, active=active)])]))  # fmt: skip
        return sorted(Health.objects.filter(resolved_at=None).values_list("kind", flat=True))

    assert tell(8, 5, False) == ["link_down", "slow_link"]
    assert tell(16, 1, False) == ["link_down", "slow_link"], "a link at rest proves nothing"
    assert tell(16, 5, False) == ["link_down"]
    assert tell(16, 5, True) == []


def test_two_workers_with_one_key_get_no_new_work(cast: Cast) -> None:
    node = make_node(gpus=1)

    def beat(started_at: float) -> bool:
        nodes.heartbeat(
            Node.objects.get(pk=node.pk),
            Heartbeat(boot_id="boot-1", nonce="n", serial=0, at=time.time(), started_at=started_at),
        )
        return Node.objects.get(pk=node.pk).schedulable

    assert beat(1000.0) and beat(1000.0) and beat(2000.0) and beat(2000.0), "a restart is no clone"
    assert beat(1000.0), "nor is a clock that was set back"
    assert beat(2000.0) and not beat(1000.0)
    assert "Two workers report as n1" in Node.objects.get(pk=node.pk).cordon_reason
    beat(2000.0), beat(1000.0)
    assert Event.objects.filter(kind="node.cloned").count() == 1
    waiting = submitted(cast.bob)
    assert scheduling.run_cycle().started == [] and "n1 is cordoned" in fresh(waiting).hold_message
