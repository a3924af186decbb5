"""Asking how the GPUs were: by GPU, node or job, in the resolution that is kept, and within limits."""

import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from portal.models import Allocation, Attempt, Gpu, Job, Node
from portal.services import history, samples
from portal.services.rollups import DAY_S
from tests.portal.conftest import Api, Cast, make_node
from wire.reports import GpuReading

NOW = time.time()
OLD = int((NOW - 7200) // 1800 * 1800)
YOUNG = int(NOW) - 120


@pytest.fixture
def node(db: None) -> Node:
    return make_node("n1", gpus=2)


@pytest.fixture
def gpu(node: Node) -> Gpu:
    return node.gpus.get(index=0)


def feed(gpu: Gpu, since: int, seconds: int, **fields: Any) -> None:
    readings = [
        GpuReading(uuid=gpu.uuid, at=float(at), **{name: each(at) if callable(each) else each
                                                   for name, each in fields.items()})
        for at in range(since, since + seconds)
    ]  # fmt: skip
    samples.append(gpu.node, readings, now=since + seconds)


def ask(api: Api, **parameters: Any) -> Any:
    if "since" in parameters:
        parameters["from"] = parameters.pop("since")
    return api.get(f"/metrics/query?{urlencode(parameters)}")


def held_by(owner: Any, gpu: Gpu, since: float, until: float | None, number: int = 1) -> Job:
    job, _ = Job.objects.get_or_create(
        owner=owner, project=owner.personal_project, name="j", defaults={"spec": {}, "gpu_count": 1}
    )
    attempt = Attempt.objects.create(job=job, number=number, state="running")
    Allocation.objects.create(
        gpu=gpu, attempt=attempt, rank=0, allocated_at=datetime.fromtimestamp(since, UTC),
        released_at=datetime.fromtimestamp(until, UTC) if until else None,
    )  # fmt: skip
    return job


# --- answers ----------------------------------------------------------------------------------------------------------
def test_a_gpu_s_last_minutes_are_every_sample(api: dict[str, Api], gpu: Gpu) -> None:
    feed(gpu, YOUNG, 60, utilization_percent=lambda at: float(at - YOUNG))
    answer = ask(api["bob"], gpu=gpu.uuid, metric="utilization_percent", since=YOUNG, to=YOUNG + 60, step=20).json()
    assert (answer["step_s"], answer["resolution_s"]) == (20, 1)
    columns = answer["gpus"][0]
    kept = [place for place, at in enumerate(answer["at"]) if YOUNG <= at < YOUNG + 40]
    for place in kept:
        first = answer["at"][place] - YOUNG
        assert columns["min"][place] == first
        assert columns["max"][place] == first + 19
        assert columns["mean"][place] == first + 9.5
        assert columns["count"][place] == 20
    assert columns["total"] is None and sum(columns["count"]) == 60


def test_older_time_comes_in_the_resolution_that_is_kept(api: dict[str, Api], gpu: Gpu) -> None:
    feed(gpu, OLD, 100, power_mw=300_000)
    history.keep_house(now=OLD + 2000.0)
    answer = ask(api["bob"], gpu=gpu.uuid, metric="power_mw", since=OLD, to=OLD + 200, step="1s").json()
    assert (answer["step_s"], answer["resolution_s"]) == (10, 10)
    assert answer["gpus"][0]["mean"] == [300_000] * 10 + [None] * 10
    assert answer["gpus"][0]["count"] == [10] * 10 + [0] * 10


def test_a_coarse_step_is_the_same_from_any_level(api: dict[str, Api], gpu: Gpu) -> None:
    feed(gpu, OLD, 1800, temperature_c=lambda at: 40.0 + (at - OLD) // 900)
    history.keep_house(now=OLD + 3600.0)
    for step, resolution in (("5m", 60), ("15m", 900), ("50s", 10)):
        answer = ask(api["bob"], gpu=gpu.uuid, metric="temperature_c", since=OLD, to=OLD + 1800, step=step).json()
        assert answer["resolution_s"] == resolution
        columns = answer["gpus"][0]
        assert (columns["mean"][0], columns["mean"][-1], sum(columns["count"])) == (40, 41, 1800)


def test_energy_is_a_total_whether_rolled_up_or_not(api: dict[str, Api], gpu: Gpu) -> None:
    feed(gpu, OLD, 300, energy_mj=lambda at: (at - OLD) * 1000)
    history.keep_house(now=OLD + 2000.0)
    feed(gpu, YOUNG, 60, energy_mj=lambda at: 10**9 + (at - YOUNG) * 500)
    answer = ask(api["bob"], gpu=gpu.uuid, metric="energy_mj", since=OLD, to=NOW, step="5m").json()
    columns = answer["gpus"][0]
    assert sum(total or 0 for total in columns["total"]) == 299 * 1000 + 59 * 500
    assert columns["total"][0] == 299_000 and columns["total"][2] is None
    assert set(columns["mean"]) == {None}


def test_a_node_answers_with_all_its_gpus(api: dict[str, Api], node: Node, gpu: Gpu) -> None:
    feed(gpu, YOUNG, 10, utilization_percent=5.0)
    answer = ask(api["charlie"], node="n1", metric="utilization_percent").json()
    assert [(one["index"], sum(one["count"])) for one in answer["gpus"]] == [(0, 10), (1, 0)]
    assert set(answer["gpus"][1]["mean"]) == {None}


def test_a_job_answers_for_every_attempt_while_it_held_its_gpus(cast: Cast, api: dict[str, Api], gpu: Gpu) -> None:
    feed(gpu, YOUNG, 60, utilization_percent=50.0)
    job = held_by(cast.bob, gpu, YOUNG + 10, YOUNG + 19.5)
    held_by(cast.bob, gpu, YOUNG + 30, YOUNG + 49.5, number=2)
    answer = ask(api["bob"], job=job.pk, metric="utilization_percent").json()
    assert [(one["attempt"], one["rank"], sum(one["count"])) for one in answer["gpus"]] == [(1, 0, 10), (2, 0, 20)]
    assert answer["at"][0] == YOUNG + 10


def test_a_job_that_never_began_has_no_gpus(cast: Cast, api: dict[str, Api]) -> None:
    job = Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="j", spec={}, gpu_count=1)
    assert ask(api["bob"], job=job.pk, metric="power_mw").json()["gpus"] == []


def test_times_may_be_written_as_people_do(api: dict[str, Api], gpu: Gpu) -> None:
    feed(gpu, YOUNG, 10, utilization_percent=5.0)
    since = datetime.fromtimestamp(YOUNG, UTC).isoformat()
    for written in (since, since.replace("+00:00", "Z")):
        path = f"/metrics/query?gpu={gpu.uuid}&metric=utilization_percent&from={quote(written)}&step=1"
        assert sum(api["bob"].get(path).json()["gpus"][0]["count"]) == 10
    plain = f"/metrics/query?gpu={gpu.uuid}&metric=utilization_percent&from={since}&step=1"  # its plus is not encoded
    assert sum(api["bob"].get(plain).json()["gpus"][0]["count"]) == 10


def test_four_hundred_days_take_few_rows(
    api: dict[str, Api], node: Node, gpu: Gpu, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(12):
        answer = ask(api["bob"], node="n1", metric="power_mw", since=NOW - 400 * DAY_S, to=NOW)
    assert answer.status_code == 200 and len(answer.json()["at"]) <= 602


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_another_one_s_job_is_not_there(cast: Cast, api: dict[str, Api], gpu: Gpu) -> None:
    job = held_by(cast.bob, gpu, YOUNG, None)
    assert ask(api["charlie"], job=job.pk, metric="power_mw").status_code == 404
    assert ask(api["alice"], job=job.pk, metric="power_mw").status_code == 200
    assert ask(api["nobody"], job=job.pk, metric="power_mw").status_code == 401
    assert ask(api["nobody"], gpu=gpu.uuid, metric="power_mw").status_code == 401


@pytest.mark.parametrize(
    ("parameters", "status", "words"),
    [
        ({"metric": "power_mw"}, 400, "exactly one of"),
        ({"metric": "power_mw", "node": "n1", "gpu": "GPU-1"}, 400, "exactly one of"),
        ({"node": "n1"}, 400, "metric"),
        ({"metric": "colour", "node": "n1"}, 400, "utilization_percent"),
        ({"metric": "power_mw", "node": "n2"}, 404, "no node"),
        ({"metric": "power_mw", "gpu": "GPU-x\x00"}, 404, "no GPU"),
        ({"metric": "power_mw", "job": 2**70}, 404, "no job"),
        ({"metric": "power_mw", "node": "n1", "since": 200, "to": 100}, 400, "before"),
        ({"metric": "power_mw", "node": "n1", "since": "nan"}, 400, "before"),
        ({"metric": "power_mw", "node": "n1", "since": "-1e300"}, 400, "1970"),
        ({"metric": "power_mw", "node": "n1", "since": "yesterday"}, 400, "seconds since"),
        ({"metric": "power_mw", "node": "n1", "step": "0"}, 400, "one second"),
        ({"metric": "power_mw", "node": "n1", "step": "soon"}, 400, "30s"),
        ({"metric": "power_mw", "node": "n1", "since": 0, "step": "1s"}, 400, "a step of at least"),
        ({"metric": "power_mw", "node": "n1", "colour": "red"}, 400, "takes:"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_way_out(
    api: dict[str, Api], node: Node, parameters: dict[str, Any], status: int, words: str
) -> None:
    response = ask(api["bob"], **parameters)
    assert response.status_code == status, response.content
    assert words in response.json()["detail"]


def test_the_step_that_a_refusal_names_is_accepted(api: dict[str, Api], node: Node) -> None:
    refused = ask(api["bob"], node="n1", metric="power_mw", since=NOW - 30 * DAY_S, to=NOW, step=1).json()
    step = refused["errors"][0]["message"].split()[2]
    assert ask(api["bob"], node="n1", metric="power_mw", since=NOW - 30 * DAY_S, to=NOW, step=step).status_code == 200
