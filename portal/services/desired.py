"""What a node is to do, read from the database, signed, and laid where the node looks."""

import base64
from datetime import timedelta
from functools import partial
from uuid import UUID

import msgspec
from django.db import transaction
from django.db.models import F, Q, Value
from django.db.models.functions import Greatest
from django.utils import timezone

from portal.celery import sender
from portal.models import HardwareOrder, LogStream, Node, Share
from portal.services import broker, keys
from wire.desired import Acknowledged, Desired, HintBody, Launch, Stop
from wire.hardware import Order
from wire.names import HINT_TASK, desired_key, hint_queue
from wire.signing import Action
from wire.states import ATTEMPT_ENDED, NodeState

FORGET_IS_SAID_FOR = timedelta(minutes=10)
DESIRED_LIFETIME_S = 3600
WITH_THE_NODE = (HardwareOrder.State.SENT, HardwareOrder.State.RUNNING)
ENDED = [state.value for state in ATTEMPT_ENDED]


def bump(node: Node) -> None:
    """In the transaction that changes the order: the snapshot after it is newer than every one before.

    The clock is in it so that a database restored from an old backup does not begin to be refused as out of date.
    """
    now_ms = int(timezone.now().timestamp() * 1000)
    Node.objects.filter(pk=node.pk).update(desired_serial=Greatest(F("desired_serial") + 1, Value(now_ms)))


def change(nodes: list[Node]) -> None:
    """The order for these nodes changes in this transaction; once it is committed they are told."""
    for node in sorted(nodes, key=lambda node: node.name):  # one order for all: row locks do not cross
        bump(node)
        transaction.on_commit(partial(announce, node), robust=True)


def announce(node: Node) -> None:
    publish(node)
    hint(node)


def publish(node: Node) -> bool:
    """-> whether it was laid down. Never raises because of the broker."""
    desired = compose(node)
    sealed = keys.signer().seal(desired, audience=node.name, action=Action.DESIRED, epoch=desired.serial)
    lay = partial(broker.client().set, desired_key(node.name), sealed, ex=DESIRED_LIFETIME_S)
    return broker.attempt(f"the order for {node.name}", lay)


def publish_all() -> int:
    """Every order anew: whatever was lost on the way is made up for here. -> how many were laid down."""
    return sum(publish(node) for node in Node.objects.order_by("name"))


def hint(node: Node) -> bool:
    """«Look now». A node that has been silent for long gets none: it looks when it comes back."""
    if node.state == NodeState.UNREACHABLE:
        return False
    body = HintBody(serial=node.desired_serial)
    sealed = keys.signer().seal(body, audience=node.name, action=Action.HINT, epoch=body.serial)
    argument = base64.b64encode(sealed).decode()
    send = partial(sender.send_task, HINT_TASK, [argument], queue=hint_queue(node.name), retry=False)
    return broker.attempt(f"a hint to {node.name}", send)


def compose(node: Node) -> Desired:
    """Four queries. The serial is read first, so that the content is never older than its serial says."""
    node.refresh_from_db(fields=["desired_serial", "inventory_digest", "echo_nonce", "heartbeat", "state"])
    shares = list(Share.objects.filter(node=node).filter(spoken_of(node)).order_by("pk"))
    open_shares = [share for share in shares if share.forgotten_at is None]
    running = [share for share in open_shares if share.state not in ENDED]
    return Desired(
        node=node.name,
        serial=node.desired_serial,
        # A stop of something that the node never saw needs the launch beside it: only the node can answer for it.
        launches=[msgspec.convert(share.launch, Launch) for share in running],
        stops=[stop_of(share) for share in running if share.stop_requested_at is not None],
        acknowledged=acknowledgements(open_shares),
        forget=[str(share.attempt_id) for share in shares if share.forgotten_at is not None],
        orders=orders_for(node),
        inventory_digest=node.inventory_digest,
        echo=node.echo_nonce,
    )


def orders_for(node: Node) -> list[Order]:
    """About its hardware: what it was given and has not answered to the end."""
    rows = HardwareOrder.objects.filter(node=node, state__in=WITH_THE_NODE).order_by("requested_at")
    return [msgspec.convert(order, Order) for order in rows.values_list("order", flat=True)]


def spoken_of(node: Node) -> Q:
    """Shares that are not over; and to be forgotten for a while, and for as long as the node still speaks of them."""
    listed = [text for text in node.heartbeat.get("attempts", []) if is_uuid(text)]
    recent = timezone.now() - FORGET_IS_SAID_FOR
    return Q(forgotten_at=None) | Q(forgotten_at__gt=recent) | Q(attempt_id__in=listed)


def stop_of(share: Share) -> Stop:
    launch = share.launch
    return Stop(attempt=launch["attempt"], job=launch["job"], epoch=launch["epoch"], grace_s=launch["stop_grace_s"])


def acknowledgements(shares: list[Share]) -> dict[str, Acknowledged]:
    offsets: dict[object, dict[str, int]] = {}
    begun = [share.attempt_id for share in shares if share.event_seq]  # no log comes before the first event
    streams = LogStream.objects.filter(attempt__in=begun)
    for attempt_id, name, size_bytes in streams.values_list("attempt_id", "name", "size_bytes"):
        offsets.setdefault(attempt_id, {})[name] = size_bytes
    return {
        str(share.attempt_id): Acknowledged(event_seq=share.event_seq, log_offsets=offsets.get(share.attempt_id, {}))
        for share in shares
    }


def is_uuid(text: object) -> bool:
    try:
        msgspec.convert(text, UUID)
    except msgspec.ValidationError:
        return False
    return True
