"""The overview costs the same however large the cluster is, and names a job only to those who may see it."""

from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext

from portal.models import Allocation, Attempt, Job, Node, User
from portal.services import overview
from tests.portal.conftest import Cast, make_node


def hold(owner: User, node: Node, count: int, **fields: Any) -> Job:
    job = Job.objects.create(
        owner=owner, project=owner.personal_project, name="secret-name", spec={}, gpu_count=count, state="running",
        **fields,
    )
    attempt = Attempt.objects.create(job=job, number=1, state="running")
    free = node.gpus.exclude(allocations__released_at=None, allocations__isnull=False).order_by("index")[:count]
    for rank, gpu in enumerate(free):
        Allocation.objects.create(attempt=attempt, gpu=gpu, rank=rank)
    return job


def queries(user: User) -> int:
    with CaptureQueriesContext(connection) as captured:
        view = overview.cluster(user)
        assert view.cells is not None
    return len(captured)


def test_the_cost_does_not_grow_with_the_cluster(cast: Cast) -> None:
    hold(cast.bob, make_node("n0"), 2)
    Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="w", spec={}, gpu_count=1)
    small = queries(cast.bob)
    for number in range(1, 13):
        node = make_node(f"n{number}", model="A100" if number % 2 else "H100")
        hold(cast.bob, node, 2)
        hold(cast.charlie, node, 2)
        Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="w", spec={}, gpu_count=1)
    assert queries(cast.bob) == small <= 8


def test_every_cell_says_who_holds_it_and_only_the_own_job_by_name(cast: Cast) -> None:
    node = make_node("n1")
    own, foreign = hold(cast.bob, node, 2), hold(cast.charlie, node, 3)
    cells = overview.cluster(cast.bob).cells
    assert [cell.state for cell in cells] == ["mine"] * 2 + ["busy"] * 3 + ["free"] * 3
    mine, theirs = cells[0].holder, cells[2].holder
    assert mine and (mine.job_id, mine.job_name) == (own.pk, "secret-name")
    assert theirs and (theirs.owner, theirs.job_id, theirs.job_name) == ("charlie", None, "")
    seen_by_admin = overview.cluster(cast.alice).cells[2].holder
    assert seen_by_admin and seen_by_admin.job_id == foreign.pk


def test_thousands_of_waiting_jobs_are_counted_not_loaded(cast: Cast) -> None:
    waiting = {"owner": cast.bob, "project": cast.bob.personal_project, "spec": {}, "gpu_count": 1}
    Job.objects.bulk_create(Job(name=f"w{number}", **waiting) for number in range(3000))
    view = overview.cluster(cast.bob)
    assert (view.waiting_total, len(view.waiting)) == (3000, overview.JOBS_SHOWN)
    assert view.waiting[0].name == "w0"
