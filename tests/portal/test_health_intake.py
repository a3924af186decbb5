"""Hardware and health on the way in: through the stream, signature and all, and the refusal of a start."""

import time

import pytest
import redis

from portal.models import Allocation, Attempt, Gpu, Health, Node
from portal.scheduler.cycle import decide
from portal.scheduler.decisions import Start
from portal.services import attempts, ingest, jobs, nodes, scheduling, starting
from portal.services.transitions import Conflict
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import RUNNING, STARTING, event, fresh, report, submitted
from tests.portal.upstream import Machine, drain, heartbeat
from wire.hardware import GpuHardware, Hardware, HealthEvent, OrderResult
from wire.reports import GpuProcess, GpuReading, Refusal, Telemetry
from wire.states import AttemptState, EndReason


@pytest.fixture
def reader(broker_url: str) -> ingest.Ingest:
    return ingest.Ingest(redis.Redis.from_url(broker_url, protocol=2))


def test_a_nodes_hardware_and_health_arrive_and_repeats_change_nothing(
    cast: Cast, broker_url: str, reader: ingest.Ingest
) -> None:
    node = make_node(gpus=2)
    machine = Machine(node, redis.Redis.from_url(broker_url))
    uuids = [gpu.uuid for gpu in node.gpus.order_by("index")]
    told = (
        heartbeat(),
        Hardware(at=1.0, gpus=[GpuHardware(uuid=uuids[1], pcie_width=16)]),
        HealthEvent(at=time.time(), key="k", kind="xid", code=79, gpu_uuid=uuids[0], source="nvml"),
        OrderResult(id="no-such-order", at=1.0, state="done"),
    )
    machine.send(*told)
    drain(reader)
    machine.send(*told)
    drain(reader)
    assert [gpu.state for gpu in node.gpus.order_by("index")] == ["quarantined", "ok"]
    assert Gpu.objects.get(uuid=uuids[1]).hardware["pcie_width"] == 16
    assert Health.objects.count() == 1 and machine.waiting() == 0


def test_readings_with_a_foreign_process_make_the_gpu_dirty(
    cast: Cast, broker_url: str, reader: ingest.Ingest
) -> None:
    node = make_node(gpus=1)
    machine = Machine(node, redis.Redis.from_url(broker_url))
    uuid = node.gpus.get().uuid
    stranger = GpuProcess(pid=7, user="eve", command="miner", memory_used_bytes=1)

    def tell(*processes: GpuProcess) -> None:
        reading = GpuReading(uuid=uuid, at=time.time(), memory_used_bytes=0, processes=list(processes))
        machine.send(Telemetry(boot_id="boot-1", readings=[reading]))
        drain(reader)

    deadline = time.monotonic() + 15
    while node.gpus.get().state != "dirty":
        tell(stranger)
        assert time.monotonic() < deadline
    while node.gpus.get().state != "ok":
        tell()
        assert time.monotonic() < deadline


def refuse(attempt: Attempt, *refusals: Refusal) -> None:
    for share in attempt.shares.all():
        told = event(share, 1, AttemptState.FAILED, EndReason.PREFLIGHT, refusals=list(refusals),
                     message=" ".join(one.message for one in refusals))  # fmt: skip
        attempts.apply(share.node, told)


def held(attempt: Attempt) -> Gpu:
    return attempt.allocations.get().gpu


def newest(job_id: int) -> Attempt:
    return Attempt.objects.filter(job=job_id).order_by("-number")[0]


def test_a_refused_job_goes_elsewhere_and_the_refused_gpu_is_fenced(cast: Cast) -> None:
    make_node(gpus=2)
    job = submitted(cast.bob)
    scheduling.run_cycle()
    first = newest(job.pk)
    refuse(first, Refusal(code="broken", message="GPU 0 just reported Xid 79.", gpu_uuid=held(first).uuid))
    waiting = fresh(job)
    assert (waiting.state, waiting.hold_code) == ("waiting", "wait_gpus")
    assert waiting.hold_message == (
        "Was not started, as a check of n1 failed: GPU 0 just reported Xid 79. "
        "It goes elsewhere, without using up a retry."
    )
    gpu = held(first)
    assert (gpu.state, gpu.state_reason) == (
        "suspect", f"Refused for job #{job.pk}: GPU 0 just reported Xid 79.")  # fmt: skip
    assert scheduling.run_cycle().started == [job.pk]
    second = newest(job.pk)
    assert held(second) != gpu and Allocation.objects.filter(released_at=None).count() == 1
    report(second.shares.get(), STARTING, RUNNING)
    assert fresh(job).state == "running"


def test_a_gpu_that_was_only_busy_comes_back_by_itself(cast: Cast) -> None:
    node = make_node(gpus=1)
    job = submitted(cast.bob)
    scheduling.run_cycle()
    refuse(newest(job.pk), Refusal(code="busy", message="GPU 0 is used by process 7.", gpu_uuid=node.gpus.get().uuid))
    assert node.gpus.get().state == "dirty" and scheduling.run_cycle().started == []


