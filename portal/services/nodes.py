"""Machines: how they join, what they report, and what is known of their contact."""

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from portal.models import Node, Share, User
from portal.services import broker, broker_users, events, gpus, health, keys, scheduling, transitions
from portal.services.desired import ENDED
from portal.services.errors import Problem, field_problem
from portal.services.text import storable
from wire.names import NODE_NAME, PROTOCOL
from wire.reports import Heartbeat, Inventory
from wire.states import NodeState

KEY_HEX_LENGTH = 64


def enroll(name: str, public_key_hex: str, *, replace: bool = False) -> dict[str, object]:
    """-> what the node must know. The broker's password in it is a new one each time and cannot be read again."""
    key = checked_key(name, public_key_hex)
    password = secrets.token_urlsafe(32)
    fields = {"public_key": key, "broker_password_sha256": hashlib.sha256(password.encode()).hexdigest()}
    with transaction.atomic():
        node = Node.objects.select_for_update().filter(name=name).first()
        if node is not None and bytes(node.public_key) != key and not replace:
            detail = f"A node {name} is already enrolled with another key. Give another name, or --replace its key."
            raise Problem(409, "node_exists", detail)
        node, made = Node.objects.update_or_create(name=name, defaults=fields)
        events.record("node.enrolled" if made else "node.replaced", node=node, to_state=str(node.state))
    broker_users.assert_user(broker.client(), node)
    return {
        "node": name,
        "portal_public_key": keys.public_key_hex(),
        "broker_url": broker_url(broker_users.user_of(node), password),
        "protocol": PROTOCOL,
    }


@transaction.atomic
def heartbeat(node: Node, beat: Heartbeat) -> None:
    """The portal's clock says when it was heard; the node's own times are only shown."""
    node.refresh_from_db(from_queryset=Node.objects.select_for_update())  # a sweep may be judging it right now
    note_reboot(node, beat.boot_id)
    went_back_to = note_clone(node, beat)
    note_strangers(node, beat)
    heard = {
        "last_heartbeat_at": timezone.now(),
        "heartbeat": msgspec.to_builtins(beat) | {"went_back_to": went_back_to},
        "boot_id": storable(beat.boot_id, 64),
        "echo_nonce": storable(beat.nonce, 64),
    }
    if node.state == NodeState.READY:
        Node.objects.filter(pk=node.pk).update(**heard)
        return
    silent = node.last_heartbeat_at
    message = "First contact." if silent is None else f"In contact again; last heard of at {at(silent)}."
    transitions.move(node, NodeState.READY, message=message, **heard)
    scheduling.wake()


@transaction.atomic
def inventory(node: Node, report: Inventory) -> None:
    Node.objects.filter(pk=node.pk).update(
        inventory_digest=storable(report.digest, 64),
        hostname=storable(report.hostname, 253),
        agent_version=storable(report.agent_version, 40),
        driver=storable(report.driver or "", 40),
        cuda=storable(report.cuda or "", 20),
        cpu_count=report.cpu_count,
        memory_total_bytes=report.memory_total_bytes,
        links=[[link.a, link.b, link.kind] for link in report.links],
        nvswitch=report.nvswitch,
        simulated=report.simulated,
        problem=storable(report.problem or "", 400),
    )
    if report.problem and report.problem != node.problem:
        events.record("node.problem", node=node, message=report.problem)
    gpus.reported(node, report.gpus)
    if not report.problem:
        health.driver_works(node)
    scheduling.wake()


def sweep(listening_since: datetime | None = None) -> int:
    """Nodes that have been silent for too long. Nothing of theirs is stopped. -> how many changed.

    `listening_since`: while the portal itself was not there, silence proves nothing.
    """
    now, changed = timezone.now(), 0
    for node in Node.objects.filter(state__in=[NodeState.READY, NodeState.SUSPECT]):
        heard = max(filter(None, (node.last_heartbeat_at, listening_since)), default=node.state_since)
        state = contact(now - heard)
        if state not in (NodeState.READY, node.state):
            changed += note_silence(node, state)
    return changed + health.watch_disks()


def assert_broker_users() -> int:
    """Make the nodes' broker accounts if the broker does not know them (any more). -> how many were made."""
    return broker_users.WATCH.look()


