"""The node's way to the broker: signed, in order, and never longer than its deadlines."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from wire import names, signing
from wire.reports import Rejected, Report
from wire.signing import Action, Opener
from workers import publish
from workers.publish import BrokerDown, Publisher
from workers.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, broker_url: str) -> Settings:
    return Settings(node="node1", state_dir=tmp_path, private_key=signing.new_private_key(),
                    portal_public_key=bytes(32), broker_url=broker_url)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Takes connections and never answers: what a half-open connection looks like."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def report(number: int) -> Rejected:
    return Rejected(at=float(number), code="malformed", message=str(number))


def test_reports_arrive_signed_numbered_and_in_order(settings: Settings, broker_url: str) -> None:
    publisher = Publisher(settings)
    publisher.send(report(0))
    publisher.send_all([report(number) for number in range(1, 50)])
    Publisher(settings).send(report(50))  # a restarted worker
    opener = Opener(signing.public_key_of(settings.private_key), sender="node1", audience=names.PORTAL,
                    action=Action.REPORT, lifetime_s=None)
    with redis.Redis.from_url(broker_url) as client:
        entries = client.xrange(names.upstream_key("node1"))
    envelopes = [opener.open(fields[names.MESSAGE_FIELD]) for _, fields in entries]
    assert [signing.decode(envelope.body, Report).at for envelope in envelopes] == [float(n) for n in range(51)]
    numbers = [envelope.epoch for envelope in envelopes]
    assert numbers == sorted(set(numbers))


def test_there_may_be_no_order_yet(settings: Settings, broker_url: str) -> None:
    publisher = Publisher(settings)
    assert publisher.read_desired() is None
    with redis.Redis.from_url(broker_url) as client:
        client.set(names.desired_key("node1"), b"\x00sealed")
    assert publisher.read_desired() == b"\x00sealed"


def test_a_broker_that_is_gone_is_said_to_be_down(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    publisher = Publisher(replace(settings, broker_url=f"redis://127.0.0.1:{port}"))
    with pytest.raises(BrokerDown, match="cannot report"):
        publisher.send(report(1))
    with pytest.raises(BrokerDown, match="cannot read"):
        publisher.read_desired()


def test_a_connection_that_went_silent_does_not_hold_the_node(settings: Settings, silent_port: int,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "SOCKET_TIMEOUT_S", 0.2)
    publisher = Publisher(replace(settings, broker_url=f"redis://127.0.0.1:{silent_port}"))
    began = time.monotonic()
    with pytest.raises(BrokerDown):
        publisher.read_desired()
    assert time.monotonic() - began < 3


def test_a_closed_idle_connection_is_replaced_without_losing_a_report(settings: Settings, broker_url: str) -> None:
    publisher = Publisher(settings)
    publisher.send(report(1))
    with redis.Redis.from_url(broker_url) as client:
        client.client_kill_filter(_type="normal", skipme=True)
        publisher.send(report(2))
        assert client.xlen(names.upstream_key("node1")) == 2


def test_many_threads_share_one_publisher(settings: Settings, broker_url: str) -> None:
    publisher = Publisher(settings)
    threads = [threading.Thread(target=lambda: [publisher.send(report(n)) for n in range(50)]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with redis.Redis.from_url(broker_url) as client:
        assert client.xlen(names.upstream_key("node1")) == 300
