"""Readings weighed against allocations: foreign processes, memory that does not come back, and what it costs."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from portal.models import Gpu, HardwareOrder, Health, Node
from portal.services import attempts, health, scheduling
from portal.services.judging import Judge
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import RUNNING, STARTING, SUCCEEDED, fresh, report, started, submitted
from wire.hardware import HealthEvent
from wire.reports import GpuProcess, GpuReading

GIB = 1024**3


@dataclass
class Room:
    """A node's readings as they come in, a second apart."""

    node: Node
    now: float = 1000.0
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.node, clock=lambda: self.now)

    def second(self, *processes: GpuProcess, index: int = 0, used: int | None = None, count: int = 1,
               **fields: Any) -> str:  # fmt: skip
        """-> the GPU's state after `count` readings that show this."""
        for _ in range(count):
            self.now += 1.0
            memory = used if used is not None else sum(process.memory_used_bytes or 0 for process in processes)
            reading = GpuReading(
                uuid=self.gpu(index).uuid, at=time.time(), memory_used_bytes=memory,
                **{"processes": list(processes), **fields},
            )  # fmt: skip
            self.judge.add([reading])
            self.judge.look()
        return self.gpu(index).state

    def gpu(self, index: int = 0) -> Gpu:
        return Gpu.objects.get(node=self.node, index=index)


def process(pid: int = 4711, attempt: object = None, **fields: Any) -> GpuProcess:
    known = {"memory_used_bytes": 4 * GIB, "user": "eve", "command": "python miner.py", "start_time": 1764500000.0}
    return GpuProcess(pid=pid, attempt=str(attempt) if attempt else None, **(known | fields))


@pytest.fixture
def room(cast: Cast) -> Room:
    return Room(make_node(gpus=2))


def test_a_foreign_process_makes_the_gpu_dirty_until_it_is_gone(room: Room, cast: Cast) -> None:
    assert room.second(process()) == "ok", "one that lives for a moment is no finding"
    assert room.second(process(container="ab12cd34ef567890")) == "dirty"
    assert room.gpu().state_reason == (
        "Process 4711 of eve (python miner.py) uses 4.3 GB since 2025-11-30 10:53 UTC, in container ab12cd34ef56."
    )
    waiting = submitted(cast.bob, gpus=2)
    assert scheduling.run_cycle().started == []
    assert fresh(waiting).hold_message == "Waiting for 2 GPUs. GPU 0 of n1 is dirty."
    assert room.second() == "dirty", "one clean reading may be a hiccup"
    assert room.second() == "ok"
    assert scheduling.run_cycle().started == [waiting.pk]
    assert Health.objects.get().resolved_at is not None


def test_a_process_that_comes_back_is_a_finding_of_its_own(room: Room) -> None:
    assert room.second(process(), count=2) == "dirty"
    assert room.second(count=2) == "ok"
    assert room.second(process(), count=2) == "dirty"
    assert Health.objects.count() == 2


def test_two_foreign_processes_are_two_findings(room: Room) -> None:
    assert room.second(process(1), process(2), count=2) == "dirty"
    assert room.second(process(2), count=3) == "dirty"
    assert room.second(count=2) == "ok"
    assert Health.objects.filter(kind="foreign").count() == 2


def test_the_processes_of_a_job_on_its_own_gpu_are_no_finding(room: Room, cast: Cast) -> None:
    room.second()  # the allocations are read before the job exists
    attempt = started(cast.bob)
    held = attempt.allocations.get().gpu.index
    assert room.second(process(attempt=attempt.pk), index=held, count=20) == "ok"
    assert not Health.objects.exists()


def test_a_foreign_process_beside_a_job_fences_the_gpu_and_the_job_goes_on(room: Room, cast: Cast) -> None:
    attempt = started(cast.bob)
    report(attempt.shares.get(), STARTING, RUNNING)
    held = attempt.allocations.get().gpu.index
    assert room.second(process(1, attempt.pk), process(2), index=held, count=3) == "dirty"
    attempt.refresh_from_db()
    assert attempt.state == "running"


def test_memory_that_a_job_did_not_return_is_named_after_it(room: Room, cast: Cast) -> None:
    attempt = started(cast.bob)
    share, held = attempt.shares.get(), attempt.allocations.get().gpu.index
    report(share, STARTING, RUNNING)
    left = process(77, attempt.pk)
    room.second(left, index=held, count=3)
    report(share, SUCCEEDED, first_seq=3, exit_code=0)
    assert room.second(left, index=held, count=3) == "ok", "it may take a moment to go"
    assert room.second(left, index=held, count=6) == "dirty"
    assert room.gpu(held).state_reason.startswith(f"Memory not returned by job #{attempt.job_id}. Process 77")
    assert room.second(index=held, count=2) == "ok"


