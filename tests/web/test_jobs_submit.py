"""The page of a new job: form, YAML and command are one object, and one validator speaks for all of them."""

import json
import shlex
from typing import Any

import pytest
import yaml
from django.test import Client

from portal.models import Job
from portal.services import jobs, scheduling, specs
from tests.portal.conftest import Cast, make_node

pytestmark = pytest.mark.django_db

FORM = {"edited": "form", "yaml": "", "name": "resnet", "launcher": "torchrun", "command": "train.py --epochs 1",
        "gpus": "4", "nodes": "1", "link": "any", "retries": "0"}


@pytest.fixture
def bob(cast: Cast, broker_url: str) -> Client:
    client = Client()
    client.force_login(cast.bob)
    return client


def check(client: Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/jobs/new/check/", {**FORM, **fields})
    assert answer.status_code == 200
    return answer.json()


# --- two sides of one object ------------------------------------------------------------------------------------------


def test_the_form_becomes_yaml_and_a_command_for_the_same_request(bob: Client) -> None:
    make_node()
    answer = check(bob, models=["H100", "A100"], memory="24GB", link="nvlink", time_limit="12h", env="A=1\nB=x y=z",
                   data="2", tensor="2", source="/shared/code")
    wanted = {
        "name": "resnet", "launcher": "torchrun", "command": "train.py --epochs 1", "layout": {"data": 2, "tensor": 2},
        "source": {"path": "/shared/code"}, "env": {"A": "1", "B": "x y=z"}, "time_limit": "12h",
        "resources": {"gpus": 4, "gpu": ["H100", "A100"], "memory": "24GB", "link": "nvlink"},
    }
    assert yaml.safe_load(answer["yaml"]) == wanted
    words = shlex.split(answer["commands"]["curl"].replace("\\\n", " "))
    assert json.loads(words[words.index("--data-raw") + 1]) == wanted
    assert answer["errors"] == {} and answer["ready"]


def test_yaml_fills_the_form(bob: Client) -> None:
    make_node()
    text = "command: a.py\nlauncher: torchrun\nresources: {gpus: 2, gpu: H100, nodes: 1}\nenv: {A: '1'}\n"
    text += "layout: {data: 2}\n"
    values = check(bob, edited="yaml", yaml=text)["form"]
    assert (values["command"], values["gpus"], values["models"], values["env"], values["data"]) == (
        "a.py", 2, ["H100"], "A=1", 2)
    assert values["name"] == "" and values["link"] == "any"


def test_going_back_and_forth_changes_nothing(bob: Client) -> None:
    make_node()
    first = check(bob, models=["H100"], memory="24GB", env="A=1", data="4", time_limit="90m")
    second = check(bob, edited="yaml", yaml=first["yaml"])
    filled = {name: value for name, value in second["form"].items() if value != ""}
    third = check(bob, **filled)
    assert first["yaml"] == second["yaml"] == third["yaml"]


def test_what_the_form_has_no_field_for_survives_an_edit_of_the_form(bob: Client) -> None:
    make_node()
    answer = check(bob, yaml="command: old\nruntime: {kind: process}\nresources: {gpus: 1, nodes: {min: 1, max: 2}}\n",
                   nodes="1 to 2")
    data = yaml.safe_load(answer["yaml"])
    assert data["command"] == "train.py --epochs 1" and data["resources"]["nodes"] == {"min": 1, "max": 2}


# --- what is wrong stands at its field --------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [
    ("gpus", "-1"), ("gpus", "four"), ("gpus", "1.5"), ("gpus", "99999999999999"), ("memory", "lots"), ("nodes", "0"),
    ("time_limit", "soon"), ("command", ""), ("command", "'unbalanced"), ("env", "1X=2"),
    ("env", "CUDA_VISIBLE_DEVICES=0"),
    ("env", "NOVALUE"), ("name", "x" * 201), ("source", "relative/path"), ("retries", "-1"), ("data", "3"),
    ("launcher", "slurm"),
    ("name", "a\x00b"),
])
def test_each_error_stands_at_its_own_field(field: str, value: str, bob: Client) -> None:
    make_node()
    answer = check(bob, **{field: value})
    assert list(answer["errors"]) == [field], answer["errors"]
    assert answer["errors"][field][0].endswith(".") and not answer["ready"] and answer["commands"] is None


@pytest.mark.parametrize("text", [
    "command: [", "- a\n- b", "just text", "&a [*a]", "a: &x [1]\nb: *x", "command: 2026-01-01",
    "!!python/object:os.system {}",
    "resources: 7\ncommand: x", "env: [1]\ncommand: x", "? {a: b}\n: c", "command: !!binary aGk=",
    "command: x\nnope: 1", "\x07",
])
def test_no_yaml_breaks_the_check(text: str, bob: Client) -> None:
    make_node()
    answer = check(bob, edited="yaml", yaml=text)
    assert answer["errors"] and not answer["ready"]
    assert check(bob, yaml=text)["yaml"], "the form still works beside it"


# --- would it start ---------------------------------------------------------------------------------------------------


