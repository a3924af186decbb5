"""What nodes send ends in the database once, whatever is repeated, forged, garbled or lost on the way."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.db import OperationalError

from portal.models import Attempt, Event, Gpu, Job, Node, SampleBlock, Share
from portal.services import ingest, logs
from portal.services.intake import Intake
from tests.portal.conftest import Cast, make_node
from tests.portal.upstream import Machine, a_whole_life, assert_whole, chunk, drain, event, heartbeat, start_attempt
from wire.names import INGEST_GROUP, upstream_key
from wire.reports import (
    GpuReading,
    Inventory,
    Telemetry,
)
from wire.states import AttemptState, EndReason


@pytest.fixture
def broker(broker_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker_url) as client:
        yield client


@pytest.fixture
def machine(cast: Cast, broker: redis.Redis) -> Machine:
    return Machine(make_node("n1", gpus=2), broker)


@pytest.fixture
def attempt(cast: Cast, machine: Machine) -> Attempt:
    return start_attempt(cast, machine.node)


@pytest.fixture
def reader() -> ingest.Ingest:
    return ingest.Ingest()


# --- the ordinary way -------------------------------------------------------------------------------------------------
def test_a_whole_life_in_one_batch(machine: Machine, attempt: Attempt, reader: ingest.Ingest) -> None:
    machine.send(*a_whole_life(attempt))
    drain(reader)
    assert_whole(attempt)
    assert machine.waiting() == 0
    assert Share.objects.get(attempt=attempt).forgotten_at is not None


def test_the_node_hears_what_is_durable_and_what_it_may_forget(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest
) -> None:
    machine.send(event(attempt, 1, AttemptState.RUNNING), chunk(attempt, 0, b"12345"), heartbeat("abc"))
    drain(reader)
    told = machine.desired()
    assert told is not None
    assert told.echo == "abc"
    assert told.acknowledged[str(attempt.pk)].event_seq == 1
    assert told.acknowledged[str(attempt.pk)].log_offsets == {"rank-0": 5}
    end = event(attempt, 2, AttemptState.FAILED, reason=EndReason.EXIT_CODE, exit_code=3, log_sizes={"rank-0": 5})
    machine.send(end)
    reader.run_once()
    told = machine.desired()
    assert told is not None and told.forget == [str(attempt.pk)]


def test_log_bytes_that_come_after_the_end_complete_the_log(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest
) -> None:
    life = a_whole_life(attempt)
    machine.send(life[0], life[1], life[4])
    drain(reader)
    job = Job.objects.get(pk=attempt.job_id)
    assert job.state == "succeeded"  # a state never waits for log bytes
    assert not logs.read(job, 0, 0, 10).complete
    machine.send(life[2], life[3])
    drain(reader)
    assert_whole(attempt)
    assert Share.objects.get(attempt=attempt).forgotten_at is not None


def test_a_node_that_joins_later_is_found(cast: Cast, machine: Machine, reader: ingest.Ingest) -> None:
    drain(reader)
    late = Machine(make_node("n2", gpus=0), machine.broker)
    late.send(heartbeat("from the beginning"))
    deadline = time.monotonic() + 5
    while late.waiting():
        reader.run_once(block_s=0.05)
        assert time.monotonic() < deadline
    assert Node.objects.get(name="n2").echo_nonce == "from the beginning"


def test_telemetry_is_shown_and_kept(machine: Machine, reader: ingest.Ingest) -> None:
    gpu = machine.node.gpus.get(index=0)
    for step in range(3):
        machine.send(Telemetry(boot_id="boot-1", readings=[
            GpuReading(uuid=gpu.uuid, at=time.time() + step, utilization_percent=90.0 + step)
        ]))
    drain(reader)
    reader.finish()
    gpu.refresh_from_db()
    assert gpu.latest["utilization_percent"] == 92.0
    assert SampleBlock.objects.filter(node=machine.node).exists()


def test_an_inventory_makes_the_gpus(cast: Cast, broker: redis.Redis, reader: ingest.Ingest) -> None:
    machine = Machine(make_node("n9", gpus=0), broker)
    machine.send(Inventory(digest="d9", boot_id="b", hostname="h", agent_version="1", gpus=[]))
    drain(reader)
    assert Node.objects.get(name="n9").inventory_digest == "d9"


# --- repeated, reordered, lost ----------------------------------------------------------------------------------------
def test_everything_twice_is_as_once(machine: Machine, attempt: Attempt, reader: ingest.Ingest) -> None:
    for report in a_whole_life(attempt):
        machine.send(report, report)
    machine.send(*a_whole_life(attempt))
    drain(reader)
    assert_whole(attempt)


def test_backwards_and_then_again_in_order(machine: Machine, attempt: Attempt, reader: ingest.Ingest) -> None:
    machine.send(*reversed(a_whole_life(attempt)))
    drain(reader)
    machine.send(*a_whole_life(attempt))
    drain(reader)
    assert_whole(attempt)


class Killed(BaseException):
    """As SIGKILL: no handler, no clean-up."""


def killed(*_: Any) -> None:
    raise Killed


def test_killed_between_commit_and_acknowledgement_the_next_one_changes_nothing(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.send(*a_whole_life(attempt))
    monkeypatch.setattr(reader, "_acknowledge", killed)
    with pytest.raises(Killed):
        drain(reader)
        reader.run_once()
    assert machine.waiting() == 5
    events = Event.objects.count()
    assert drain(ingest.Ingest()) == 5
    assert_whole(attempt)
    assert Event.objects.count() == events
    assert machine.waiting() == 0


def test_what_was_delivered_to_a_dead_ingest_is_taken_first(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest
) -> None:
    drain(reader)
    life = a_whole_life(attempt)
    machine.send(*life[:3])
    key = upstream_key(machine.node.name)
    machine.broker.xreadgroup(INGEST_GROUP, ingest.CONSUMER, {key: ">"})  # delivered, and then the process was gone
    machine.send(*life[3:])
    drain(ingest.Ingest())
    assert_whole(attempt)


def test_a_flushed_broker_costs_nothing_that_the_node_still_has(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest
) -> None:
    life = a_whole_life(attempt)
    machine.send(*life[:3])
    drain(reader)
    machine.send(life[3])
    machine.broker.flushall()
    drain(reader)
    machine.send(*life)  # the node goes back to what was acknowledged
    drain(reader)
    assert_whole(attempt)


def test_nothing_is_acknowledged_while_the_database_refuses(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.send(*a_whole_life(attempt))

    def down() -> None:
        raise ingest.DatabaseDown("connection refused")

    def failing(*_: Any) -> None:
        raise OperationalError("server closed the connection")

    with monkeypatch.context() as patched:
        patched.setattr(Intake, "_apply", failing)
        patched.setattr("portal.services.intake.require_database", down)
        with pytest.raises(ingest.DatabaseDown):
            drain(reader)
            reader.run_once()
    assert machine.waiting() == 5
    reader.retreat()
    drain(reader)
    assert_whole(attempt)


# --- being alone, being seen ------------------------------------------------------------------------------------------
def test_a_second_ingest_waits_for_the_first(transactional_db: None) -> None:
    first, second = ingest.SoleLock(), ingest.SoleLock()
    first.hold()
    first.hold()
    with pytest.raises(ingest.AnotherIngest, match="waits"):
        second.hold()
    first.release()
    second.hold()
    second.release()


def test_lag_is_known_when_ingest_ran_and_unknown_when_not(machine: Machine, reader: ingest.Ingest) -> None:
    assert ingest.lag_s() is None
    drain(reader)
    lag = ingest.lag_s()
    assert lag is not None and lag < 5


def test_gpus_of_the_machine_stay_its_own(machine: Machine, reader: ingest.Ingest, cast: Cast) -> None:
    other = Machine(make_node("n2", gpus=1), machine.broker)
    gpu = Gpu.objects.get(node=machine.node, index=0)
    other.send(Telemetry(boot_id="b", readings=[GpuReading(uuid=gpu.uuid, at=time.time(), utilization_percent=1.0)]))
    drain(reader)
    reader.finish()
    gpu.refresh_from_db()
    assert gpu.latest == {}
