"""The life of an attempt once it exists: what its nodes report, and what follows for the job and its GPUs.

Events may come twice, late, or out of order. Each is applied once, in the order of its `seq`, under its job's lock.
"""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from django.db import transaction
from django.utils import timezone

from portal.models import Allocation, Attempt, Job, JobState, LogStream, Node, Share
from portal.services import desired, endings, events, health, refusals, scheduling, transitions
from portal.services.logs import STREAM_NAME
from portal.services.text import storable
from wire.reports import AttemptEvent
from wire.states import ATTEMPT_ENDED, ATTEMPT_MOVES, END_STATE, AttemptState, EndReason

ENDED = [state.value for state in ATTEMPT_ENDED]
LAUNCHER_STREAM = "launcher"
SELF_ENDED = (EndReason.EXIT_CODE, EndReason.SIGNAL)


@transaction.atomic
def apply(node: Node, event: AttemptEvent) -> bool:
    """-> True if it is durable now, or was already. False: not ours, or an earlier one is still missing."""
    share = own_share(node, event)
    if share is None or event.seq > share.event_seq + 1:
        return False
    if event.seq <= share.event_seq:
        say_again(share)
        return True
    share.event_seq = event.seq
    share.save(update_fields=["event_seq"])
    state = state_of(event)
    if state in ATTEMPT_MOVES[AttemptState(share.state)]:
        advance(share, event, state)
    elif state in ATTEMPT_ENDED:
        message = f"{node.name} reports {state.value} after the end; kept as evidence, nothing changes."
        events.record("attempt.late", attempt=share.attempt, node=node, to_state=state.value, message=message)
    return True


@transaction.atomic
def release(attempt: Attempt) -> int:
    """Give its GPUs back. The one place where that happens; repeating it does nothing. -> how many."""
    count = Allocation.objects.filter(attempt=attempt, released_at=None).update(released_at=timezone.now())
    scheduling.wake()
    return count


@transaction.atomic
def request_stop(attempt: Attempt) -> None:
    """Order every node of it to end its part. Repeating it does nothing."""
    open_shares = attempt.shares.exclude(state__in=ENDED).filter(stop_requested_at=None)
    shares = list(open_shares.select_related("node", "attempt"))
    for share in shares:
        transitions.move(share, AttemptState.STOPPING, stop_requested_at=timezone.now())
    if AttemptState.STOPPING in ATTEMPT_MOVES[AttemptState(attempt.state)]:
        transitions.move(attempt, AttemptState.STOPPING)
    desired.change([share.node for share in shares])


def forget_if_whole(share: Share) -> bool:
    """-> whether nothing is missing of it any more: its end and every byte of its logs are durable."""
    if share.forgotten_at is not None:
        return True
    if share.state not in ENDED or not all(stream.complete for stream in streams_of(share)):
        return False
    share.forgotten_at = timezone.now()
    share.save(update_fields=["forgotten_at"])
    return True


# --- one event --------------------------------------------------------------------------------------------------------


def own_share(node: Node, event: AttemptEvent) -> Share | None:
    """The share that the event is about, its job locked first: everything that moves a job takes that lock."""
    try:
        attempt_id = UUID(event.attempt)
    except ValueError:
        return None
    Job.objects.select_for_update().filter(attempts=attempt_id).first()
    return (
        Share.objects.select_related("attempt__job__cancelled_by", "node")
        .filter(node=node, attempt=attempt_id, attempt__number=event.epoch, attempt__job=event.job)
        .first()
    )


def say_again(share: Share) -> None:
    """The node repeats what is durable: it has not heard that it may forget."""
    if share.forgotten_at is not None:
        share.forgotten_at = timezone.now()
        share.save(update_fields=["forgotten_at"])


def state_of(event: AttemptEvent) -> AttemptState:
    """The reason decides the end state, so that both never disagree."""
    if event.state in ATTEMPT_ENDED and event.reason is not None:
        return END_STATE[event.reason]
    return event.state


def advance(share: Share, event: AttemptEvent, state: AttemptState) -> None:
    attempt = share.attempt
    if state in ATTEMPT_ENDED:
        end_share(share, event, state)
        return
    transitions.move(share, state)
    if state in ATTEMPT_MOVES[AttemptState(attempt.state)]:
        started: dict[str, Any] = {"started_at": moment(event, attempt)} if state == AttemptState.RUNNING else {}
        transitions.move(attempt, state, **started)
        if started and attempt.job.state == JobState.STARTING:
            transitions.move(attempt.job, JobState.RUNNING, **started)


def end_share(share: Share, event: AttemptEvent, state: AttemptState) -> None:
    transitions.move(
        share,
        state,
        reason=event.reason.value if event.reason else "",
        message=storable(event.message or "", 600),
    )
    note_end(share, event)
    finalise_logs(share, event)
    refusals.fence(share, event.refusals)
    attempt = share.attempt
    if state in (AttemptState.FAILED, AttemptState.LOST) and not attempt.reason:
        blame(attempt, share)
    if attempt.shares.exclude(state__in=ENDED).exists():
        if state != AttemptState.SUCCEEDED:
            request_stop(attempt)  # a gang ends together
    else:
        end_attempt(share, event)
    forget_if_whole(share)


