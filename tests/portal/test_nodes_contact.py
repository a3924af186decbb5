"""Machines: enrolment with a real broker account, inventory, heartbeats and silence."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.utils import timezone

from portal.models import Allocation, Event, Gpu, Node
from portal.services import broker_users, nodes
from portal.services.errors import Problem
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import node_named, started
from wire.names import desired_key, hint_queue, upstream_key
from wire.reports import GpuInfo, Heartbeat, Inventory, Link
from wire.signing import new_private_key, public_key_of

KEY = public_key_of(new_private_key()).hex()


def beat(node: Node, **fields: Any) -> None:
    given = {"boot_id": "boot-1", "nonce": "n", "serial": 0, "at": 0.0, "started_at": 0.0} | fields
    nodes.heartbeat(node, Heartbeat(**given))


def cards(*uuids: str, **fields: Any) -> list[GpuInfo]:
    named = {"vendor": "nvidia", "name": "NVIDIA H100 80GB HBM3"} | fields
    return [GpuInfo(uuid=uuid, index=index, **named) for index, uuid in enumerate(uuids)]


def listed(node: Node, gpus: list[GpuInfo], **fields: Any) -> None:
    nodes.inventory(
        node, Inventory(digest="d2", boot_id="boot-1", hostname="h", agent_version="1", gpus=gpus, **fields)
    )


def kinds(node: Node) -> list[str]:
    return list(Event.objects.filter(node=node).values_list("kind", flat=True))


# --- enrolment --------------------------------------------------------------------------------------------------------


def test_an_enrolled_node_gets_an_account_for_its_own_keys_and_nothing_else(db: None, broker_url: str) -> None:
    known = nodes.enroll("n1", KEY)
    nodes.enroll("n10", KEY)
    own = redis.Redis.from_url(str(known["broker_url"]))
    own.xadd(upstream_key("n1"), {"m": b"x"})
    assert own.get(desired_key("n1")) is None and own.llen(hint_queue("n1")) == 0 and own.ping()
    refused: list[Callable[[], Any]] = [
        lambda: own.xadd(upstream_key("n10"), {"m": b"x"}),
        lambda: own.get(desired_key("n10")),
        lambda: own.get("session"),
        lambda: own.set(desired_key("n1"), b"x"),
        lambda: own.xrange(upstream_key("n1")),
        lambda: own.lpush(hint_queue("n1"), b"x"),
        lambda: own.llen(hint_queue("n10")),
        lambda: own.publish("live.cluster", "x"),
        lambda: own.execute_command("KEYS", "*"),
        lambda: own.execute_command("CONFIG", "GET", "*"),
        lambda: own.execute_command("ACL", "LIST"),
        lambda: own.execute_command("EVAL", "return 1", 0),
        own.flushall,
    ]
    for act in refused:
        with pytest.raises(redis.exceptions.NoPermissionError):
            act()


def test_a_name_is_taken_by_another_key_unless_it_is_replaced(db: None, broker_url: str) -> None:
    first = account(nodes.enroll("n1", KEY))
    other = public_key_of(new_private_key())
    with pytest.raises(Problem, match="already enrolled with another key"):
        nodes.enroll("n1", other.hex())
    assert first().ping()
    again = account(nodes.enroll("n1", KEY))
    assert again().ping(), "the same key may ask again, for a new password"
    new = account(nodes.enroll("n1", other.hex(), replace=True))
    assert new().ping() and bytes(node_named("n1").public_key) == other
    for old in (first, again):
        with pytest.raises(redis.exceptions.AuthenticationError):
            old().ping()


def account(known: dict[str, object]) -> Callable[[], redis.Redis]:
    return lambda: redis.Redis.from_url(str(known["broker_url"]))


@pytest.mark.parametrize(("name", "key"), [("N1", KEY), ("", KEY), ("a b", KEY), ("n1{x}", KEY), ("x" * 64, KEY),
                                           ("n1", "zz"), ("n1", KEY[:-2])])  # fmt: skip
def test_a_bad_name_or_key_is_refused(db: None, name: str, key: str) -> None:
    with pytest.raises(Problem) as caught:
        nodes.enroll(name, key)
    assert caught.value.status == 400 and not Node.objects.exists()


def test_accounts_come_back_after_the_broker_forgot_them_and_strangers_go(
    db: None, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = nodes.enroll("n1", KEY)
    admin = redis.Redis.from_url(broker_url)
    admin.acl_deluser("node.n1")
    admin.execute_command("ACL", "SETUSER", "node.gone", "on", "nopass")
    monkeypatch.setattr(broker_users, "WATCH", broker_users.Watch())
    assert nodes.assert_broker_users() == 1
    assert redis.Redis.from_url(str(known["broker_url"])).ping()
    assert "node.gone" not in admin.acl_users()
    assert nodes.assert_broker_users() == 0, "nothing to do until the broker restarts"


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_the_first_heartbeat_makes_a_node_ready(db: None) -> None:
    node = make_node()
    Node.objects.update(state="joining", last_heartbeat_at=None)
    beat(node_named("n1"), nonce="abc")
    node.refresh_from_db()
    assert (node.state, node.echo_nonce) == ("ready", "abc") and node.last_heartbeat_at is not None


def test_silence_is_told_in_steps_and_stops_nothing(cast: Cast, settings: Any) -> None:
    node = make_node()
    attempt = started(cast.bob)
    for seconds, state in ((1, "ready"), (20, "suspect"), (20, "suspect"), (40, "unreachable"), (50, "unreachable")):
        Node.objects.update(last_heartbeat_at=timezone.now() - timedelta(seconds=seconds))
        nodes.sweep()
        node.refresh_from_db()
        assert node.state == state
    assert kinds(node).count("node.state") == 2
    attempt.job.refresh_from_db()
    assert attempt.job.state == "starting" and Allocation.objects.filter(released_at=None).count() == 1
    beat(node)
    assert "In contact again" in Event.objects.filter(node=node).latest("id").message


def test_while_the_portal_was_away_silence_proves_nothing(db: None) -> None:
    make_node()
    Node.objects.update(last_heartbeat_at=timezone.now() - timedelta(hours=1))
    assert nodes.sweep(listening_since=timezone.now()) == 0
    assert nodes.sweep(listening_since=timezone.now() - timedelta(minutes=1)) == 1


def test_a_reboot_and_an_unknown_attempt_are_shown_once(db: None) -> None:
    node = make_node()
    stranger = "11111111-1111-1111-1111-111111111111"
    for _ in range(2):
        beat(node_named("n1"), boot_id="boot-2", attempts=[stranger])
    assert kinds(node).count("node.rebooted") == 1 and kinds(node).count("node.quarantined") == 1


# --- inventory --------------------------------------------------------------------------------------------------------


def test_an_inventory_brings_cards_links_and_facts(db: None) -> None:
    node = make_node(gpus=0)
    listed(
        node,
        cards("GPU-a", "GPU-b", memory_total_bytes=85 * 10**9),
        links=[Link("GPU-a", "GPU-b", "NV18")],
        driver="560",
    )
    node.refresh_from_db()
    gpu = Gpu.objects.get(uuid="GPU-a")
    assert (gpu.model, gpu.memory_total_bytes, gpu.power_limit_mw, gpu.pci_bus_id) == ("H100", 85 * 10**9, None, "")
    assert (node.links, node.driver, node.inventory_digest) == ([["GPU-a", "GPU-b", "NV18"]], "560", "d2")


def test_a_card_that_vanishes_is_lost_not_deleted_and_may_come_back(db: None) -> None:
    node = make_node(gpus=0)
    listed(node, cards("GPU-a", "GPU-b"))
    listed(node, cards("GPU-a"))
    gone = Gpu.objects.get(uuid="GPU-b")
    assert (gone.present, gone.state) == (False, "lost")
    listed(node, cards("GPU-a", "GPU-b"))
    gone.refresh_from_db()
    assert (gone.present, gone.state, gone.state_reason) == (True, "ok", "")
    assert kinds(node).count("gpu.missing") == 1 and kinds(node).count("gpu.found") == 3


def test_a_card_that_moved_to_another_machine_keeps_its_row(db: None) -> None:
    one, two = make_node("n1", gpus=0), make_node("n2", gpus=0)
    listed(one, cards("GPU-a"))
    listed(two, cards("GPU-a"))
    gpu = Gpu.objects.get()
    assert (gpu.node, gpu.present) == (two, True) and "gpu.moved" in kinds(two)
    listed(one, [])
    gpu.refresh_from_db()
    assert (gpu.node, gpu.present) == (two, True)


def test_a_reported_problem_is_an_event_once(db: None) -> None:
    node = make_node(gpus=0)
    for _ in range(2):
        listed(node_named("n1"), [], problem="NVML did not start: install the driver.")
    assert kinds(node).count("node.problem") == 1
