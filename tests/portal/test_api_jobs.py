"""Jobs over REST, as alice, bob and charlie see them."""

import json
from typing import Any

from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from portal.models import Gpu, Health, Job
from portal.services import capacity, scheduling, transitions
from tests.portal.conftest import Api, Cast, make_node


def submit(api: Api, name: str = "train", gpus: int = 1, launcher: str = "script", **headers: str) -> Any:
    body = json.dumps({"name": name, "launcher": launcher, "command": "train.py", "resources": {"gpus": gpus}})
    return api.post("/jobs", body, **headers)


def test_a_submitted_job_waits_in_its_owners_project(api: dict[str, Api]) -> None:
    make_node()
    answer = submit(api["bob"], gpus=4)
    assert answer.status_code == 201
    job = answer.json()
    assert answer["Location"] == f"/api/v1/jobs/{job['id']}"
    assert (job["state"], job["project"], job["owner"], job["gpus"]) == ("waiting", "bob", "bob", 4)
    assert api["bob"].get(f"/jobs/{job['id']}").json() == job


def test_the_same_job_in_yaml(api: dict[str, Api]) -> None:
    make_node()
    answer = api["bob"].post(
        "/jobs", "command: python train.py\nresources: {gpus: 2, memory: 24GB}\n", "application/yaml"
    )
    assert answer.status_code == 201 and answer.json()["gpus"] == 2


def test_a_repeated_submit_under_one_key_makes_one_job(api: dict[str, Api]) -> None:
    make_node()
    first, second = (submit(api["bob"], **{"Idempotency-Key": "k1"}) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert second["Idempotent-Replayed"] == "true" and first.json()["id"] == second.json()["id"]
    other = submit(api["bob"], name="other", **{"Idempotency-Key": "k1"})
    assert other.status_code == 422 and other.json()["type"] == "idempotency_key_reused"
    assert submit(api["charlie"], **{"Idempotency-Key": "k1"}).status_code == 201
    assert Job.objects.count() == 2


def test_an_allocated_job_names_its_gpus(api: dict[str, Api]) -> None:
    node = make_node()
    number = submit(api["bob"], gpus=4, launcher="torchrun").json()["id"]
    scheduling.run_cycle()
    job = api["bob"].get(f"/jobs/{number}").json()
    assert job["state"] == "starting" and job["times"]["queued_s"] >= 0
    uuids = {held["uuid"] for held in job["allocation"]}
    assert len(uuids) == 4 and uuids <= {gpu.uuid for gpu in node.gpus.all()}
    assert [held["rank"] for held in job["allocation"]] == [0, 1, 2, 3]
    assert job["attempts"][0]["nodes"] == ["n1"]


def test_a_waiting_job_says_why(api: dict[str, Api]) -> None:
    make_node()
    submit(api["bob"], gpus=8)
    second = submit(api["charlie"], gpus=8).json()["id"]
    scheduling.run_cycle()
    reason = api["charlie"].get(f"/jobs/{second}").json()["reason"]
    assert reason["code"] and "8" in reason["message"]


def test_cancelling_a_waiting_job_ends_it_at_once_and_only_once(api: dict[str, Api]) -> None:
    make_node()
    number = submit(api["bob"]).json()["id"]
    first, second = (api["bob"].post(f"/jobs/{number}/cancel") for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["state"] == second.json()["state"] == "stopped"
    assert "bob" in first.json()["reason"]["message"]
    states = [
        event["to_state"]
        for event in api["bob"].get(f"/jobs/{number}/events").json()["events"]
        if event["kind"] == "job.state"
    ]
    assert states.count("stopped") == 1


def test_lists_are_paged_by_cursor_and_filtered(api: dict[str, Api]) -> None:
    make_node()
    numbers = [submit(api["bob"], name=f"job-{index}").json()["id"] for index in range(5)]
    seen, cursor = [], ""
    while True:
        page = api["bob"].get(f"/jobs?limit=2{cursor}").json()
        seen += [job["id"] for job in page["jobs"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == numbers[::-1]
    assert [job["id"] for job in api["bob"].get("/jobs?name=job-3").json()["jobs"]] == [numbers[3]]
    assert api["bob"].get("/jobs?state=ended").json()["jobs"] == []
    assert api["charlie"].get("/jobs").json()["jobs"] == []
    assert len(api["alice"].get("/jobs?owner=bob").json()["jobs"]) == 5


def test_a_list_costs_the_same_number_of_queries_however_long_it_is(
    api: dict[str, Api],
) -> None:
    make_node()
    costs = []
    for _ in range(2):
        submit(api["bob"], gpus=1)
        submit(api["bob"], gpus=1)
        costs.append([_queries(api["bob"], path) for path in ("/jobs", "/gpus", "/nodes")])
    assert costs[0] == costs[1]


def test_a_session_may_read_but_writes_need_its_csrf_token(cast: Cast) -> None:
    make_node()
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(cast.bob)
    assert browser.get("/api/v1/me").json()["username"] == "bob"
    answer = browser.post("/api/v1/jobs", json.dumps({"command": "true"}), content_type="application/json")
    assert answer.status_code == 403 and answer.json()["type"] == "csrf_failed" and Job.objects.count() == 0


def test_who_holds_a_gpu_is_shown_but_a_strangers_job_is_not_named(api: dict[str, Api]) -> None:
    make_node()
    number = submit(api["bob"], gpus=1).json()["id"]
    scheduling.run_cycle()
    mine = next(gpu for gpu in api["bob"].get("/gpus?free=false").json()["gpus"])
    theirs = next(gpu for gpu in api["charlie"].get("/gpus?free=false").json()["gpus"])
    assert mine["holder"] == {"owner": "bob", "job": number, "job_name": "train"}
    assert theirs["holder"] == {"owner": "bob", "job": None, "job_name": None}
    assert len(api["bob"].get("/gpus?free=true").json()["gpus"]) == 7
    assert api["bob"].get("/nodes/n1").json()["gpus_free"] == 7


def _queries(api: Api, path: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert api.get(path).status_code == 200
    return len(captured)


def test_rest_and_the_scheduler_agree_on_what_is_free(api: dict[str, Api]) -> None:
    """A node without room on its disk, a cordoned one, and a fenced card: none of them is called free."""
    full, well = make_node("full", gpus=2), make_node("well")
    make_node("cordoned", gpus=2, schedulable=False)
    Health.objects.create(node=full, key="disk", kind="disk", severity="critical", message="100 MiB left")
    transitions.move(Gpu.objects.get(node=well, index=3), "quarantined", message="by hand")
    free = {(gpu["node"], gpu["index"]) for gpu in api["bob"].get("/gpus?free=true").json()["gpus"]}
    assert free == {("well", index) for index in range(8) if index != 3}
    listed = {node["name"]: node["gpus_free"] for node in api["bob"].get("/nodes").json()["nodes"]}
    assert listed == {"full": 0, "cordoned": 0, "well": 7}
    assert {name: api["bob"].get(f"/nodes/{name}").json()["gpus_free"] for name in listed} == listed
    views = {view.name: view for view in capacity.node_views()}
    offered = {
        (name, gpu.index) for name, view in views.items() if not view.unavailable for gpu in view.gpus
        if gpu.free and gpu.healthy
    }  # fmt: skip
    assert offered == free
