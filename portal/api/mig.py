"""MIG: how cards are cut, what they could be cut into, and changing it."""

from datetime import datetime
from typing import Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import ConfigDict, Field

from portal.api.auth import user_of
from portal.api.requests import allow_only
from portal.hardware import mig as tables
from portal.hardware.boards import Board
from portal.hardware.mig import Slice
from portal.models import Gpu, HardwareOrder, Job, Node, User
from portal.services import access, mig, mig_boards, orders
from portal.services.blockers import Blocker
from portal.services.errors import Problem, field_problem

router = Router()
MIB = 1024**2


class ProfileOut(Schema):
    """A kind of slice. `starts` are the memory slots where it may begin, `size` how many it takes."""

    name: str
    compute_slices: int
    memory_bytes: int
    most: int
    size: int
    starts: list[int]


class SliceOut(Schema):
    uuid: str | None
    profile: str
    start: int
    size: int


class OrderOut(Schema):
    """A change of a card: waiting, sent, running, done, failed, undone or cancelled; over once `finished_at` is set."""

    id: UUID
    gpu: str | None
    layout: str
    state: str
    message: str | None
    requested_by: str | None
    requested_at: datetime
    finished_at: datetime | None


class CardOut(Schema):
    uuid: str
    index: int
    name: str
    board: str
    enabled: bool
    after_reset: bool | None
    draining: str | None
    layout: str
    compute_slices: int
    memory_slots: int
    slices: list[SliceOut]
    profiles: list[ProfileOut]
    presets: dict[str, str]
    order: OrderOut | None


class NodeMig(Schema):
    node: str
    gpus: list[CardOut]


class MigIn(Schema):
    """`layout`: "3 × 2g.20gb + 1g.10gb", a list of profiles, counts by profile, a preset (all-1g.10gb), or off."""

    model_config = ConfigDict(extra="forbid")

    gpu: str = Field(max_length=80)
    layout: str | list[str] | dict[str, int]


class CancelIn(Schema):
    model_config = ConfigDict(extra="forbid")

    order: UUID


class PlannedSlice(Schema):
    profile: str
    start: int
    change: Literal["kept", "created", "destroyed"]


class BlockerOut(Schema):
    """Who holds the card or a slice of it. The job is named only to those who may see it."""

    owner: str
    since: datetime | None
    slice_uuid: str | None
    job: int | None
    job_name: str | None
    process: int | None
    command: str | None


class PlanOut(Schema):
    gpu: str
    board: str
    layout: str
    changes: bool
    slices: list[PlannedSlice]
    blockers: list[BlockerOut]
    steps: list[str]
    room: dict[str, int]


@router.get("/{name}/mig", response=NodeMig, url_name="node_mig", summary="How the cards of a node are cut")
def node_mig(request: HttpRequest, name: str) -> NodeMig:
    allow_only(request)
    node = access.get_node(user_of(request), name)
    open_orders = {order.gpu_id: order for order in mig.open_orders(node)}
    cards = node.gpus.present().filter(mig_profile="").select_related("node").order_by("index", "uuid")
    found = [(gpu, board) for gpu in cards if (board := mig_boards.find_board(gpu)) is not None]
    return NodeMig(node=node.name, gpus=[card_out(gpu, board, open_orders.get(gpu.pk)) for gpu, board in found])


@router.post("/{name}/mig/plan", response=PlanOut, url_name="mig_plan", summary="What a layout would change")
def plan(request: HttpRequest, name: str, body: MigIn) -> PlanOut:
    """Changes nothing. A layout that the card cannot have answers 422 with the nearest that it can."""
    allow_only(request)
    user = user_of(request)
    return plan_out(mig.plan(card_of(user, name, body.gpu), body.layout, viewer=user))


@router.post("/{name}/mig/apply", response={202: OrderOut}, url_name="mig_apply", summary="Cut a card")
def apply(request: HttpRequest, name: str, body: MigIn) -> Status:
    """For administrators. The card gets no new work, is cut once nobody holds it, and then given back."""
    allow_only(request)
    user = user_of(request)
    access.require_admin(user)
    return Status(202, order_out(mig.apply(card_of(user, name, body.gpu), body.layout, actor=user)))


