"""Every refusal of the API: the right status, a code, a sentence that names the field, and nothing left behind."""

import json
from typing import Any

import pytest
from django.urls import URLPattern, URLResolver, get_resolver

from portal.models import Event, IdempotencyKey, Job
from tests.portal.conftest import Api, make_node

GOOD = {"name": "ok", "command": "true", "resources": {"gpus": 1}}
OPEN_BY_NAME = {"openapi-json", "openapi-view", "api-root"}


def spec(**changes: Any) -> str:
    """A good specification with changes; `resources__gpus=…` reaches inside."""
    body = json.loads(json.dumps(GOOD))
    for name, value in changes.items():
        place, (*path, last) = body, name.split("__")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return json.dumps(body)


def refused(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.content
    assert answer["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status and problem["detail"] and problem["type"] and problem["request_id"]
    assert "Traceback" not in answer.content.decode()
    assert (
        Job.objects.count() == 0
        and IdempotencyKey.objects.count() == 0
        and Event.objects.exclude(job=None).count() == 0
    )
    return problem


def fields(problem: dict[str, Any]) -> set[str]:
    return {error["field"] for error in problem["errors"]}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"resources__gpus": -1}, "resources.gpus"),
        ({"resources__gpus": 1.5}, "resources.gpus"),
        ({"resources__gpus": "8"}, "resources.gpus"),
        ({"resources__gpus": True}, "resources.gpus"),
        ({"resources__gpus": None}, "resources.gpus"),
        ({"resources__gpus": 10**9}, "resources.gpus"),
        ({"resources__gpus": 2**63}, "resources.gpus"),
        ({"resources__memory": "-24GB"}, "resources.memory"),
        ({"resources__memory": "lots"}, "resources.memory"),
        ({"resources__nodes": 0}, "resources.nodes"),
        ({"resources__link": "wifi"}, "resources.link"),
        ({"time_limit": "-1h"}, "time_limit"),
        ({"time_limit": 0}, "time_limit"),
        ({"time_limit": "NaN"}, "time_limit"),
        ({"command": ""}, "command"),
        ({"command": "echo 'unfinished"}, "command"),
        ({"command": "x" * 100_000}, "command"),
        ({"command": "echo \x00"}, "command"),
        ({"name": "a" * 201}, "name"),
        ({"name": "line\nbreak"}, "name"),
        ({"name": "\u202eevil"}, "name"),
        ({"launcher": "rocket"}, "launcher"),
        ({"runtime__kind": "docker"}, "runtime.kind"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "env"),
        ({"env": {"A=B": "1"}}, "env"),
        ({"env": {"LD_PRELOAD": "/x.so"}}, "env"),
        ({"env": {"GPUYARD_JOB_ID": "1"}}, "env"),
        ({"source": {"path": "relative"}}, "source.path"),
        ({"source": {"path": "/a/../../etc"}}, "source.path"),
        ({"layout": {"data": 3}}, "layout"),
        ({"retries": -1}, "retries"),
        ({"array": "0-9"}, "array"),
        ({"priority": "highest"}, "priority"),
        ({"project": "not-mine"}, "project"),
        ({"state": "SUCCEEDED"}, "state"),
        ({"owner": 1}, "owner"),
        ({"resources__gpuz": 1}, "resources.gpuz"),
    ],
)
def test_a_wrong_field_is_named(api: dict[str, Api], changes: dict[str, Any], field: str) -> None:
    make_node()
    problem = refused(api["bob"].post("/jobs", spec(**changes)), 400)
    assert any(named == field or named.startswith(f"{field}.") for named in fields(problem)), problem
    assert field.split(".")[-1] in problem["detail"]


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"resources__gpu": "B300"}, "resources.gpu", "H100"),
        ({"resources__gpus": 9}, "resources.gpus", "8"),
        ({"resources__memory": "200GB"}, "resources.memory", "GB"),
    ],
)
def test_what_no_machine_could_ever_run_is_not_queued(
    api: dict[str, Api], changes: dict[str, Any], field: str, words: str
) -> None:
    make_node()
    problem = refused(api["bob"].post("/jobs", spec(**changes)), 422)
    assert problem["type"] == "unsatisfiable" and fields(problem) == {field} and words in problem["detail"]


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "null",
        '"text"',
        '{"command": "a", "command": "b"}',
        '{"command": NaN}',
        "[" * 10_000 + "]" * 10_000,
        '{"command": "\\ud800"}',
        "\xff",
    ],
)
def test_what_is_no_specification_is_refused(api: dict[str, Api], body: str) -> None:
    refused(api["bob"].post("/jobs", body), 400)


