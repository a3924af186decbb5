"""Jobs whose node owes an answer: shown with since when and what follows. Nothing is ever ended on doubt."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.utils import timezone

from portal.models import Job, Share
from portal.services import live
from portal.services.desired import ENDED
from wire.states import AttemptState, NodeState

SILENT = (NodeState.SUSPECT, NodeState.UNREACHABLE)
START_MAY_TAKE = timedelta(seconds=20)
STOP_MAY_TAKE = timedelta(seconds=30)  # on top of the grace that the job has to end by itself

Answer = tuple[str, str]
NOTHING: Answer = ("", "")


def note(now: datetime | None = None) -> int:
    """Two queries, one more if something changed. -> how many jobs got another note, or lost theirs."""
    notes = dict(reversed(list(due(now or timezone.now()))))  # the first share that owes something speaks for its job
    changed = []
    for job in Job.objects.active().only("pk", "hold_code", "hold_message"):
        code, message = notes.get(job.pk, NOTHING)
        if (job.hold_code, job.hold_message) != (code, message):
            job.hold_code, job.hold_message = code, message
            changed.append(job)
    if changed:
        Job.objects.active().bulk_update(changed, ["hold_code", "hold_message"], batch_size=5000)
        live.notify_all([live.CLUSTER, *(live.job_channel(job.pk) for job in changed)], "hold")
    return len(changed)


# --- helpers ----------------------------------------------------------------------------------------------------------


def due(now: datetime) -> Iterator[tuple[int, Answer]]:
    open_shares = Share.objects.filter(forgotten_at=None).exclude(state__in=ENDED)
    for share in open_shares.select_related("attempt", "node").defer("ranks").order_by("pk"):
        answer = silence(share) or unconfirmed_stop(share, now) or unconfirmed_start(share, now)
        if answer is not None:
            yield share.attempt.job_id, answer


def silence(share: Share) -> Answer | None:
    node = share.node
    if node.state not in SILENT or node.last_heartbeat_at is None:
        return None
    what = "The stop reaches it when it is back." if share.stop_requested_at else "Nothing of it is stopped."
    state = "has not started" if share.state == AttemptState.PENDING else "probably still runs"
    since = f"No contact with {node.name} since {clock(node.last_heartbeat_at)}."
    return "node_silent", f"{since} The job {state} there. {what}"


def unconfirmed_stop(share: Share, now: datetime) -> Answer | None:
    asked = share.stop_requested_at
    if asked is None or now - asked < STOP_MAY_TAKE + timedelta(seconds=share.launch.get("stop_grace_s", 0)):
        return None
    return "stop_overdue", f"{share.node.name} was told to stop it at {clock(asked)} and has not confirmed the end yet."


def unconfirmed_start(share: Share, now: datetime) -> Answer | None:
    given = share.attempt.created_at
    if share.state != AttemptState.PENDING or now - given < START_MAY_TAKE:
        return None
    return "start_overdue", f"{share.node.name} has the order since {clock(given)} and has not confirmed the start yet."


def clock(moment: datetime) -> str:
    return f"{moment:%H:%M:%S} UTC"
