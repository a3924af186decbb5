"""What the tests of the control plane say to it: submit this, report that."""

import time
from typing import Any

from portal.models import Attempt, Job, Node, Share, User
from portal.services import attempts, jobs, scheduling, specs
from wire.reports import AttemptEvent
from wire.states import AttemptState, EndReason


def spec(command: str = "train.py", **fields: Any) -> specs.JobSpec:
    gpus, nodes = fields.pop("gpus", 1), fields.pop("nodes", 1)
    return specs.parse({"command": command, "resources": {"gpus": gpus, "nodes": nodes}, **fields})


def submitted(actor: User, **fields: Any) -> Job:
    return jobs.submit(spec(**fields), actor=actor).job


def started(actor: User, **fields: Any) -> Attempt:
    """A job of which a cycle just made an attempt."""
    job = submitted(actor, **fields)
    assert job.pk in scheduling.run_cycle().started
    return job.attempts.get()


def event(share: Share, seq: int, state: AttemptState, reason: EndReason | None = None, **fields: Any) -> AttemptEvent:
    attempt = share.attempt
    return AttemptEvent(
        attempt=str(attempt.pk), job=attempt.job_id, epoch=attempt.number, seq=seq, at=time.time(), state=state,
        reason=reason, **fields,
    )  # fmt: skip


def report(share: Share, *told: tuple[AttemptState, EndReason | None], first_seq: int = 1, **last: Any) -> None:
    """The node of this share reports these steps, one after the other; `last` belongs to the last of them."""
    for number, (state, reason) in enumerate(told):
        fields = last if number == len(told) - 1 else {}
        assert attempts.apply(share.node, event(share, first_seq + number, state, reason, **fields))


STARTING = (AttemptState.STARTING, None)
RUNNING = (AttemptState.RUNNING, None)
SUCCEEDED = (AttemptState.SUCCEEDED, EndReason.EXITED)
STOPPED = (AttemptState.STOPPED, EndReason.STOP_REQUESTED)
FAILED = (AttemptState.FAILED, EndReason.EXIT_CODE)
LOST = (AttemptState.LOST, EndReason.SUPERVISOR_LOST)


def fresh(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def node_named(name: str) -> Node:
    return Node.objects.get(name=name)
