"""MIG over REST: anyone may look and plan, an administrator may change."""

from typing import Any

import pytest

from portal.models import Gpu, HardwareOrder
from portal.services import mig
from tests.portal.conftest import Api, Cast, gpu_uuid, make_node
from tests.portal.orders import started
from tests.portal.test_mig_workflow import a_slice, answered, cut, cut_card, shows, slice_uuid

Apis = dict[str, Api]


def wish(layout: Any, gpu: str | None = None) -> dict[str, Any]:
    return {"gpu": gpu or gpu_uuid("n1", 0), "layout": layout}


def test_a_node_tells_how_its_cards_are_cut_and_could_be(api: Apis, cast: Cast) -> None:
    gpu = cut_card()
    cut(gpu, "3g.40gb + 1g.10gb", "3g.40gb", "1g.10gb")
    told = api["bob"].get("/nodes/n1/mig").json()
    first, second = told["gpus"]
    assert (first["board"], first["enabled"], first["layout"]) == ("H100-80GB", True, "3g.40gb + 1g.10gb")
    assert [(piece["uuid"], piece["profile"], piece["start"]) for piece in first["slices"]] == [
        (slice_uuid(gpu.node, 0), "3g.40gb", 4), (slice_uuid(gpu.node, 1), "1g.10gb", 0)]  # fmt: skip
    assert first["presets"]["all-balanced"] == "3g.40gb + 2g.20gb + 2 × 1g.10gb"
    assert {row["name"]: row["starts"] for row in first["profiles"]}["3g.40gb"] == [0, 4]
    assert (second["enabled"], second["slices"], second["layout"], second["order"]) == (False, [], "off", None)


@pytest.mark.parametrize("layout", ["2 × 3g.40gb", ["3g.40gb", "3g.40gb"], {"3g.40gb": 2}, "all-3g.40gb"])
def test_a_plan_says_what_changes_and_changes_nothing(api: Apis, cast: Cast, layout: Any) -> None:
    cut_card()
    plan = api["bob"].post("/nodes/n1/mig/plan", wish(layout)).json()
    assert plan["layout"] == "2 × 3g.40gb" and plan["changes"] and plan["room"]["1g.10gb"] == 0
    assert plan["slices"] == [{"profile": "3g.40gb", "start": start, "change": "created"} for start in (0, 4)]
    assert plan["steps"][0] == "GPU 0 and its slices get no new work." and plan["blockers"] == []
    assert not HardwareOrder.objects.exists() and not Gpu.objects.exclude(draining="").exists()


def test_who_is_in_the_way_is_named_and_the_job_only_to_those_who_may_see_it(api: Apis, cast: Cast) -> None:
    gpu = cut_card()
    cut(gpu, "2 × 3g.40gb", "3g.40gb", "3g.40gb")
    attempt = started(cast.bob, resources=a_slice("3g.40gb"), name="secret")
    seen = {
        name: api[name].post("/nodes/n1/mig/plan", wish("off")).json()["blockers"][0] for name in ("bob", "charlie")
    }
    assert (seen["bob"]["job"], seen["bob"]["job_name"]) == (attempt.job_id, "secret")
    assert (seen["charlie"]["owner"], seen["charlie"]["job"], seen["charlie"]["job_name"]) == ("bob", None, None)
    assert seen["charlie"]["slice_uuid"] == attempt.allocations.get().gpu.uuid and seen["charlie"]["since"]


def test_an_illegal_layout_is_refused_with_the_nearest_legal_ones(api: Apis, cast: Cast) -> None:
    cut_card()
    answer = api["bob"].post("/nodes/n1/mig/plan", wish("2 × 4g.40gb"))
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (422, "illegal_layout")
    assert problem["errors"][0] == {"field": "layout", "message": "2 × 4g.40gb: a card has room for 1."}
    assert problem["errors"][1] == {"field": "nearest", "message": "4g.40gb + 3g.40gb"}
    assert "The nearest that can be: 4g.40gb + 3g.40gb (3g.40gb in place of one 4g.40gb)" in problem["detail"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (wish("half of it"), 400, "invalid_layout"),
        (wish("off", gpu="GPU-nobody"), 422, "unknown_gpu"),
        ({"layout": "off"}, 400, "invalid_parameter"),
        (wish("off") | {"force": True}, 400, "invalid_parameter"),
        (wish({"1g.10gb": "many"}), 400, "invalid_parameter"),
        (wish(["1g.10gb"] * 500), 400, "invalid_layout"),
    ],
)
def test_what_cannot_be_understood_is_refused(api: Apis, cast: Cast, body: Any, status: int, code: str) -> None:
    cut_card()
    answer = api["alice"].post("/nodes/n1/mig/apply", body)
    assert (answer.status_code, answer.json()["type"]) == (status, code) and answer.json()["errors"]