def test_memory_without_a_process_counts_after_a_while_and_names_the_last_job(room: Room, cast: Cast) -> None:
    attempt = started(cast.bob)
    held = attempt.allocations.get().gpu.index
    attempts.release(attempt)
    assert room.second(index=held, used=30 * GIB, count=4) == "ok"
    assert room.second(index=held, used=30 * GIB, count=4) == "dirty"
    reason = room.gpu(held).state_reason
    assert reason == f"Memory not returned by job #{attempt.job_id}. 32.2 GB are in use and no process explains them."
    assert room.second(index=held, used=GIB // 2, count=2) == "ok"


def test_what_is_not_known_makes_nothing_dirty_and_nothing_clean(room: Room) -> None:
    missing = {"processes": None, "missing": {"processes": "no_permission"}}
    assert room.second(used=30 * GIB, count=9, **missing) == "ok"
    assert room.second(process(), count=2) == "dirty"
    assert room.second(used=0, count=5, **missing) == "dirty"


def test_a_card_that_is_cut_into_slices_leaves_judging_to_them(room: Room) -> None:
    Gpu.objects.filter(node=room.node, index=0).update(mig_enabled=True)
    assert room.second(process(), count=4) == "ok"


def test_a_new_judge_knows_what_was_found_before_it(room: Room) -> None:
    assert room.second(process(), count=2) == "dirty"
    later = Room(room.node, now=room.now)
    assert later.second(process(), count=3) == "dirty"
    assert later.second(count=2) == "ok"
    assert Health.objects.count() == 1


def test_a_node_says_nothing_about_the_gpus_of_another(room: Room) -> None:
    other = make_node("n2", gpus=1)
    foreign = GpuReading(uuid=other.gpus.get().uuid, at=time.time(), processes=[process()])
    for _ in range(4):
        room.now += 1
        room.judge.add([foreign])
        room.judge.look()
    assert other.gpus.get().state == "ok" and not Health.objects.exists()


@pytest.mark.parametrize(("policy", "severity", "orders"), [("off", "info", 0), ("warn", "warning", 0),
                                                            ("stop", "warning", 1)])  # fmt: skip
def test_the_policy_says_what_happens_to_a_foreign_process(
    room: Room, settings: Any, policy: str, severity: str, orders: int
) -> None:
    settings.FOREIGN_POLICY, settings.FOREIGN_GRACE_S = policy, 0
    assert room.second(process(), count=5) == "dirty", "whatever the policy, it is not offered"
    assert Health.objects.get().severity == severity
    assert [order.order["pid"] for order in HardwareOrder.objects.all()] == [4711] * orders


def test_the_grace_and_a_process_of_unknown_age_protect_from_the_stop(room: Room, settings: Any) -> None:
    settings.FOREIGN_POLICY, settings.FOREIGN_GRACE_S = "stop", 300
    room.second(process(), count=5)
    settings.FOREIGN_GRACE_S = 0
    room.second(process(4712, start_time=None), index=1, count=5)
    assert not HardwareOrder.objects.exists()


def test_readings_that_are_as_they_should_be_cost_next_to_nothing(cast: Cast) -> None:
    node = make_node(gpus=8)
    attempt = started(cast.bob, gpus=8)
    uuids = [gpu.uuid for gpu in node.gpus.all()]
    busy = [GpuReading(uuid=uuid, at=1.0, memory_used_bytes=60 * GIB, processes=[process(9, attempt.pk)])
            for uuid in uuids]  # fmt: skip
    now = [0.0]
    judge = Judge(node, clock=lambda: now[0])
    for _ in range(3):
        now[0] += 2.5
        judge.add(busy)
        judge.look()
    spent = []
    for turn in range(200):
        now[0] += 1.0 if turn == 0 else 0.95
        judge._picture.holders_at = judge._picture._open_at = now[0]  # shared by all nodes: not this one's cost
        judge.add(busy)
        began = time.perf_counter()
        with CaptureQueriesContext(connection) as queries:
            began = time.perf_counter()
            judge.look()
            spent.append(time.perf_counter() - began)
        assert len(queries) == 0
    assert sorted(spent)[100] < 0.0003


def test_a_throttle_ends_when_the_clocks_are_free_again(room: Room) -> None:
    gpu = room.gpu()
    health.report(room.node, HealthEvent(at=time.time(), key="t", kind="throttle", gpu_uuid=gpu.uuid, message="hot"))
    assert room.second(throttle_reasons=0x40, count=40) == "ok"
    assert Health.objects.get().resolved_at is None
    room.second(throttle_reasons=0x4, count=20)
    room.second(throttle_reasons=0x8, count=1)
    room.second(throttle_reasons=0x4, count=29)
    assert Health.objects.get().resolved_at is None
    room.second(throttle_reasons=0x4, count=1)
    assert Health.objects.get().resolved_at is not None
