"""A cycle on the database: what it reads, writes and sends."""

import json
import time
from typing import Any

import msgspec
import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext

from portal.celery import make_app
from portal.models import Allocation, Attempt, Event, Job, JobState, Node, Share
from portal.scheduler.decisions import Hold, Placement, Start
from portal.services import broker, desired, jobs, scheduling, starting
from portal.services.transitions import Conflict
from tests.portal.conftest import Cast, gpu_uuid, make_node
from tests.portal.orders import fresh, node_named, spec, started, submitted
from wire.desired import Launch


def test_a_start_makes_attempt_shares_allocations_and_the_order(cast: Cast) -> None:
    node = make_node(gpus=8)
    fields: dict[str, Any] = {"launcher": "torchrun", "env": {"A": "b"}, "time_limit": "1h", "layout": {"data": 4}}
    attempt = started(cast.bob, command="train.py --epochs 1", gpus=4, name="ddp", **fields)
    job = fresh(attempt.job)
    assert (job.state, job.allocated_at == attempt.created_at, attempt.number) == (JobState.STARTING, True, 1)
    assert list(attempt.allocations.values_list("rank", "gpu__index")) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    launch = msgspec.convert(attempt.shares.get().launch, Launch)
    assert [slot.uuid for slot in launch.gpus] == [gpu_uuid("n1", index) for index in range(4)]
    assert (launch.attempt, launch.job, launch.epoch, launch.user) == (str(attempt.pk), job.pk, 1, "bob")
    assert (launch.command, launch.env, launch.time_limit_s, launch.world_size) == (
        "train.py --epochs 1",
        {"A": "b"},
        3600,
        4,
    )
    assert launch.layout == {"data": 4, "tensor": 1, "pipeline": 1} and launch.master_port is None
    serial = node.desired_serial
    node.refresh_from_db()
    assert node.desired_serial > serial
    assert Event.objects.get(job=job, to_state="starting").message == "On n1: GPU 0, 1, 2, 3."


def test_a_script_is_one_rank_with_all_its_gpus(cast: Cast) -> None:
    make_node()
    share = started(cast.bob, gpus=4).shares.get()
    assert (share.rank_count, share.launch["world_size"], len(share.launch["gpus"])) == (1, 1, 4)


def test_a_gang_over_two_nodes_meets_at_the_first(cast: Cast) -> None:
    make_node("n1", gpus=4, hostname="host-1"), make_node("n2", gpus=4)
    shares = list(started(cast.bob, gpus=8, nodes=2, launcher="torchrun").shares.order_by("node_rank"))
    launches = [msgspec.convert(share.launch, Launch) for share in shares]
    assert [(one.node_rank, one.first_rank, len(one.gpus), one.world_size, one.node_count) for one in launches] == [
        (0, 0, 4, 8, 2), (1, 4, 4, 8, 2)]  # fmt: skip
    assert {one.master_address for one in launches} == {"host-1"}
    assert len({one.master_port for one in launches}) == 1 and launches[0].master_port is not None


def test_two_whole_node_jobs_wait_for_each_other_with_a_reason(cast: Cast) -> None:
    make_node()
    first, second = submitted(cast.bob, gpus=8), submitted(cast.bob, gpus=8)
    result = scheduling.run_cycle()
    assert (result.started, result.held, result.changed) == ([first.pk], 1, 1)
    waiting = fresh(second)
    assert (waiting.hold_code, waiting.hold_message) == ("wait_gpus", "Waiting for 8 GPUs. None is free.")
    assert scheduling.run_cycle().changed == 0, "an unchanged reason is not written again"


def test_a_cycle_costs_the_same_queries_however_many_jobs_and_nodes_there_are(cast: Cast) -> None:
    make_node("n0", gpus=1)
    started(cast.bob)

    def cost() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert scheduling.run_cycle().started == []
        return len(queries)

    submitted(cast.bob, name="first")
    small = cost()
    for number in range(1, 6):
        make_node(f"n{number}", gpus=8, schedulable=False)
    for number in range(30):
        submitted(cast.bob, gpus=1 + number % 8)
    assert cost() == small <= 8


def test_a_row_that_cannot_be_read_does_not_stop_the_queue(cast: Cast) -> None:
    make_node()
    bad, good = submitted(cast.bob), submitted(cast.bob)
    Job.objects.filter(pk=bad.pk).update(spec={"command": "x", "from": "another version"})
    assert scheduling.run_cycle().started == [good.pk]


def test_a_decision_that_no_longer_holds_changes_nothing(cast: Cast) -> None:
    node = make_node()
    job = submitted(cast.bob)
    Node.objects.filter(pk=node.pk).update(schedulable=False)
    decision = Start(job.pk, (Placement("n1", (gpu_uuid("n1", 0),)),))
    with pytest.raises(Conflict, match="went away"):
        starting.start(decision)
    assert scheduling.carry_out(decision) is False
    assert not Attempt.objects.exists() and not Share.objects.exists() and not Allocation.objects.exists()


def test_a_draft_is_told_whether_it_would_start_behind_all_who_wait(cast: Cast) -> None:
    make_node(gpus=2)
    assert isinstance(scheduling.would_start(spec(gpus=2)), Start)
    started(cast.bob, gpus=1)
    job = submitted(cast.bob, gpus=2)
    held = scheduling.would_start(spec(gpus=1))
    assert isinstance(held, Hold) and held.message == f"Behind #{job.pk}, which waits for 2 GPUs."
    assert Job.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_many_submits_wake_the_scheduler_once_until_it_looks(cast: Cast, broker_url: str) -> None:
    make_node()
    client = redis.Redis.from_url(broker_url)
    for _ in range(3):
        submitted(cast.bob)
    assert client.llen("control") == 1
    scheduling.woken()
    submitted(cast.bob)
    assert client.llen("control") == 2
    task = json.loads(client.lindex("control", 0) or b"{}")
    assert task["headers"]["task"] == "portal.cycle"


@pytest.mark.django_db(transaction=True)
def test_a_dead_broker_costs_a_submit_nothing_but_the_hint(
    cast: Cast, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_node()
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    nobody = make_app("nobody-answers", 1.0)
    monkeypatch.setattr(scheduling, "sender", nobody)
    monkeypatch.setattr(desired, "sender", nobody)
    monkeypatch.setattr(broker, "BREAKER", broker.Breaker())
    began = time.monotonic()
    with pytest.raises(broker.DOWN_ERRORS):
        nobody.send_task("portal.cycle", queue="control", retry=False)
    job = submitted(cast.bob)
    assert scheduling.run_cycle().started == [job.pk]
    assert jobs.cancel(job, actor=cast.bob).state == JobState.STOPPING
    assert not desired.hint(node_named("n1")) and not desired.publish(node_named("n1"))
    assert time.monotonic() - began < 3
