"""The order for a node: composed from the database, sealed, laid on a real broker."""

import base64
import json

import pytest
import redis

from portal.models import LogStream, Node, Share
from portal.services import attempts, desired, jobs, keys
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import RUNNING, STARTING, STOPPED, SUCCEEDED, event, node_named, report, started
from wire.desired import Desired, HintBody
from wire.names import PORTAL, desired_key, hint_queue
from wire.signing import Action, Opener, Refused, decode


def laid(url: str, node: str = "n1") -> Desired:
    sealed = redis.Redis.from_url(url).get(desired_key(node))
    assert isinstance(sealed, bytes)
    envelope = opener(node, Action.DESIRED).open(sealed)
    order = decode(envelope.body, Desired)
    assert envelope.epoch == order.serial
    return order


def opener(node: str, action: Action) -> Opener:
    return Opener(bytes.fromhex(keys.public_key_hex()), sender=PORTAL, audience=node, action=action)


def test_a_running_share_is_launched_and_acknowledged(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob, gpus=2)
    share = attempt.shares.get()
    report(share, STARTING, RUNNING)
    LogStream.objects.create(attempt=attempt, name="rank-0", size_bytes=77)
    order = desired.compose(share.node)
    assert [launch.attempt for launch in order.launches] == [str(attempt.pk)] and order.stops == []
    known = order.acknowledged[str(attempt.pk)]
    assert (known.event_seq, known.log_offsets) == (2, {"rank-0": 77})


def test_a_stop_stands_beside_its_launch_until_the_end_is_known(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    share = attempt.shares.get()
    jobs.cancel(attempt.job, actor=cast.bob)
    order = desired.compose(share.node)
    assert [stop.attempt for stop in order.stops] == [launch.attempt for launch in order.launches] == [str(attempt.pk)]
    report(share, STOPPED)
    order = desired.compose(share.node)
    assert order.stops == order.launches == [] and order.forget == [str(attempt.pk)]


def test_an_ended_share_is_acknowledged_until_its_logs_are_whole_and_then_forgotten(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    share = attempt.shares.get()
    report(share, STARTING, RUNNING, SUCCEEDED, log_sizes={"rank-0": 5})
    order = desired.compose(share.node)
    assert order.acknowledged[str(attempt.pk)].event_seq == 3 and order.forget == [] and order.launches == []
    LogStream.objects.update(size_bytes=5)
    attempts.forget_if_whole(Share.objects.select_related("node").get(pk=share.pk))
    order = desired.compose(share.node)
    assert order.forget == [str(attempt.pk)] and order.acknowledged == {}


def test_what_is_forgotten_is_said_as_long_as_the_node_speaks_of_it(cast: Cast) -> None:
    make_node()
    attempt = started(cast.bob)
    share = attempt.shares.get()
    report(share, SUCCEEDED)
    long_ago = "2020-01-01T00:00:00Z"
    Share.objects.update(forgotten_at=long_ago)
    assert desired.compose(share.node).forget == []
    Node.objects.update(heartbeat={"attempts": [str(attempt.pk), "no uuid"]})
    assert desired.compose(share.node).forget == [str(attempt.pk)]
    Node.objects.update(heartbeat={})
    assert attempts.apply(share.node, event(share, 1, *SUCCEEDED))
    assert desired.compose(share.node).forget == [str(attempt.pk)], "it repeated what is durable"


def test_the_serial_only_grows(db: None) -> None:
    node = make_node()
    seen = []
    for _ in range(3):
        desired.bump(node)
        seen.append(desired.compose(node).serial)
    assert seen == sorted(set(seen)) and seen[0] > 10**12, "a restored backup must not fall behind"


@pytest.mark.django_db(transaction=True)
def test_a_start_lays_the_sealed_order_and_sends_a_sealed_hint(cast: Cast, broker_url: str) -> None:
    make_node(), make_node("n2", schedulable=False)
    attempt = started(cast.bob)
    order = laid(broker_url)
    assert [launch.attempt for launch in order.launches] == [str(attempt.pk)]
    message = redis.Redis.from_url(broker_url).lindex(hint_queue("n1"), 0)
    assert message is not None
    task = json.loads(message)
    assert task["headers"]["task"] == "workers.hint" and task["content-type"] == "application/json"
    arguments, _, _ = json.loads(base64.b64decode(task["body"]))
    sealed = base64.b64decode(arguments[0])
    assert decode(opener("n1", Action.HINT).open(sealed).body, HintBody).serial == order.serial
    with pytest.raises(Refused):
        opener("n2", Action.HINT).open(sealed)
    with pytest.raises(Refused):
        opener("n1", Action.DESIRED).open(sealed)


@pytest.mark.django_db(transaction=True)
def test_a_flushed_broker_has_every_order_again_after_one_pass(cast: Cast, broker_url: str) -> None:
    make_node(), make_node("n2")
    attempt = started(cast.bob)
    redis.Redis.from_url(broker_url).flushall()
    assert desired.publish_all() == 2
    assert [launch.attempt for launch in laid(broker_url).launches] == [str(attempt.pk)]
    assert laid(broker_url, "n2").launches == []


@pytest.mark.django_db(transaction=True)
def test_a_node_that_is_away_gets_no_pile_of_hints(broker_url: str) -> None:
    make_node()
    Node.objects.update(state="unreachable")
    assert not desired.hint(node_named("n1"))
    assert redis.Redis.from_url(broker_url).llen(hint_queue("n1")) == 0
