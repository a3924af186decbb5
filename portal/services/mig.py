"""MIG as a workflow: plan a layout, see who is in its way, drain the card, have it cut, look, and give it back.

One open order per card. Its card gets no new work from the request to the end; jobs that hold it are waited for.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from uuid import UUID

from django.db import IntegrityError, transaction
from django.utils import timezone

from portal.hardware import mig
from portal.hardware.boards import Board
from portal.hardware.mig import Layout, Near, Wish
from portal.models import Gpu, HardwareOrder, Node, User
from portal.services import events, mig_boards, orders, scheduling, transitions
from portal.services.blockers import Blocker, blockers_of, slices_of, waits_for
from portal.services.errors import Problem, field_problem
from portal.services.retrying import on_deadlock
from wire.hardware import MigOrder, MigSlice
from wire.states import NodeState

ANSWER_WITHIN = timedelta(minutes=5)
SHOWN_WITHIN = timedelta(minutes=2)
State = HardwareOrder.State
Wanted = str | Iterable[str] | Mapping[str, int]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MigPlan:
    gpu: Gpu
    board: Board
    wish: Wish
    text: str
    layout: Layout
    kept: Layout
    destroyed: Layout
    created: Layout
    blockers: tuple[Blocker, ...]
    steps: tuple[str, ...]
    room: dict[str, int]  # what more would fit beside it, each profile by itself

    @property
    def changes(self) -> bool:
        return bool(self.destroyed or self.created) or self.gpu.mig_enabled != bool(self.layout)


def plan(gpu: Gpu, wanted: Wanted, *, viewer: User | None = None) -> MigPlan:
    """What would change and who is in the way. Raises Problem: not a card to cut, no layout, or an illegal one."""
    board = mig_boards.board_of(gpu)
    wish = wish_of(board, wanted)
    try:
        found = mig.plan(board, wish, mig_boards.existing(gpu))
    except mig.Illegal as illegal:
        raise illegal_layout(board, illegal) from illegal
    blockers = tuple(blockers_of(gpu, viewer))
    text, steps = mig.text_of(wish), steps_of(gpu, found, blockers)
    return MigPlan(
        gpu, board, wish, text, found.layout, found.kept, found.destroyed, found.created, blockers, steps,
        mig.room(board, found.layout),
    )  # fmt: skip


def apply(gpu: Gpu, layout: Wanted, *, actor: User | None) -> HardwareOrder:
    """From now on the card gets no new work; it is cut as soon as nobody holds it. The caller checks the right to."""
    planned = plan(gpu, layout)
    if not planned.changes:
        raise Problem(409, "no_change", f"GPU {gpu.index} of {gpu.node.name} is cut like this already.")
    order = HardwareOrder(node=gpu.node, gpu=gpu, kind=orders.MIG, requested_by=actor)
    pieces = [MigSlice(piece.profile, piece.start) for piece in planned.layout]
    order.order = orders.wire_form(MigOrder(id=str(order.pk), gpu_uuid=gpu.uuid, layout=pieces))
    order.message = waits_for(planned.blockers) if planned.blockers else "Nobody is in the way."
    try:
        with transaction.atomic():
            order.save(force_insert=True)
            drain(gpu, f"It is about to be {cut_words(planned.text)}.")
            message = f"GPU {gpu.index} is to be {cut_words(planned.text)}; it gets no new work until then."
            events.record("order.state", gpu=gpu, to_state=State.WAITING, message=message, actor=actor)
            transitions.tell(order)
            scheduling.wake()
    except IntegrityError as error:
        detail = f"GPU {gpu.index} of {gpu.node.name} is already being changed. Wait for that, or cancel it."
        raise Problem(409, "change_underway", detail) from error
    return order


def advance() -> int:
    """One look at every open change, each in a transaction of its own. -> how many took a step."""
    keys = HardwareOrder.objects.filter(kind=orders.MIG, finished_at=None).values_list("pk", flat=True)
    return sum(looked_at(key) for key in list(keys))


def open_orders(node: Node) -> list[HardwareOrder]:
    rows = HardwareOrder.objects.filter(node=node, kind=orders.MIG, finished_at=None)
    return list(rows.select_related("gpu", "requested_by"))


# --- helpers ----------------------------------------------------------------------------------------------------------


def wish_of(board: Board, wanted: Wanted) -> Wish:
    try:
        return mig.read(board, wanted)
    except mig.Unreadable as error:
        raise field_problem(400, "invalid_layout", "layout", str(error)) from error


def illegal_layout(board: Board, illegal: mig.Illegal) -> Problem:
    """The refusal names the nearest layouts that can be had, as fields for programs and in the sentence for people."""
    near = "; ".join(near_words(one) for one in illegal.nearest)
    detail = f"{board.name} cannot be cut like this: {illegal.reason} The nearest that can be: {near}."
    errors = [{"field": "layout", "message": illegal.reason}]
    errors += [{"field": "nearest", "message": one.text} for one in illegal.nearest]
    return Problem(422, "illegal_layout", detail, errors=errors)


def near_words(near: Near) -> str:
    return f"{near.text} ({near.change})"


def cut_words(text: str) -> str:
    return "given back whole, with MIG off" if text == "off" else f"cut into {text}"


def steps_of(gpu: Gpu, found: mig.Plan, blockers: tuple[Blocker, ...]) -> tuple[str, ...]:
    steps = [f"GPU {gpu.index} and its slices get no new work."]
    if blockers:
        steps.append(waits_for(blockers))
    if not gpu.mig_enabled and found.layout:
        steps.append("MIG is switched on; on cards before Hopper that needs a reset of the card.")
    steps += [f"{piece.profile} at slot {piece.start} is taken away." for piece in found.destroyed]
    steps += [f"{piece.profile} at slot {piece.start} is made." for piece in found.created]
    if not found.layout:
        steps.append("MIG is switched off.")
    steps.append(f"The card is listed anew; {'its slices get' if found.layout else 'it gets'} work again.")
    return tuple(steps)


def drain(gpu: Gpu, reason: str) -> None:
    Gpu.objects.filter(pk=gpu.pk).update(draining=reason[:200])
    Gpu.objects.filter(node=gpu.node_id, parent_uuid=gpu.uuid).update(draining=reason[:200])


# --- the steps of an open order ---------------------------------------------------------------------------------------


def looked_at(key: UUID) -> bool:
    """A change that cannot be followed must keep neither the others nor the scheduler from going on."""
    try:
        return on_deadlock(partial(advance_one, key))
    except Exception:
        log.exception("The change of slices %s could not be taken further; it is looked at again.", key)
        return False


@transaction.atomic
def advance_one(key: UUID) -> bool:
    rows = HardwareOrder.objects.select_for_update(of=("self",), skip_locked=True).select_related("gpu", "node")
    order = rows.filter(pk=key, finished_at=None).first()
    if order is None or order.gpu is None:
        return False
    match order.state:
        case State.WAITING:
            return send_if_free(order, order.gpu)
        case State.SENT | State.RUNNING:
            return note_silence(order)
        case State.DONE:
            return finish_if_shown(order, order.gpu)
        case _:
            return finish(order, order.gpu, order.message)


def send_if_free(order: HardwareOrder, gpu: Gpu) -> bool:
    """A start locks the node's row too, so no job can take the card between the look and the sending."""
    node = Node.objects.select_for_update().get(pk=order.node_id)
    blockers = blockers_of(gpu)
    if blockers:
        return orders.note(order, waits_for(blockers))
    if node.state != NodeState.READY:
        return orders.note(order, f"Waits for {node.name}, which is {node.state}.")
    orders.send(order, f"Nothing runs on GPU {gpu.index} any more; {node.name} is told to change it.")
    return True