def test_the_panel_names_the_place_if_it_would_start(bob: Client) -> None:
    make_node("n7", gpus=4)
    start = check(bob)["start"]
    assert "Starts at once" in start and "n7" in start and "0, 1, 2, 3" in start and "NV18" in start


def test_the_panel_says_what_blocks_it(cast: Cast, bob: Client) -> None:
    make_node(gpus=4)
    jobs.submit(specs.parse({"command": "x", "resources": {"gpus": 2}}), actor=cast.charlie)
    scheduling.run_cycle()
    answer = check(bob)
    assert "Not now" in answer["start"] and "Waiting for 4 " in answer["start"]
    assert answer["ready"], "it may wait"


def test_the_panel_says_that_it_can_never_start(bob: Client) -> None:
    make_node(gpus=4)
    answer = check(bob, gpus="5")
    assert "Can never start" in answer["start"] and not answer["ready"]


def test_asking_leaves_no_trace(cast: Cast, bob: Client) -> None:
    make_node()
    check(bob)
    assert not Job.objects.exists()


# --- submitting -------------------------------------------------------------------------------------------------------


def test_the_form_makes_a_job_and_shows_it(cast: Cast, bob: Client) -> None:
    make_node()
    answer = bob.post("/jobs/new/", {**FORM, "key": "k1", "models": ["H100"]})
    job = Job.objects.get()
    assert answer.status_code == 302 and answer["Location"] == f"/jobs/{job.pk}/"
    assert (job.owner, job.name, job.gpu_count, job.state) == (cast.bob, "resnet", 4, "waiting")


def test_a_form_sent_twice_makes_one_job(bob: Client) -> None:
    make_node()
    places = {bob.post("/jobs/new/", {**FORM, "key": "k1"})["Location"] for _ in range(2)}
    assert len(places) == 1 and Job.objects.count() == 1


def test_a_refused_form_comes_back_as_it_was_with_the_sentence_at_the_field(bob: Client) -> None:
    make_node()
    answer = bob.post("/jobs/new/", {**FORM, "gpus": "-4", "env": "A=<b>", "key": "k1"})
    text = answer.content.decode()
    assert answer.status_code == 400 and not Job.objects.exists()
    assert 'value="-4"' in text and "A=&lt;b&gt;" in text and 'value="k1"' in text and "Not submitted." in text
    assert answer.context["errors"]["gpus"]


def test_more_gpus_than_there_are_is_refused_by_name(bob: Client) -> None:
    make_node(gpus=4)
    answer = bob.post("/jobs/new/", {**FORM, "gpus": "64"})
    assert answer.status_code == 422 and "Can never start" in answer.content.decode()


def test_a_project_of_others_is_refused(bob: Client) -> None:
    make_node()
    answer = bob.post("/jobs/new/", {**FORM, "project": "charlie"})
    assert answer.status_code == 400 and answer.context["errors"]["project"]


def test_a_clone_starts_from_the_request_of_the_job(cast: Cast, bob: Client) -> None:
    make_node()
    spec = {"name": "first", "command": "a.py", "launcher": "torchrun", "resources": {"gpus": 2}, "env": {"A": "1"}}
    job = jobs.submit(specs.parse(spec), actor=cast.bob).job
    page = bob.get(f"/jobs/new/?from={job.pk}")
    assert page.context["values"]["command"] == "a.py" and page.context["values"]["gpus"] == 2
    assert "copied from" in page.content.decode() and yaml.safe_load(page.context["yaml"]) == spec


def test_nobody_clones_what_they_may_not_see(cast: Cast, bob: Client) -> None:
    make_node()
    job = jobs.submit(specs.parse({"command": "secret.py"}), actor=cast.charlie).job
    assert bob.get(f"/jobs/new/?from={job.pk}").status_code == 404


def test_the_example_can_be_submitted_as_it_is(bob: Client) -> None:
    make_node()
    page = bob.get("/jobs/new/?example=ddp")
    assert page.context["yaml"], "this checkout has the example"
    answer = bob.post("/jobs/new/", {"edited": "yaml", "yaml": page.context["yaml"], "key": "e"})
    assert answer.status_code == 302 and Job.objects.get().gpu_count == 4


def test_the_form_offers_models_with_what_is_free(cast: Cast, bob: Client) -> None:
    make_node("a", gpus=8, model="H100")
    make_node("b", gpus=4, model="A100", schedulable=False)
    jobs.submit(specs.parse({"command": "x", "resources": {"gpus": 3}}), actor=cast.charlie)
    scheduling.run_cycle()
    stock = {model.name: (model.free, model.total) for model in bob.get("/jobs/new/").context["models"]}
    assert stock == {"H100": (5, 8), "A100": (0, 4)}


@pytest.mark.parametrize(("method", "path"), [
    ("get", "/jobs/new/"), ("post", "/jobs/new/check/"), ("post", "/jobs/new/"),
])
def test_a_stranger_reaches_none_of_it(method: str, path: str, cast: Cast) -> None:
    answer = getattr(Client(), method)(path)
    assert answer.status_code == 302 and answer["Location"].startswith("/login/")