def test_a_card_that_cannot_be_cut_says_so(api: Apis, cast: Cast) -> None:
    make_node(model="L40S")
    answer = api["alice"].post("/nodes/n1/mig/plan", wish("off"))
    assert (answer.status_code, answer.json()["type"]) == (422, "not_mig_capable")
    assert api["bob"].get("/nodes/n1/mig").json()["gpus"] == []


def test_only_an_administrator_may_cut_and_take_back(api: Apis, cast: Cast) -> None:
    cut_card()
    refused = api["bob"].post("/nodes/n1/mig/apply", wish("2 × 3g.40gb"))
    assert (refused.status_code, refused.json()["type"]) == (403, "not_permitted")
    assert api["nobody"].post("/nodes/n1/mig/apply", wish("2 × 3g.40gb")).status_code == 401
    order = api["alice"].post("/nodes/n1/mig/apply", wish("2 × 3g.40gb"))
    assert order.status_code == 202
    body = {"order": order.json()["id"]}
    assert api["bob"].post("/nodes/n1/mig/cancel", body).status_code == 403
    assert api["alice"].post("/nodes/n1/mig/cancel", body).json()["state"] == "cancelled"


def test_a_change_is_followed_from_request_to_end(api: Apis, cast: Cast) -> None:
    gpu = cut_card()
    asked = api["alice"].post("/nodes/n1/mig/apply", wish("2 × 3g.40gb")).json()
    assert (asked["state"], asked["layout"], asked["requested_by"]) == ("waiting", "2 × 3g.40gb", "alice")
    assert api["bob"].get("/nodes/n1/mig").json()["gpus"][0]["order"]["id"] == asked["id"]
    again = api["alice"].post("/nodes/n1/mig/apply", wish("off"))
    assert (again.status_code, again.json()["type"]) == (409, "no_change")
    busy = api["alice"].post("/nodes/n1/mig/apply", wish("all-1g.10gb"))
    assert (busy.status_code, busy.json()["type"]) == (409, "change_underway")
    mig.advance()
    late = api["alice"].post("/nodes/n1/mig/cancel", {"order": asked["id"]})
    assert (late.status_code, late.json()["type"]) == (409, "order_underway")
    answered(HardwareOrder.objects.get(), "done")
    shows(gpu.node, "3g.40gb", "3g.40gb")
    mig.advance()
    over = api["bob"].get(f"/nodes/n1/mig/orders/{asked['id']}").json()
    assert over["state"] == "done" and over["finished_at"]
    assert api["bob"].get("/nodes/n1/mig").json()["gpus"][0]["order"] is None
    assert api["bob"].get("/nodes/n1/mig/orders/00000000-0000-0000-0000-000000000000").status_code == 404


def test_cards_and_slices_are_counted_as_what_jobs_can_have(api: Apis, cast: Cast) -> None:
    gpu = cut_card()
    counts = lambda: tuple(api["bob"].get("/nodes/n1").json()[name] for name in ("gpus_total", "gpus_free"))  # noqa: E731
    cut(gpu, "2 × 3g.40gb", "3g.40gb", "3g.40gb")
    assert counts() == (3, 3) and len(api["bob"].get("/gpus?free=true").json()["gpus"]) == 3
    started(cast.bob, resources=a_slice("3g.40gb"))
    assert counts() == (3, 2)
    api["alice"].post("/nodes/n1/mig/apply", wish("off"))
    assert counts() == (3, 1), "what is drained is not free"
    listed = api["bob"].get("/nodes").json()["nodes"][0]
    assert (listed["gpus_total"], listed["gpus_free"]) == (3, 1)
    HardwareOrder.objects.all().delete()
    Gpu.objects.filter(uuid=gpu.uuid).update(draining="", state="quarantined")
    Gpu.objects.update(draining="")
    listed = api["bob"].get("/nodes").json()["nodes"][0]
    assert counts() == (3, 1) == (listed["gpus_total"], listed["gpus_free"]), "nor a slice of a card that is fenced"
