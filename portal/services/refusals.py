"""What follows when a node refuses to start: the GPUs are fenced by what was found, and the job goes elsewhere.

A refusal is no fault of the job, so it uses up none of its retries; but not for ever.
"""

from django.utils import timezone

from portal.models import Attempt, Gpu, Health, Share
from portal.services import health
from portal.services.text import storable
from wire.reports import Refusal
from wire.states import EndReason

REFUSALS_MOST = 3  # of one job
KINDS = {"busy": "busy", "broken": "preflight"}
GPUS_MOST = 64


def fence(share: Share, refusals: list[Refusal]) -> int:
    """Before the GPUs are given back, or the next cycle would place the job on the same ones. -> how many."""
    if share.reason != EndReason.PREFLIGHT:
        return 0
    told = {one.gpu_uuid: one for one in refusals[:GPUS_MOST] if one.gpu_uuid}
    gpus = Gpu.objects.filter(allocations__attempt=share.attempt_id, node=share.node_id, uuid__in=list(told))
    for gpu in gpus.select_related("node"):
        note(share, gpu, told[gpu.uuid])
    for one in refusals[:GPUS_MOST]:
        if one.gpu_uuid is None:
            health.open_finding(share.node, "disk", storable(one.message, 300), at=timezone.now(), source="preflight",
                                key=f"disk/{share.attempt_id}")  # fmt: skip
    return len(told)


def note(share: Share, gpu: Gpu, refusal: Refusal) -> None:
    """The same end may be told twice: the attempt is in the key. What is busy becomes free again by itself."""
    now = timezone.now()
    message = f"Refused for job #{share.attempt.job_id}: {refusal.message}"
    kind = KINDS.get(refusal.code, "preflight")
    key = f"{kind}/{gpu.uuid}/{share.attempt_id}"
    health.open_finding(gpu, kind, storable(message, 400), key=key, at=now, source="preflight")


def goes_elsewhere(attempt: Attempt) -> bool:
    return attempt.reason == EndReason.PREFLIGHT and refused(attempt) <= REFUSALS_MOST


def hold_code(attempt: Attempt) -> str:
    """Where only GPUs were refused, others may do at once; a node that has no room needs a moment."""
    return "wait_retry" if Health.objects.filter(key=f"disk/{attempt.pk}").exists() else "wait_gpus"


def tries(attempt: Attempt) -> int:
    """How many there were, refusals apart."""
    return attempt.number - refused(attempt)


def refused(attempt: Attempt) -> int:
    """This one included, if it was."""
    return Attempt.objects.filter(job=attempt.job_id, number__lte=attempt.number, reason=EndReason.PREFLIGHT).count()
