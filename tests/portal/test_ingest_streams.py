"""What nodes send ends in the database once, whatever is repeated, forged, garbled or lost on the way."""

import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import redis
from django.db import OperationalError

from portal.models import Allocation, Attempt, Event, Gpu, Job, LogStream, Node, SampleBlock, Share
from portal.services import ingest, logs
from portal.services.intake import Intake
from tests.portal.conftest import Cast, make_node
from wire.desired import Desired, Launch
from wire.names import INGEST_GROUP, desired_key, upstream_key
from wire.reports import (
    AttemptEvent,
    GpuReading,
    Heartbeat,
    Inventory,
    LogChunk,
    Rejected,
    Report,
    Telemetry,
)
from wire.signing import Action, Signer, new_private_key, public_key_of
from wire.states import AttemptState, EndReason


@dataclass
class Machine:
    """A node as the broker sees it."""

    node: Node
    broker: redis.Redis
    key: bytes = field(default_factory=new_private_key)
    sent: int = 0

    def __post_init__(self) -> None:
        Node.objects.filter(pk=self.node.pk).update(public_key=public_key_of(self.key))

    def send(self, *reports: Report, key: bytes | None = None, audience: str = "portal") -> None:
        signer = Signer(key or self.key, self.node.name)
        for report in reports:
            self.sent += 1
            self.send_raw(signer.seal(report, audience=audience, action=Action.REPORT, epoch=self.sent))

    def send_raw(self, sealed: bytes) -> None:
        self.broker.xadd(upstream_key(self.node.name), {b"m": sealed})

    def desired(self) -> Desired | None:
        raw = self.broker.get(desired_key(self.node.name))
        if raw is None:
            return None
        body, _signature = msgspec.msgpack.decode(raw, type=tuple[bytes, bytes])
        return msgspec.msgpack.decode(msgspec.msgpack.decode(body, type=list)[7], type=Desired)

    def waiting(self) -> int:
        return self.broker.xlen(upstream_key(self.node.name))


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


def start_attempt(cast: Cast, node: Node) -> Attempt:
    job = Job.objects.create(
        owner=cast.bob, project=cast.bob.personal_project, name="train", spec={}, gpu_count=1, state="starting"
    )
    attempt = Attempt.objects.create(job=job, number=1)
    order = Launch(attempt=str(attempt.pk), job=job.pk, epoch=1, name="t", user="bob", launcher="script", command="x")
    Share.objects.create(attempt=attempt, node=node, launch=msgspec.to_builtins(order))
    Allocation.objects.create(attempt=attempt, gpu=node.gpus.get(index=0), rank=0)
    return attempt


def event(attempt: Attempt, seq: int, state: AttemptState, **fields: Any) -> AttemptEvent:
    return AttemptEvent(
        attempt=str(attempt.pk), job=attempt.job_id, epoch=1, seq=seq, at=time.time(), state=state, **fields
    )


def chunk(attempt: Attempt, offset: int, data: bytes) -> LogChunk:
    return LogChunk(attempt=str(attempt.pk), job=attempt.job_id, epoch=1, stream="rank-0", offset=offset, data=data,
                    crc32=zlib.crc32(data))


def heartbeat(nonce: str = "n", **fields: Any) -> Heartbeat:
    return Heartbeat(boot_id="boot-1", nonce=nonce, serial=0, at=time.time(), started_at=0.0, **fields)


def drain(reader: ingest.Ingest) -> int:
    """Rounds until a round finds nothing."""
    taken = 0
    while count := reader.run_once(block_s=0.001):
        taken += count
    return taken + reader.run_once(block_s=0.001)


def a_whole_life(attempt: Attempt) -> list[Report]:
    return [
        event(attempt, 1, AttemptState.STARTING), event(attempt, 2, AttemptState.RUNNING),
        chunk(attempt, 0, b"epoch 1\n"), chunk(attempt, 8, b"epoch 2\n"),
        event(attempt, 3, AttemptState.SUCCEEDED, reason=EndReason.EXITED, exit_code=0, log_sizes={"rank-0": 16}),
    ]


def assert_whole(attempt: Attempt) -> None:
    job = Job.objects.get(pk=attempt.job_id)
    piece = logs.read(job, 0, 0, 100)
    assert (job.state, piece.data, piece.complete) == ("succeeded", b"epoch 1\nepoch 2\n", True)
    assert Share.objects.get(attempt=attempt).event_seq == 3
    assert not Allocation.objects.filter(released_at=None).exists()
    assert Event.objects.filter(job=job, kind="job.state", to_state="succeeded").count() == 1


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