def note_silence(order: HardwareOrder) -> bool:
    if order.sent_at is None or timezone.now() - order.sent_at < ANSWER_WITHIN:
        return False
    since = f"{order.sent_at:%H:%M:%S} UTC"
    return orders.note(order, f"{order.node.name} was told at {since} and has not said how it went. It is asked on.")


def finish_if_shown(order: HardwareOrder, gpu: Gpu) -> bool:
    """What is offered comes from the inventory, so the end is what the inventory shows."""
    wanted = Counter(piece["profile"] for piece in order.order["layout"])
    gpu.refresh_from_db(fields=["mig_enabled"])
    shown = Counter(piece.mig_profile for piece in slices_of(gpu))
    if shown == wanted and gpu.mig_enabled == bool(wanted):
        return finish(order, gpu, f"GPU {gpu.index} is {cut_words(mig.text_of(wanted.elements()))}.")
    late = order.answered_at is not None and timezone.now() - order.answered_at > SHOWN_WITHIN
    if not late or order.node.state != NodeState.READY:
        return False
    found = mig.text_of(shown.elements()) if shown else "no slices"
    message = f"{order.node.name} said that it was done, but its inventory shows {found}."
    transitions.move(order, State.FAILED, message=message)
    return finish(order, gpu, message)


def finish(order: HardwareOrder, gpu: Gpu, message: str) -> bool:
    orders.note(order, message)
    HardwareOrder.objects.filter(pk=order.pk).update(finished_at=timezone.now())
    events.record("order.finished", gpu=gpu, to_state=order.state, message=message)
    orders.resume(order)
    transitions.tell(order)
    return True