def test_refusals_use_up_no_retry_but_are_not_borne_for_ever(cast: Cast) -> None:
    make_node(gpus=8)
    job = submitted(cast.bob, retries=1)
    for number in range(1, 5):
        assert scheduling.run_cycle().started == [job.pk]
        attempt = newest(job.pk)
        assert attempt.number == number
        refuse(attempt, Refusal(code="broken", message=f"GPU is broken, {number}.", gpu_uuid=held(attempt).uuid))
    ended = fresh(job)
    assert (ended.state, ended.end_code) == ("failed", "end_preflight")
    assert ended.end_message == "Was not started, as a check of n1 failed: GPU is broken, 4."
    assert Gpu.objects.filter(state="suspect").count() == 4


def test_a_lost_attempt_after_refusals_still_has_its_retry(cast: Cast) -> None:
    make_node(gpus=8)
    job = submitted(cast.bob, retries=1)
    for _ in range(2):
        scheduling.run_cycle()
        attempt = newest(job.pk)
        refuse(attempt, Refusal(code="broken", message="x", gpu_uuid=held(attempt).uuid))
    scheduling.run_cycle()
    share = newest(job.pk).shares.get()
    report(share, STARTING, RUNNING, (AttemptState.LOST, EndReason.SUPERVISOR_LOST))
    assert fresh(job).state == "waiting" and "Try 2 of 2 follows." in fresh(job).hold_message


def test_a_cancelled_job_is_not_sent_elsewhere(cast: Cast) -> None:
    make_node(gpus=2)
    job = submitted(cast.bob)
    scheduling.run_cycle()
    jobs.cancel(fresh(job), actor=cast.bob)
    attempt = newest(job.pk)
    refuse(attempt, Refusal(code="broken", message="x", gpu_uuid=held(attempt).uuid))
    assert fresh(job).state in ("stopped", "failed")


def test_a_full_disk_is_the_nodes_matter_and_no_gpu_pays_for_it(cast: Cast) -> None:
    node = make_node(gpus=2)
    job = submitted(cast.bob)
    scheduling.run_cycle()
    refuse(newest(job.pk), Refusal(code="disk", message="The node's disk has 10 MiB left."))
    assert set(node.gpus.values_list("state", flat=True)) == {"ok"}
    assert fresh(job).hold_code == "wait_retry"
    row = Health.objects.get()
    assert (row.gpu, row.node, row.kind) == (None, Node.objects.get(), "disk")


def test_a_gang_ends_together_when_one_node_refuses(cast: Cast) -> None:
    make_node("a", gpus=2), make_node("b", gpus=2)
    job = submitted(cast.bob, gpus=4, nodes=2, launcher="torchrun")
    scheduling.run_cycle()
    attempt = newest(job.pk)
    first, second = attempt.shares.order_by("node_rank")
    report(first, STARTING, RUNNING)
    gpu = second.node.gpus.order_by("index")[0]
    refusal = Refusal(code="broken", message="GPU 0 does not answer: gpu_lost.", gpu_uuid=gpu.uuid)
    attempts.apply(second.node, event(second, 1, AttemptState.FAILED, EndReason.PREFLIGHT, refusals=[refusal],
                                      message=refusal.message))  # fmt: skip
    assert fresh(job).state in ("starting", "running", "stopping")
    report(first, (AttemptState.STOPPED, EndReason.STOP_REQUESTED), first_seq=3)
    assert fresh(job).state == "waiting"
    assert Gpu.objects.get(pk=gpu.pk).state == "suspect"
    assert not Allocation.objects.filter(released_at=None).exists()


def test_a_node_without_room_gets_no_work_until_it_has_room(cast: Cast) -> None:
    node = make_node("n1", gpus=1)
    job = submitted(cast.bob)
    Node.objects.filter(pk=node.pk).update(heartbeat={"spool_free_bytes": 10 * 1024**2})
    nodes.sweep()
    nodes.sweep()
    assert Health.objects.get().message == "n1 has 10 MiB left on the disk of its runs; it gets no new work."
    assert scheduling.run_cycle().started == [] and "n1 is short of disk space" in fresh(job).hold_message
    Node.objects.filter(pk=node.pk).update(heartbeat={"spool_free_bytes": 10 * 1024**3})
    nodes.sweep()
    assert scheduling.run_cycle().started == [job.pk]


def test_a_gpu_that_was_fenced_since_the_snapshot_is_not_given_away(cast: Cast) -> None:
    node = make_node(gpus=1)
    job = submitted(cast.bob)
    waiting = {job.pk: fresh(job)}
    (decision,) = decide(scheduling.snapshot(waiting), time.time())
    assert isinstance(decision, Start)
    Gpu.objects.update(state="suspect")
    with pytest.raises(Conflict):
        starting.start(decision)
    assert fresh(job).state == "waiting" and node.gpus.get().state == "suspect"
