"""Orders to a node about its hardware: given, taken back, answered. `desired.orders_for` is what the node reads."""

from typing import Any
from uuid import UUID

import msgspec
from django.db import transaction
from django.utils import timezone

from portal.models import Gpu, HardwareOrder, Node, User
from portal.services import desired, events, scheduling, transitions
from portal.services.errors import Problem, field_problem
from portal.services.text import storable
from wire.hardware import Order, OrderResult, ReleaseOrder, StopForeignOrder

State = HardwareOrder.State
ANSWERS = {"running": State.RUNNING, "done": State.DONE, "failed": State.FAILED, "undone": State.UNDONE}
MIG, RELEASE, STOP_FOREIGN = "mig", "release", "stop_foreign"
RELEASE_MOST_S = 3600.0
SAME_PROCESS_WITHIN_S = 2.0


@transaction.atomic
def result(node: Node, report: OrderResult) -> bool:
    """What the node says of an order. A repeat, or an answer to what nobody waits for, changes nothing."""
    state = ANSWERS.get(report.state)
    if state is None or not desired.is_uuid(report.id):
        return False
    order = locked(UUID(report.id), node)
    if order is None or order.state not in desired.WITH_THE_NODE or order.state == state:
        return False
    now, message = timezone.now(), storable(report.message, 400)
    times: dict[str, Any] = {}
    if state != State.RUNNING:
        # A change of slices is over only when the inventory shows it: mig.advance sees to that.
        times = {"answered_at": now} if order.kind == MIG else {"answered_at": now, "finished_at": now}
    note(order, message or said(order, state))
    transitions.move(order, state, message=order.message, **times)
    if state != State.RUNNING:
        desired.change([order.node])
        scheduling.wake()
    return True


def release_driver(node: Node, duration_s: float, *, actor: User | None = None) -> HardwareOrder:
    """The node lets go of the vendor's library for a while: a reset or a change of the driver's mode can go on."""
    if not 1.0 <= duration_s <= RELEASE_MOST_S:
        raise field_problem(422, "invalid_duration", "seconds", f"between 1 and {RELEASE_MOST_S:.0f} seconds.")
    message = f"The GPUs of {node.name} are not read for {duration_s:.0f} s, so that their driver can be worked on."
    order = HardwareOrder(node=node, kind=RELEASE, requested_by=actor)
    return given(order, ReleaseOrder(id=str(order.pk), duration_s=duration_s), message)


@transaction.atomic
def stop_foreign(
    gpu: Gpu, pid: int, start_time: float, *, grace_s: float = 30.0, actor: User | None = None
) -> HardwareOrder:
    """End a process that no attempt explains. An order for the same process that is still open serves again."""
    Gpu.objects.select_for_update().get(pk=gpu.pk)
    for order in HardwareOrder.objects.filter(gpu=gpu, kind=STOP_FOREIGN, finished_at=None):
        if order.order["pid"] == pid and abs(order.order["start_time"] - start_time) <= SAME_PROCESS_WITHIN_S:
            return order
    order = HardwareOrder(node=gpu.node, gpu=gpu, kind=STOP_FOREIGN, requested_by=actor)
    wish = StopForeignOrder(id=str(order.pk), gpu_uuid=gpu.uuid, pid=pid, start_time=start_time, grace_s=grace_s)
    return given(order, wish, f"Process {pid} on GPU {gpu.index} is ended: no job explains it.")


@transaction.atomic
def cancel(order: HardwareOrder, *, actor: User | None = None) -> HardwareOrder:
    """Only while it waits: what the node was given may be done already."""
    row = locked(order.pk, order.node)
    if row is None or row.state == State.CANCELLED:
        return row or order
    if row.state != State.WAITING:
        detail = f"This order is {row.state} and cannot be cancelled any more. Plan another layout once it is over."
        raise Problem(409, "order_underway", detail)
    note(row, "Cancelled; nothing was changed.")
    transitions.move(row, State.CANCELLED, message=row.message, actor=actor, finished_at=timezone.now())
    resume(row)
    return row


def send(order: HardwareOrder, message: str) -> None:
    """In a transaction: from now on it stands in the node's desired state."""
    note(order, message)
    transitions.move(order, State.SENT, message=message, sent_at=timezone.now())
    desired.change([order.node])


def resume(order: HardwareOrder) -> None:
    """In a transaction: the card of an order, and its slices, may get work again."""
    gpu = order.gpu
    if gpu is None:
        return
    Gpu.objects.filter(node=order.node, parent_uuid=gpu.uuid).update(draining="")
    if Gpu.objects.filter(pk=gpu.pk).exclude(draining="").update(draining=""):
        events.record("gpu.resumed", gpu=gpu, message=f"GPU {gpu.index} gets work again.")
    scheduling.wake()


def note(order: HardwareOrder, message: str) -> bool:
    """What is shown with the order. -> whether it is something new."""
    if order.message == storable(message, 400):
        return False
    order.message = storable(message, 400)
    HardwareOrder.objects.filter(pk=order.pk).update(message=order.message)
    return True


def wire_form(order: Order) -> Any:
    return msgspec.to_builtins(order)


# --- helpers ----------------------------------------------------------------------------------------------------------


def locked(key: UUID, node: Node) -> HardwareOrder | None:
    rows = HardwareOrder.objects.select_for_update(of=("self",)).select_related("gpu", "node")
    return rows.filter(pk=key, node=node).first()


@transaction.atomic
def given(order: HardwareOrder, wish: Order, message: str) -> HardwareOrder:
    """Nothing has to be waited for: the node is told at once."""
    order.order = wire_form(wish)
    order.save(force_insert=True)
    send(order, message)
    return order


def said(order: HardwareOrder, state: HardwareOrder.State) -> str:
    return {
        State.RUNNING: f"{order.node.name} is at it.",
        State.DONE: f"{order.node.name} has carried it out.",
        State.FAILED: f"{order.node.name} could not carry it out.",
        State.UNDONE: f"{order.node.name} could not carry it out; what was before is back.",
    }[state]