@router.get("/{name}/mig/orders/{order_id}", response=OrderOut, url_name="mig_order", summary="How a change stands")
def get_order(request: HttpRequest, name: str, order_id: UUID) -> OrderOut:
    allow_only(request)
    return order_out(order_of(access.get_node(user_of(request), name), order_id))


@router.post("/{name}/mig/cancel", response=OrderOut, url_name="mig_cancel", summary="Take a waiting change back")
def cancel(request: HttpRequest, name: str, body: CancelIn) -> OrderOut:
    """For administrators, and only until the node was told."""
    allow_only(request)
    user = user_of(request)
    access.require_admin(user)
    return order_out(orders.cancel(order_of(access.get_node(user, name), body.order), actor=user))


# --- helpers ----------------------------------------------------------------------------------------------------------


def card_of(user: User, name: str, uuid: str) -> Gpu:
    node = access.get_node(user, name)
    gpu = node.gpus.present().select_related("node").filter(uuid=uuid).first() if "\x00" not in uuid else None
    if gpu is None:
        raise field_problem(422, "unknown_gpu", "gpu", f"{node.name} has no GPU of this UUID; GET /nodes/{name}/mig.")
    return gpu


def order_of(node: Node, order_id: UUID) -> HardwareOrder:
    rows = HardwareOrder.objects.select_related("gpu", "node", "requested_by")
    order = rows.filter(pk=order_id, node=node, kind=orders.MIG).first()
    if order is None:
        raise Problem(404, "not_found", f"There is no such change of a card of {node.name}.")
    return order


def card_out(gpu: Gpu, board: Board, order: HardwareOrder | None) -> CardOut:
    status = mig_boards.told(gpu)
    return CardOut(
        uuid=gpu.uuid, index=gpu.index, name=gpu.name, board=board.name, enabled=gpu.mig_enabled,
        after_reset=status.get("pending"), draining=gpu.draining or None,
        layout=tables.text_of(tables.in_order(board, [one["profile"] for one in status.get("instances") or []])),
        compute_slices=board.slices, memory_slots=board.slots,
        slices=[SliceOut(**one) for one in status.get("instances") or []],
        profiles=[
            ProfileOut(name=one.name, compute_slices=one.slices, memory_bytes=one.memory_mib * MIB, most=one.most,
                       size=one.size, starts=list(one.starts))
            for one in board.profiles
        ],
        presets={name: tables.text_of(wish) for name, wish in tables.presets(board).items()},
        order=order_out(order) if order else None,
    )  # fmt: skip


def plan_out(planned: mig.MigPlan) -> PlanOut:
    parts: dict[Literal["kept", "created", "destroyed"], tuple[Slice, ...]] = {
        "kept": planned.kept, "created": planned.created, "destroyed": planned.destroyed,
    }  # fmt: skip
    return PlanOut(
        gpu=planned.gpu.uuid, board=planned.board.name, layout=planned.text, changes=planned.changes,
        slices=[
            PlannedSlice(profile=one.profile, start=one.start, change=change)
            for change, pieces in parts.items() for one in pieces
        ],
        blockers=[blocker_out(one) for one in planned.blockers], steps=list(planned.steps), room=planned.room,
    )  # fmt: skip


def blocker_out(one: Blocker) -> BlockerOut:
    job: Job | None = one.job
    return BlockerOut(
        owner=one.owner, since=one.since, slice_uuid=one.slice_uuid, job=job.pk if job else None,
        job_name=job.name if job else None, process=one.process, command=one.command,
    )  # fmt: skip


def order_out(order: HardwareOrder) -> OrderOut:
    return OrderOut(
        id=order.pk, gpu=order.gpu.uuid if order.gpu else None,
        layout=tables.text_of(piece["profile"] for piece in order.order["layout"]), state=str(order.state),
        message=order.message or None, requested_at=order.requested_at, finished_at=order.finished_at,
        requested_by=order.requested_by.username if order.requested_by else None,
    )  # fmt: skip