@transaction.atomic
def set_schedulable(node: Node, schedulable: bool, *, reason: str = "", actor: User | None = None) -> None:
    """Whether it may get new work. What runs there goes on and is watched to its end either way."""
    reason = "" if schedulable else storable(reason, 200)
    changed = Node.objects.filter(pk=node.pk).exclude(schedulable=schedulable, cordon_reason=reason)
    if not changed.update(schedulable=schedulable, cordon_reason=reason):
        return
    kind = "node.uncordoned" if schedulable else "node.cordoned"
    events.record(kind, node=node, message=reason, actor=actor)
    scheduling.wake()


# --- helpers ----------------------------------------------------------------------------------------------------------


def checked_key(name: str, public_key_hex: str) -> bytes:
    if not NODE_NAME.fullmatch(name):
        message = f"{name[:70]!r} is not a node name: a-z, 0-9, dots and dashes, at most 63 characters."
        raise field_problem(400, "invalid", "name", message)
    try:
        key = bytes.fromhex(public_key_hex.strip())
    except ValueError:
        key = b""
    if len(key) * 2 != KEY_HEX_LENGTH:
        message = f"the public key is {KEY_HEX_LENGTH} hexadecimal digits, as `python -m workers.join` prints it."
        raise field_problem(400, "invalid", "public_key", message)
    return key


def broker_url(user: str, password: str) -> str:
    """The address that nodes are told, with this node's own account in it."""
    parts = urlsplit(settings.NODE_REDIS_URL)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user)}:{quote(password)}@{place}"))


def note_reboot(node: Node, boot_id: str) -> None:
    if node.boot_id and node.boot_id != storable(boot_id, 64):
        events.record("node.rebooted", node=node, message=f"{node.name} was started anew.")


def note_clone(node: Node, beat: Heartbeat) -> float | None:
    """Twice an elder worker spoke after a younger one with its key: both are alive, and neither gets new work.

    Once may be a restart after the clock was set back. -> when the elder one was started, to be kept until then.
    """
    before, elder = node.heartbeat.get("started_at"), node.heartbeat.get("went_back_to")
    if before is None or beat.started_at >= before:
        return elder
    if elder == beat.started_at and node.schedulable:
        fence_clones(node, beat.started_at, before)
    return beat.started_at


def fence_clones(node: Node, elder: float, younger: float) -> None:
    message = (
        f"Two workers report as {node.name}, started at {clock(elder)} and {clock(younger)}. "
        "End one of them, or enrol it under a name and key of its own, then uncordon the node."
    )
    events.record("node.cloned", node=node, message=message)
    set_schedulable(node, False, reason=message)


def note_strangers(node: Node, beat: Heartbeat) -> None:
    """An attempt that the database does not know runs on: it is shown, never killed on first sight."""
    before = set(node.heartbeat.get("attempts", []))
    fresh = [attempt for attempt in beat.attempts if attempt not in before]
    if not fresh:
        return
    running = Share.objects.filter(node=node).exclude(state__in=ENDED)
    known = {str(attempt_id) for attempt_id in running.values_list("attempt_id", flat=True)}
    for attempt in fresh:
        if attempt not in known:
            message = f"{node.name} runs attempt {attempt[:40]}, which is not known as running. It is left alone."
            events.record("node.quarantined", node=node, message=message)


def contact(silence: timedelta) -> NodeState:
    if silence.total_seconds() >= settings.NODE_UNREACHABLE_AFTER_S:
        return NodeState.UNREACHABLE
    return NodeState.SUSPECT if silence.total_seconds() >= settings.NODE_SUSPECT_AFTER_S else NodeState.READY


def note_silence(node: Node, state: NodeState) -> int:
    since = f"No contact since {at(node.last_heartbeat_at)}." if node.last_heartbeat_at else "Never heard of."
    after = " It gets no new work; what runs there is left alone." if state == NodeState.UNREACHABLE else ""
    try:
        return int(transitions.move(node, state, message=since + after))
    except transitions.Conflict:
        return 0  # it was heard of in the meantime


def clock(at_s: float) -> str:
    try:
        return at(datetime.fromtimestamp(at_s, UTC))
    except (ValueError, OverflowError, OSError):
        return "an impossible time"


def at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
