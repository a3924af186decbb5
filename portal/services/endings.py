"""How an attempt ended, in words: what happened, on which rank, and what followed from it."""

import signal
from collections.abc import Iterable
from typing import Any

from portal.models import Attempt, Job, Share
from portal.services.spec_values import duration_text
from portal.services.text import counted, storable
from wire.states import EndReason

PLAIN = {
    EndReason.EXITED: "Every process ended with status 0.",
    EndReason.STOP_REQUESTED: "Stopped on request.",
    EndReason.TIME_LIMIT: "Ended after its time limit of {limit}.",
    EndReason.SUPERVISOR_LOST: "The process that watched over it on {node} died; everything it had started was ended.",
    EndReason.NODE_REBOOT: "{node} restarted while the job ran there.",
    EndReason.UNKNOWN_EPOCH: "{node} refused it: it already knows a newer attempt of this job.",
}
WITH_CAUSE = {
    EndReason.LAUNCH_FAILED: "Could not be started on {node}",
    EndReason.PREFLIGHT: "Was not started, as a check of {node} failed",
    EndReason.OUT_OF_MEMORY: "{node} ran out of memory and the kernel ended a process of this job",
}


def sentence(share: Share) -> str:
    """-> "Rank 2 was killed by signal 9 (SIGKILL). The other 3 ranks stopped because of it."."""
    words = {"node": share.node.name, "limit": duration_text(int(share.launch.get("time_limit_s") or 0))}
    if not share.reason:
        return with_cause(f"{share.node.name} reported the end as {share.state}, without a reason", share.message)
    reason = EndReason(share.reason)
    if reason in PLAIN:
        return PLAIN[reason].format(**words)
    if reason in WITH_CAUSE:
        return with_cause(WITH_CAUSE[reason].format(**words), share.message)
    return failure(share)


def failure(share: Share) -> str:
    first = first_failing(share.ranks)
    rank = first["rank"] if first and share.launch.get("world_size", 1) > 1 else None
    who = f"Rank {rank} " if rank is not None else ""
    code, number = (first["exit_code"], first["signal"]) if first else (share.exit_code, share.signal)
    said = (first or {}).get("message") or share.message
    verb = f"was killed by {signal_text(number)}" if number else f"exited with code {code}"
    alone = verb.removeprefix("was ")
    text = with_cause(who + verb if who else alone[0].upper() + alone[1:], said)
    others = share.launch.get("world_size", 1) - 1
    if rank is not None and others > 0:
        text += f" The other {counted(others, 'rank')} stopped because of it."
    return text


def first_failing(ranks: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank that ended first among those that did not end well; ranks without a time count as later."""
    failed = [rank for rank in ranks if rank.get("exit_code") or rank.get("signal")]
    return min(failed, key=lambda rank: (rank.get("ended_at") or float("inf"), rank["rank"]), default=None)


def signal_text(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def with_cause(text: str, cause: str | None) -> str:
    cause = (cause or "").strip()
    if not cause:
        return f"{text}."
    return f"{text}: {cause}" + ("" if cause.endswith((".", "!", "?")) else ".")


def of_job(job: Job, attempt: Attempt, *, stopped: bool) -> str:
    if stopped and job.cancelled_by is not None:
        return f"Stopped by {job.cancelled_by.username}."
    return storable(attempt.message, 600)