def note_end(share: Share, event: AttemptEvent) -> None:
    share.reason = event.reason.value if event.reason else ""
    share.exit_code, share.signal = event.exit_code, event.signal
    share.message = storable(event.message or "", 600)
    share.ranks = [storable_rank(msgspec.to_builtins(rank)) for rank in event.ranks]
    share.save(update_fields=["reason", "exit_code", "signal", "message", "ranks"])


def storable_rank(rank: dict[str, Any]) -> dict[str, Any]:
    return rank | {"message": storable(rank["message"], 600) if rank["message"] else None}


def blame(attempt: Attempt, share: Share) -> None:
    """This share says why the attempt ended; the others only followed."""
    attempt.reason = share.reason
    attempt.exit_code, attempt.signal = share.exit_code, share.signal
    seen = health.of_attempt(attempt) if share.reason in SELF_ENDED else ""
    attempt.message = storable(f"{endings.sentence(share)} {seen}".strip(), 600)
    attempt.save(update_fields=["reason", "exit_code", "signal", "message"])


def finalise_logs(share: Share, event: AttemptEvent) -> None:
    """From here on it is known how many bytes are still to come. A rank that never wrote has a whole, empty log."""
    sizes = {name: size for name, size in event.log_sizes.items() if STREAM_NAME.fullmatch(name) and size >= 0}
    have = {stream.name: stream for stream in LogStream.objects.filter(attempt=share.attempt)}
    for name in {*sizes, *rank_streams(share)}:
        stream = have.get(name) or LogStream(attempt=share.attempt, name=name)
        stream.final_bytes = max(sizes.get(name, 0), stream.size_bytes)
        stream.save()


# --- the end ----------------------------------------------------------------------------------------------------------


def end_attempt(last: Share, event: AttemptEvent) -> None:
    attempt, job = last.attempt, last.attempt.job
    if not attempt.reason:
        cut_short = attempt.shares.filter(state=AttemptState.STOPPED).select_related("node").first()
        blame(attempt, cut_short or last)
    final = END_STATE[EndReason(attempt.reason)] if attempt.reason else AttemptState(last.state)
    ended_at = moment(event, attempt)
    ran_s = running_s(attempt, event, ended_at)
    transitions.move(
        attempt, final, reason=attempt.reason, message=attempt.message, ended_at=ended_at, running_s=ran_s
    )
    release(attempt)
    if job.cancel_requested_at is None and refusals.goes_elsewhere(attempt):
        requeue(job, attempt, "It goes elsewhere, without using up a retry.", refusals.hold_code(attempt))
    elif final == AttemptState.LOST and job.cancel_requested_at is None and refusals.tries(attempt) <= retries(job):
        requeue(job, attempt, f"Try {refusals.tries(attempt) + 1} of {retries(job) + 1} follows.")
    else:
        end_job(job, attempt, final)


def end_job(job: Job, attempt: Attempt, final: AttemptState) -> None:
    asked = job.cancel_requested_at is not None
    stopped = final == AttemptState.STOPPED or (asked and final == AttemptState.LOST)
    to = JobState.SUCCEEDED if final == AttemptState.SUCCEEDED else JobState.STOPPED if stopped else JobState.FAILED
    message = endings.of_job(job, attempt, stopped=stopped)
    code = f"end_{attempt.reason or final.value}"
    transitions.move(
        job, to, reason=code, message=message, end_code=code, end_message=message, exit_code=attempt.exit_code,
        ended_at=attempt.ended_at, hold_code="", hold_message="",
    )


def retries(job: Job) -> int:
    return int(job.spec.get("retries", 0))


def requeue(job: Job, attempt: Attempt, what_follows: str, hold_code: str = "wait_retry") -> None:
    message = f"{attempt.message} {what_follows}"
    transitions.move(
        job, JobState.WAITING, reason=f"end_{attempt.reason}", message=message, hold_code=hold_code,
        hold_message=storable(message, 400), allocated_at=None, started_at=None,
    )


# --- helpers ----------------------------------------------------------------------------------------------------------


def moment(event: AttemptEvent, attempt: Attempt) -> datetime:
    """The node's time, as far as it is possible: a node whose clock is wrong must not make durations negative."""
    now, earliest = timezone.now(), attempt.started_at or attempt.created_at
    try:
        at = datetime.fromtimestamp(event.at, UTC)
    except (ValueError, OverflowError, OSError):
        at = now
    return min(max(at, earliest), now)


def running_s(attempt: Attempt, event: AttemptEvent, ended_at: datetime) -> float | None:
    """Between two moments of the node's wall clock, but never more than its monotonic clock counted."""
    if attempt.started_at is None:
        return None
    wall_s = (ended_at - attempt.started_at).total_seconds()
    return wall_s if event.monotonic_s is None else min(wall_s, event.monotonic_s)


def rank_streams(share: Share) -> list[str]:
    return [f"rank-{rank}" for rank in range(share.first_rank, share.first_rank + share.rank_count)]


def streams_of(share: Share) -> list[LogStream]:
    """Of its own ranks, and of the launcher where it is the first node's."""
    names = rank_streams(share) + ([LAUNCHER_STREAM] if share.node_rank == 0 else [])
    return list(LogStream.objects.filter(attempt=share.attempt_id, name__in=names))
