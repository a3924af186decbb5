"""The record of what happened. Written inside the transaction of the change, never edited."""

from typing import TypedDict, Unpack

from portal.models import Attempt, Event, Gpu, Job, Node, User
from portal.services.text import storable


class Particulars(TypedDict, total=False):
    job: Job | None
    attempt: Attempt | None
    node: Node | None
    gpu: Gpu | None
    actor: User | None
    from_state: str
    to_state: str
    reason: str
    message: str


def record(kind: str, **particulars: Unpack[Particulars]) -> Event:
    return Event.objects.create(**event_fields(kind, particulars))


def event_fields(kind: str, particulars: Particulars) -> dict[str, object]:
    """An event about an attempt is also about its job, one about a GPU also about its node."""
    job, attempt = particulars.get("job"), particulars.get("attempt")
    node, gpu = particulars.get("node"), particulars.get("gpu")
    actor = particulars.get("actor")
    return {
        "kind": kind,
        "job_id": job.pk if job else (attempt.job_id if attempt else None),
        "attempt_id": attempt.pk if attempt else None,
        "node_id": node.pk if node else (gpu.node_id if gpu else None),
        "gpu_id": gpu.pk if gpu else None,
        "actor_id": actor.pk if actor else None,
        "from_state": particulars.get("from_state", ""),
        "to_state": particulars.get("to_state", ""),
        "reason": storable(particulars.get("reason", ""), 40),
        "message": storable(particulars.get("message", ""), 600),
    }
