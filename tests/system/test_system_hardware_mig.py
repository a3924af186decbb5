"""A card of a running portal is cut, gives a job a slice, and is made whole again: every process is the real one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from client.api import Client
from client.errors import Refused
from tests.system.yard import Yard

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SHOW = "sh -c 'echo sees=$CUDA_VISIBLE_DEVICES; sleep 1'"


class Admin:
    """alice at the REST interface."""

    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        self.client: Client = yard.stack.client("alice")
        self.node = self.client.nodes()[0]["name"]
        self.gpu = next(gpu for gpu in self.client.gpus() if gpu["index"] == 7)["uuid"]

    def card(self) -> dict[str, Any]:
        told = self.client._json("GET", f"/nodes/{self.node}/mig")
        return next(card for card in told["gpus"] if card["uuid"] == self.gpu)

    def apply(self, layout: str) -> dict[str, Any]:
        body = {"gpu": self.gpu, "layout": layout}
        order: dict[str, Any] = self.client._json("POST", f"/nodes/{self.node}/mig/apply", json=body)
        return order

    def plan(self, layout: str) -> dict[str, Any]:
        body = {"gpu": self.gpu, "layout": layout}
        planned: dict[str, Any] = self.client._json("POST", f"/nodes/{self.node}/mig/plan", json=body)
        return planned

    def finished(self, order: dict[str, Any]) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.client._json("GET", f"/nodes/{self.node}/mig/orders/{order['id']}")
            return found if found["finished_at"] else None

        return self.yard.wait(f"the card is {order['layout']}", look, 60)

    def slices(self) -> list[dict[str, Any]]:
        return [gpu for gpu in self.client.gpus() if gpu["parent_uuid"] == self.gpu]


@pytest.fixture
def admin(yard: Yard) -> Iterator[Admin]:
    """Afterwards the card is whole again, whatever a test left."""
    admin = Admin(yard)
    yield admin
    for job in yard.bob.jobs(limit=50, state="active"):
        yard.bob.cancel(job["id"])
    if admin.card()["order"]:
        admin.finished(admin.card()["order"])
    if admin.card()["enabled"]:
        assert admin.finished(admin.apply("off"))["state"] == "done"


def test_a_card_is_cut_used_in_slices_and_made_whole_again(yard: Yard, admin: Admin) -> None:
    order = admin.finished(admin.apply("2 × 3g.40gb"))
    assert (order["state"], order["message"]) == ("done", "GPU 7 is cut into 2 × 3g.40gb.")
    slices = admin.slices()
    assert len(slices) == 2 and {one["mig_profile"] for one in slices} == {"3g.40gb"}
    assert all(one["uuid"].startswith("MIG-") and one["free"] for one in slices)
    yard.wait("the places of the slices are known", lambda: len(admin.card()["slices"]) == 2)

    number = yard.bob.submit({"command": SHOW, "resources": {"gpus": 1, "mig": "3g.40gb"}})["id"]
    assert yard.ended(number)["state"] == "succeeded"
    assert yard.log(number).decode().strip() in {f"sees={one['uuid']}" for one in slices}
    whole = yard.submit(SHOW, gpus=7)
    yard.ended(whole)
    assert admin.gpu not in yard.log(whole).decode()
    with pytest.raises(Refused, match="largest node has 7"):
        yard.submit("sleep 1", gpus=8)

    order = admin.finished(admin.apply("off"))
    assert (order["state"], admin.slices()) == ("done", [])
    yard.wait("the card is free again", lambda: yard.free_gpus() == 8)


def test_a_change_waits_for_the_job_on_a_slice_and_gives_no_new_work_meanwhile(yard: Yard, admin: Admin) -> None:
    admin.finished(admin.apply("7 × 1g.10gb"))
    yard.wait("the places of the slices are known", lambda: len(admin.card()["slices"]) == 7)
    number = yard.bob.submit({"command": "sleep 300", "resources": {"gpus": 1, "mig": "1g.10gb"}})["id"]
    yard.reaches(number, "running")
    order = admin.apply("3g.40gb + 2 × 2g.20gb")
    assert order["state"] == "waiting" and order["message"] == "Waits for 1 job (bob)."
    behind = yard.bob.submit({"command": "sleep 1", "resources": {"gpus": 1, "mig": "1g.10gb"}})["id"]
    yard.wait("it is held", lambda: (yard.job(behind)["reason"] or {}).get("code") == "wait_gpus")
    yard.bob.cancel(behind)
    yard.bob.cancel(number)
    yard.ended(number, timeout_s=90)
    assert admin.finished(order)["state"] == "done"
    assert sorted(one["mig_profile"] for one in admin.slices()) == ["2g.20gb", "2g.20gb", "3g.40gb"]


def test_a_change_outlives_the_worker_of_its_node(yard: Yard, admin: Admin) -> None:
    for layout in ("4g.40gb + 3g.40gb", "off"):
        order = admin.apply(layout)
        yard.kill("node")
        assert admin.finished(order)["state"] == "done"
        yard.wait("its places are known", lambda layout=layout: admin.card()["layout"] == layout)


def test_a_process_that_no_job_explains_is_named_and_waited_for(yard: Yard, admin: Admin) -> None:
    code = "import time; print('up', flush=True); time.sleep(300)"
    seen = os.environ | {"CUDA_VISIBLE_DEVICES": admin.gpu}
    with subprocess.Popen([sys.executable, "-c", code], env=seen, stdout=subprocess.PIPE) as stranger:
        try:
            yard.wait("it is seen", lambda: admin.plan("2 × 3g.40gb")["blockers"])
            (blocker,) = admin.plan("2 × 3g.40gb")["blockers"]
            assert (blocker["process"], blocker["job"]) == (stranger.pid, None)
            assert blocker["owner"] and blocker["since"]
            order = admin.apply("2 × 3g.40gb")
            assert order["message"].startswith(f"Waits for process {stranger.pid} of ")
        finally:
            stranger.kill()
    assert admin.finished(order)["state"] == "done"
