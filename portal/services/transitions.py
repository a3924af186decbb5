"""The one door through which anything changes its state.

Check the table, update the row only if it still is in the state we saw, write the event, tell the watchers on commit.
"""

from collections.abc import Mapping
from typing import Any

from django.utils import timezone

from portal.models import JOB_MOVES, Attempt, Gpu, HardwareOrder, Job, JobState, Node, Share, User
from portal.services import events, live
from portal.services.errors import Problem
from wire.states import ATTEMPT_MOVES, NODE_MOVES, AttemptState, GpuState, NodeState

Stateful = Job | Attempt | Share | Node | Gpu | HardwareOrder

GPU_MOVES: dict[GpuState, frozenset[GpuState]] = {state: frozenset(GpuState) - {state} for state in GpuState}
_O = HardwareOrder.State
ORDER_MOVES: dict[HardwareOrder.State, frozenset[HardwareOrder.State]] = {
    _O.WAITING: frozenset({_O.SENT, _O.CANCELLED}),
    _O.SENT: frozenset({_O.RUNNING, _O.DONE, _O.FAILED, _O.UNDONE}),
    _O.RUNNING: frozenset({_O.DONE, _O.FAILED, _O.UNDONE}),
    _O.DONE: frozenset({_O.FAILED}),  # the node said so, but its inventory never showed it
    _O.FAILED: frozenset(),
    _O.UNDONE: frozenset(),
    _O.CANCELLED: frozenset(),
}
TABLES: dict[type, tuple[type, Mapping[Any, frozenset[Any]]]] = {
    Job: (JobState, JOB_MOVES),
    Attempt: (AttemptState, ATTEMPT_MOVES),
    Share: (AttemptState, ATTEMPT_MOVES),
    Node: (NodeState, NODE_MOVES),
    Gpu: (GpuState, GPU_MOVES),
    HardwareOrder: (HardwareOrder.State, ORDER_MOVES),
}


class Conflict(Problem):
    """Somebody else changed it first, or the table does not know this move. Nothing was written."""

    def __init__(self, detail: str) -> None:
        super().__init__(409, "conflict", detail)


def move(
    obj: Stateful,
    to: str,
    *,
    reason: str = "",
    message: str = "",
    actor: User | None = None,
    **fields: Any,
) -> bool:
    """-> True if this call moved it, False if it was there already. Raises Conflict.

    `fields` are written in the same statement. `obj` reflects the new state afterwards.
    """
    states, table = TABLES[type(obj)]
    old, new = states(obj.state), states(to)
    if old == new:
        return False
    if new not in table[old]:
        raise Conflict(f"{described(obj)} is {old.value} and cannot become {new.value}.")
    changes = {"state": new.value, **since(obj), **fields}
    manager: Any = type(obj)._default_manager
    if not manager.filter(pk=obj.pk, state=old.value).update(**changes):
        return already_there(obj, new.value)
    for name, value in changes.items():
        setattr(obj, name, value)
    events.record(
        f"{noun(obj)}.state", from_state=old.value, to_state=new.value, reason=reason, message=message, actor=actor,
        **subjects(obj),
    )
    tell(obj)
    return True


def already_there(obj: Stateful, to: str) -> bool:
    """Zero rows: either somebody made the very same move, which is fine, or another one."""
    obj.refresh_from_db(fields=["state"])
    if obj.state != to:
        raise Conflict(f"{described(obj)} became {obj.state} in the meantime.")
    return False


def since(obj: Stateful) -> dict[str, Any]:
    return {"state_since": timezone.now()} if isinstance(obj, Job | Attempt | Node | Gpu) else {}


def noun(obj: Stateful) -> str:
    return "order" if isinstance(obj, HardwareOrder) else type(obj).__name__.lower()


def described(obj: Stateful) -> str:
    return f"{noun(obj).capitalize()} {obj}"


def subjects(obj: Stateful) -> dict[str, Any]:
    if isinstance(obj, Share):
        return {"attempt": obj.attempt, "node": obj.node}
    if isinstance(obj, HardwareOrder):
        return {"gpu": obj.gpu, "node": obj.node}
    return {noun(obj): obj}


def tell(obj: Stateful) -> None:
    if isinstance(obj, Job):
        live.notify_all([live.job_channel(obj.pk), live.CLUSTER], "job", id=obj.pk, state=str(obj.state))
    elif isinstance(obj, Attempt):
        live.notify(live.job_channel(obj.job_id), "attempt", number=obj.number, state=str(obj.state))
    elif isinstance(obj, Share):
        live.notify(live.job_channel(obj.attempt.job_id), "share", node_rank=obj.node_rank, state=str(obj.state))
    elif isinstance(obj, Node):
        live.notify(live.CLUSTER, "node", name=obj.name, state=str(obj.state))
    elif isinstance(obj, HardwareOrder):
        live.notify(live.CLUSTER, "node", name=obj.node.name, order=str(obj.pk), state=str(obj.state))
    else:
        live.notify(live.CLUSTER, "gpu", uuid=obj.uuid, state=str(obj.state))
