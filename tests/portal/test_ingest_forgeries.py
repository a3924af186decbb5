"""What a node, or somebody in its name, may put into its stream: nothing of it harms the others."""

import time
from collections.abc import Iterator

import msgspec
import pytest
import redis

from portal.models import Attempt, Event, Job, LogStream, Node
from portal.services import ingest
from tests.portal.conftest import Cast, make_node
from tests.portal.upstream import Machine, a_whole_life, assert_whole, chunk, drain, event, heartbeat, start_attempt
from wire.names import upstream_key
from wire.reports import (
    Rejected,
)
from wire.signing import Action, Signer, new_private_key
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
