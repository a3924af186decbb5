"""The list of nodes and the page of one."""

from typing import Any

import pytest
from django.test import Client

from portal.models import Event, Node, User
from portal.services import node_details, samples
from tests.portal.conftest import Cast, make_node
from tests.web.test_pages_overview import hold, page, queries, read
from wire.reports import GpuReading

pytestmark = pytest.mark.django_db


@pytest.fixture
def node(cast: Cast, broker_url: str) -> Node:
    return make_node("h1", gpus=4, driver="550.144", cuda="12.4", cpu_count=64)


def detail(user: User, node: Node) -> node_details.NodeDetail:
    return node_details.detail(user, node)


def test_a_stranger_is_sent_to_sign_in(node: Node) -> None:
    answer = Client().get("/nodes/h1/")
    assert answer.status_code == 302 and answer.headers["Location"] == "/login/?next=/nodes/h1/"


def test_the_page_tells_what_the_machine_is(cast: Cast, node: Node) -> None:
    html = page(cast.bob, "/nodes/h1/")
    for words in ("4× NVIDIA H100", "550.144", "CUDA 12.4", "<b>64</b> CPU cores", "of 4 free"):
        assert words in html


def test_what_is_not_known_is_not_zero(cast: Cast, node: Node) -> None:
    Node.objects.filter(pk=node.pk).update(driver="", cpu_count=None, memory_total_bytes=None, last_heartbeat_at=None)
    read(node.gpus.get(index=0), utilization_percent=None, missing={"utilization_percent": "not_supported"})
    html = page(cast.bob, "/nodes/h1/")
    assert 'title="this GPU does not offer it"' in html
    assert "0 CPU cores" not in html and "<b>0</b> GB" not in html and "n/a" in html


def test_a_silent_node_says_since_when_and_that_nothing_is_stopped(cast: Cast, node: Node) -> None:
    Node.objects.filter(pk=node.pk).update(state="unreachable")
    html = page(cast.bob, "/nodes/h1/")
    assert "No contact with h1" in html and "nothing is stopped" in html


def test_links_are_a_matrix_the_fastest_first(cast: Cast, node: Node) -> None:
    a, b, c, d = (gpu.uuid for gpu in node.gpus.all())
    node.links = [[a, b, "NV18"], [b, c, "PIX"], [c, d, "SYS"]]
    node.save(update_fields=["links"])
    found = detail(cast.bob, node)
    tones = [[(cell.kind, cell.tone) for cell in row] for _, row in found.matrix]
    assert tones[0] == [("", 0), ("NV18", 1), ("", 0), ("", 0)]
    assert tones[1][0] == ("NV18", 1) and tones[1][2] == ("PIX", 2)
    assert [kind for kind, _, _ in found.link_kinds] == ["NV18", "PIX", "SYS"]


def test_a_process_that_is_not_ours_is_called_so(cast: Cast, node: Node) -> None:
    job = hold(cast.bob, [node.gpus.get(index=0)], "train")
    ours = {"pid": 7, "command": "python t.py", "attempt": "x", "memory_used_bytes": 2e9}
    foreign = {"pid": 8, "command": "<b>miner</b>", "attempt": None, "user": "root"}
    read(node.gpus.get(index=0), processes=[ours])
    read(node.gpus.get(index=1), processes=[foreign])
    html = page(cast.bob, "/nodes/h1/")
    assert f"#{job.pk} train" in html and "Not from gpuyard" in html
    assert "&lt;b&gt;miner" in html and "2.0 GB" in html


def test_anothers_job_is_neither_named_here_nor_in_the_events(cast: Cast, node: Node) -> None:
    job = hold(cast.charlie, [node.gpus.get(index=0)], "secret-run")
    Event.objects.create(kind="job.state", node=node, job=job, message="secret-run started here.")
    Event.objects.create(kind="node.state", node=node, to_state="ready")
    assert "secret-run" in page(cast.charlie, "/nodes/h1/")
    html = page(cast.bob, "/nodes/h1/")
    assert "secret-run" not in html and "held by charlie" in html and "node.state" in html


def test_the_charts_begin_with_the_last_quarter_of_an_hour(cast: Cast, node: Node) -> None:
    gpu = node.gpus.get(index=2)
    samples.append(node, [GpuReading(uuid=gpu.uuid, at=samples.time.time() - 5, utilization_percent=61.0)])
    series = node_details.recent(detail(cast.bob, node).cells)
    drawn: dict[str, Any] = {one.uuid: one.mean["utilization_percent"] for one in series.gpus}
    assert drawn[gpu.uuid] == [61.0]
    assert 'id="chart-data"' in page(cast.bob, "/nodes/h1/")


def test_more_gpus_and_jobs_cost_no_more_queries(cast: Cast, node: Node) -> None:
    hold(cast.bob, list(node.gpus.all())[:1])
    small = queries(cast.bob, "/nodes/h1/")
    big = make_node("h2", gpus=16)
    for number, gpu in enumerate(big.gpus.all()[:8]):
        hold(cast.bob, [gpu], f"job-{number}")
        Event.objects.create(kind="gpu.state", node=big, gpu=gpu, to_state="suspect")
    assert queries(cast.bob, "/nodes/h2/") == small


def test_the_list_shows_each_node_once_with_its_cells(cast: Cast, node: Node) -> None:
    make_node("h2", gpus=2, model="A100", state_since=node.state_since)
    html = page(cast.bob, "/nodes/")
    assert html.count('<a class="gc ') == 6
    assert "4× H100" in html and "2× A100" in html