# --- forged and garbled -----------------------------------------------------------------------------------------------
def complaints(kind: str) -> list[str]:
    return list(Event.objects.filter(kind=kind).order_by("id").values_list("reason", flat=True))


@pytest.mark.parametrize("garbage", [b"", b"\x00", b"{}", b"\xc1" * 100, msgspec.msgpack.encode((b"x", b"y" * 64))])
def test_garbage_is_put_away_and_what_follows_is_taken(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest, garbage: bytes
) -> None:
    machine.send_raw(garbage)
    machine.broker.xadd(upstream_key(machine.node.name), {b"other": b"field"})
    machine.send(*a_whole_life(attempt))
    drain(reader)
    assert_whole(attempt)
    assert complaints("node.rejected")


def test_a_report_signed_by_another_node_is_refused(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest
) -> None:
    machine.send(*a_whole_life(attempt), key=new_private_key())
    drain(reader)
    assert Job.objects.get(pk=attempt.job_id).state == "starting"
    assert not LogStream.objects.exists()
    assert complaints("node.rejected") == ["bad_signature"]  # once, not five times


def test_a_report_for_another_audience_is_refused(machine: Machine, attempt: Attempt, reader: ingest.Ingest) -> None:
    machine.send(event(attempt, 1, AttemptState.RUNNING), audience="n2")
    drain(reader)
    assert complaints("node.rejected") == ["wrong_audience"]


def test_a_report_on_the_attempt_of_another_node_is_dropped_and_seen(
    cast: Cast, machine: Machine, attempt: Attempt, reader: ingest.Ingest
) -> None:
    intruder = Machine(make_node("n2", gpus=1), machine.broker)
    intruder.send(event(attempt, 1, AttemptState.FAILED, reason=EndReason.EXIT_CODE), chunk(attempt, 0, b"lies\n"))
    drain(reader)
    assert Job.objects.get(pk=attempt.job_id).state == "starting"
    assert not LogStream.objects.exists()
    violation = Event.objects.get(kind="node.violation")
    assert violation.node == intruder.node and "never given" in violation.message


@pytest.mark.parametrize("text", ["not-a-uuid", "", "\x00", "9" * 5000])
def test_an_attempt_that_cannot_exist_is_dropped(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest, text: str
) -> None:
    strange = event(attempt, 1, AttemptState.RUNNING)
    strange.attempt = text
    machine.send(strange, *a_whole_life(attempt))
    drain(reader)
    assert_whole(attempt)
    assert complaints("node.violation") == ["foreign_attempt"]


def test_a_report_that_cannot_be_applied_does_not_hold_up_the_others(
    machine: Machine, attempt: Attempt, reader: ingest.Ingest
) -> None:
    """A NUL in a JSON column is refused by the database itself."""
    life = a_whole_life(attempt)
    machine.send(life[0], heartbeat("n", gpu_reader="failed: \x00"), *life[1:])
    drain(reader)
    assert_whole(attempt)
    assert machine.waiting() == 0


def test_a_node_that_refuses_an_order_is_heard(machine: Machine, reader: ingest.Ingest) -> None:
    machine.send(*[Rejected(at=time.time(), code="stale_serial", message="serial 3 after 4\x00")] * 3)
    drain(reader)
    assert complaints("node.rejected") == ["stale_serial"]


def test_an_old_heartbeat_proves_nothing_about_now(machine: Machine, reader: ingest.Ingest) -> None:
    old = Signer(machine.key, machine.node.name, clock=lambda: time.time() - 3600)
    machine.send_raw(old.seal(heartbeat("replayed"), audience="portal", action=Action.REPORT, epoch=1))
    drain(reader)
    assert Node.objects.get(pk=machine.node.pk).echo_nonce == ""


def test_a_flooded_stream_is_bounded_and_named(
    machine: Machine, reader: ingest.Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(reader)
    monkeypatch.setattr(ingest, "STREAM_CAP", 10)
    monkeypatch.setattr(ingest, "CAP_EVERY_S", 0)
    for _ in range(50):
        machine.send_raw(b"x")
    reader._keep_in_bounds()
    assert machine.waiting() == 10
    assert complaints("node.violation") == ["flood"]


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
