"""The overview: what is free and where, who holds what, what is mine; and the same without a hundred queries."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from portal.models import Allocation, Attempt, Gpu, Job, Node, User
from portal.services import overview, samples
from tests.portal.conftest import Cast, gpu_uuid, make_node
from wire.reports import GpuReading

pytestmark = pytest.mark.django_db


def hold(owner: User, gpus: list[Gpu], name: str = "train", **fields: Any) -> Job:
    spec = {"resources": {"gpus": len(gpus), "gpu": ["H100"]}}
    values = {"state": "running", "started_at": timezone.now(), "spec": spec, "gpu_count": len(gpus), **fields}
    job = Job.objects.create(owner=owner, project=owner.personal_project, name=name, **values)
    attempt = Attempt.objects.create(job=job, number=1, state="running")
    for rank, gpu in enumerate(gpus):
        Allocation.objects.create(gpu=gpu, attempt=attempt, rank=rank, allocated_at=timezone.now() - timedelta(hours=1))
    return job


def read(gpu: Gpu, **values: Any) -> None:
    gpu.latest = {"uuid": gpu.uuid, "at": 1.0, "missing": {}, **values}
    gpu.save(update_fields=["latest"])


@pytest.fixture
def node(cast: Cast, broker_url: str) -> Node:
    return make_node("h1", gpus=4)


def page(user: User, path: str = "/") -> str:
    client = Client()
    client.force_login(user)
    answer = client.get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def cell(html: str, index: int, node: str = "h1") -> str:
    begin = html.index(f'id="c-{gpu_uuid(node, index)}"')
    return html[html.rindex("<a", 0, begin):html.index("</a>", begin)]


def states(user: User) -> list[str]:
    return [one.state for one in overview.cluster(user).cells]


def test_every_state_has_its_word(cast: Cast, node: Node) -> None:
    gpus = list(node.gpus.all())
    hold(cast.bob, gpus[:1])
    hold(cast.charlie, gpus[1:2])
    Gpu.objects.filter(pk=gpus[2].pk).update(state="quarantined", state_reason="XID 79.")
    assert states(cast.bob) == ["mine", "busy", "quarantined", "free"]
    assert states(cast.charlie) == ["busy", "mine", "quarantined", "free"]


@pytest.mark.parametrize(("fields", "expected"), [
    ({"state": "unreachable"}, ["unreachable"] * 4),
    ({"schedulable": False}, ["mine", "draining", "draining", "draining"]),
    ({"state": "suspect"}, ["mine", "suspect", "suspect", "suspect"]),
])
def test_what_is_not_on_offer_is_not_called_free(
    cast: Cast, node: Node, fields: dict[str, Any], expected: list[str]
) -> None:
    hold(cast.bob, list(node.gpus.all())[:1])
    Node.objects.filter(pk=node.pk).update(**fields)
    assert states(cast.bob) == expected
    assert overview.cluster(cast.bob).groups[0].free == 0


def test_a_cell_shows_use_and_names_the_job_only_to_those_who_may_see_it(cast: Cast, node: Node) -> None:
    gpu = node.gpus.get(index=0)
    hold(cast.charlie, [gpu], "secret-run")
    read(gpu, utilization_percent=72.4, memory_used_bytes=40 * 1024**3, power_mw=350_000)
    own, others = cell(page(cast.charlie), 0), cell(page(cast.bob), 0)
    assert "--u:72;--m:50" in own and "<b>72</b>" in own and 'data-job="secret-run' in own
    assert 'aria-label="h1 GPU 0, Busy, 72%"' in others
    assert "secret-run" not in others and 'data-owner="charlie"' in others


def test_unknown_is_hatched_and_never_zero(cast: Cast, node: Node) -> None:
    gpu = node.gpus.get(index=1)
    hold(cast.bob, [gpu])
    read(gpu, utilization_percent=None, memory_used_bytes=None)
    shown = cell(page(cast.bob), 1)
    assert "na-u" in shown and "na-m" in shown and "<b></b>" in shown
    assert "data-utilization" not in shown
    assert overview.cluster(cast.bob).running[0].utilization_percent is None


def test_free_now_names_the_largest_block_and_its_node(cast: Cast, node: Node) -> None:
    make_node("h2", gpus=4)
    hold(cast.bob, list(node.gpus.all())[:3])
    group = overview.cluster(cast.bob).groups[0]
    assert (group.free, group.total, group.mine, group.blocks) == (5, 8, 3, [4, 1])
    assert group.largest and group.largest.node.name == "h2"
    assert "Largest block" in page(cast.bob)


def test_my_jobs_stand_beside_with_their_reasons(cast: Cast, node: Node) -> None:
    running = hold(cast.bob, list(node.gpus.all())[:2], "mine-running")
    for gpu, use in zip(node.gpus.all()[:2], (40.0, 60.0), strict=True):
        read(gpu, utilization_percent=use)
    make = {"owner": cast.bob, "project": cast.bob.personal_project, "gpu_count": 8, "spec": {"resources": {"gpus": 8}}}
    why, end = "Waiting for 8 H100. 2 are free on h1.", "Exited with code 3."
    Job.objects.create(name="mine-waiting", hold_message=why, **make)
    Job.objects.create(name="mine-failed", state="failed", ended_at=timezone.now(), end_message=end, **make)
    html = page(cast.bob)
    for words in ("mine-running", "mine-waiting", why, "mine-failed", end):
        assert words in html
    assert overview.cluster(cast.bob).running[0].utilization_percent == 50.0
    assert f'data-job-use="{running.pk}"' in html
    assert "mine-waiting" not in page(cast.charlie)


def test_names_and_sentences_are_shown_as_text(cast: Cast, node: Node) -> None:
    hold(cast.bob, list(node.gpus.all())[:1], '"><script>alert(1)</script>')
    html = page(cast.bob)
    assert "<script>alert(1)" not in html and "&lt;script&gt;" in html


def test_an_empty_portal_says_what_to_do(cast: Cast, broker_url: str) -> None:
    html = page(cast.bob)
    assert "No node has reported a GPU yet" in html and "Nothing of yours runs." in html


def test_a_node_without_gpus_is_shown_with_its_problem(cast: Cast, broker_url: str) -> None:
    make_node("bare", gpus=0, problem="The driver is not loaded. Run nvidia-smi on the machine.")
    assert "The driver is not loaded." in page(cast.bob)
    assert "1 node" in page(cast.bob)


@pytest.mark.parametrize("path", ["/", "/?part=live", "/nodes/"])
def test_ten_times_the_cluster_costs_no_more_queries(cast: Cast, node: Node, path: str) -> None:
    hold(cast.bob, list(node.gpus.all())[:2])
    small = queries(cast.bob, path)
    for number in range(10):
        big = make_node(f"n{number}", gpus=8)
        hold(cast.bob, list(big.gpus.all())[:4], f"job-{number}")
        hold(cast.charlie, list(big.gpus.all())[4:6], f"other-{number}")
    assert queries(cast.bob, path) == small
    assert small <= 12


def queries(user: User, path: str) -> int:
    client = Client()
    client.force_login(user)
    with CaptureQueriesContext(connection) as seen:
        assert client.get(path).status_code == 200
    return len(seen)


def test_the_fragment_holds_the_parts_of_the_page(cast: Cast, node: Node) -> None:
    whole, fragment = page(cast.bob), page(cast.bob, "/?part=live")
    assert "<html" in whole and "<html" not in fragment
    for part in ("free", "grid", "legend", "who", "running", "waiting", "failure", "attention", "size"):
        assert f'data-part="{part}"' in whole and f'data-part="{part}"' in fragment


def test_the_curve_of_a_job_is_the_mean_of_its_gpus_with_gaps(cast: Cast, node: Node) -> None:
    gpus = list(node.gpus.all())[:2]
    job = hold(cast.bob, gpus)
    now = timezone.now().timestamp()
    readings = [
        GpuReading(uuid=gpu.uuid, at=now - age, utilization_percent=use + (20 if number else 0))
        for age, use in ((600, 10.0), (30, 50.0)) for number, gpu in enumerate(gpus)
    ]
    samples.append(node, readings)
    curve = json.loads(page(cast.bob, "/?part=history"))[str(job.pk)]
    assert (curve[0], curve[-1]) == (20.0, 60.0)
    assert None in curve[1:-1]
