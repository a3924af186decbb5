"""The one door: the table holds, the second of two movers loses or agrees, and every move leaves its event."""

import pytest

from portal.models import Event, Gpu, Job, JobState
from portal.services import transitions
from portal.services.transitions import Conflict
from tests.portal.conftest import Cast, make_node
from tests.portal.orders import submitted


def test_a_move_writes_its_fields_and_one_event(cast: Cast) -> None:
    node = make_node()
    assert transitions.move(node, "suspect", reason="silence", message="No contact.", actor=cast.alice, hostname="h")
    node.refresh_from_db()
    event = Event.objects.get(node=node)
    assert (node.state, node.hostname) == ("suspect", "h")
    assert (event.kind, event.from_state, event.to_state, event.reason, event.actor) == (
        "node.state", "ready", "suspect", "silence", cast.alice)  # fmt: skip


def test_a_repeated_state_is_no_move_and_no_event(cast: Cast) -> None:
    node = make_node()
    assert not transitions.move(node, "ready") and not Event.objects.filter(node=node).exists()


def test_an_illegal_move_is_refused_and_changes_nothing(cast: Cast) -> None:
    make_node()
    job = submitted(cast.bob)
    with pytest.raises(Conflict, match="waiting and cannot become succeeded"):
        transitions.move(job, JobState.SUCCEEDED)
    assert Job.objects.get().state == JobState.WAITING


def test_who_saw_an_older_state_loses(cast: Cast) -> None:
    make_node()
    job = submitted(cast.bob)
    stale = Job.objects.get(pk=job.pk)
    transitions.move(job, JobState.STARTING)
    with pytest.raises(Conflict, match="became starting in the meantime"):
        transitions.move(stale, JobState.STOPPED)
    stale = Job(pk=job.pk, state=JobState.WAITING, name=job.name)
    assert transitions.move(stale, JobState.STARTING) is False, "both wanted the same"
    assert Event.objects.filter(job=job, kind="job.state").count() == 1


def test_a_gpu_may_become_anything_else(cast: Cast) -> None:
    make_node()
    gpu = Gpu.objects.first()
    assert gpu is not None
    assert all(transitions.move(gpu, state) for state in ("dirty", "lost", "quarantined", "suspect", "ok"))