def test_bytes_that_are_no_utf8_are_refused(api: dict[str, Api]) -> None:
    assert refused(api["bob"].post("/jobs", b'{"command": "\xff"}'), 400)["type"] == "invalid_encoding"


def test_a_yaml_bomb_is_refused(api: dict[str, Api]) -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"] + [
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    refused(api["bob"].post("/jobs", "\n".join(lines), content_type="application/yaml"), 400)


def test_a_body_of_10_mb_is_refused(api: dict[str, Api]) -> None:
    assert api["bob"].post("/jobs", spec(name="x" * 10_000_000)).status_code == 413
    assert Job.objects.count() == 0


def test_another_content_type_is_refused(api: dict[str, Api]) -> None:
    refused(api["bob"].post("/jobs", spec(), content_type="text/plain"), 415)


def test_an_idempotency_key_may_not_be_endless(api: dict[str, Api]) -> None:
    make_node()
    refused(api["bob"].post("/jobs", spec(), **{"Idempotency-Key": "k" * 300}), 400)


@pytest.mark.parametrize(
    "path",
    [
        "/jobs?owner__password__startswith=p",
        "/jobs?ordering=owner",
        "/jobs?_connector=OR",
        "/jobs?cursor=x",
        "/jobs?state=sleeping",
        "/jobs?limit=many",
        "/nodes?x=1",
        "/gpus?x=1",
        "/me?token=gy_x",
    ],
)
def test_unknown_and_impossible_parameters_are_refused(api: dict[str, Api], path: str) -> None:
    refused(api["bob"].get(path), 400)


def test_nobody_gets_in_without_a_token(api: dict[str, Api]) -> None:
    """Generated from the address map, so that no route can be forgotten."""
    routes = list(api_routes())
    assert len(routes) >= 12
    for route in routes:
        for call in (api["nobody"].get, api["nobody"].post):
            answer = call(route)
            assert answer.status_code in {401, 405}, (route, answer.status_code)
            if answer.status_code == 401:
                assert answer["WWW-Authenticate"].startswith("Bearer")
                assert answer.json()["type"] == "not_authenticated"


def test_a_wrong_token_and_a_token_in_the_address_are_refused(db: None) -> None:
    problem = Api("gy_wrong").get("/me")
    assert problem.status_code == 401 and problem.json()["type"] == "invalid_token"
    assert Api(None).get("/me?token=gy_wrong").status_code == 401


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("what", ["", "/logs", "/logs?rank=launcher", "/events", "/metrics", "/logs/stream"])
def test_somebody_elses_job_does_not_exist(api: dict[str, Api], what: str) -> None:
    make_node()
    number = api["bob"].post("/jobs", spec()).json()["id"]
    foreign, missing = api["charlie"].get(f"/jobs/{number}{what}"), api["charlie"].get(f"/jobs/999999{what}")
    assert foreign.status_code == missing.status_code == 404
    assert foreign.json()["type"] == missing.json()["type"]
    assert api["charlie"].post(f"/jobs/{number}/cancel").status_code == 404
    assert Job.objects.get(pk=number).state == "waiting"


@pytest.mark.parametrize("number", ["0", "-1", "99999999999999999999999", "abc", "1e3", "1/x", "1/", "../me"])
def test_impossible_job_numbers_are_just_not_there(api: dict[str, Api], number: str) -> None:
    assert refused(api["bob"].get(f"/jobs/{number}"), 404)["type"] == "not_found"


def api_routes() -> list[str]:
    found: list[str] = []

    def walk(patterns: list[URLPattern | URLResolver], prefix: str) -> None:
        for pattern in patterns:
            path = prefix + str(pattern.pattern)
            if isinstance(pattern, URLResolver):
                walk(pattern.url_patterns, path)
            elif path.startswith("api/v1") and pattern.name not in OPEN_BY_NAME:
                found.append("/" + path.removeprefix("api/v1/").replace("<int:job_id>", "1").replace("<name>", "n1"))

    walk(get_resolver().url_patterns, "")
    return found
