"""What only administrators may do to a machine from its page, and the MIG plan that everyone may make."""

import uuid

import pytest
from django.test import Client

from portal.models import Event, HardwareOrder, Node, User
from portal.services import overview
from tests.portal.conftest import Cast, gpu_uuid, make_node
from tests.web.test_pages_nodes_hardware import CARD, cut, gpu, shown
from tests.web.test_pages_overview import hold, page, read

pytestmark = pytest.mark.django_db


@pytest.fixture
def node(cast: Cast, broker_url: str) -> Node:
    made = make_node("h1", gpus=4, driver="550.144", nvswitch=True)
    made.gpus.update(name=CARD)
    return made


def client_of(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def posts(node: Node) -> dict[str, dict[str, str]]:
    one = gpu_uuid(node.name, 0)
    order = HardwareOrder.objects.create(node=node, gpu=gpu(node, 3), kind="mig", order={"layout": []})
    return {
        f"/nodes/{node.name}/drain/": {"reason": "new fan"},
        f"/nodes/{node.name}/offer/": {},
        f"/nodes/{node.name}/release-driver/": {},
        f"/nodes/{node.name}/mig/apply/": {"gpu": one, "wanted": "7 × 1g.10gb"},
        f"/gpus/{one}/quarantine/": {"reason": "noise"},
        f"/gpus/{one}/release/": {},
        f"/gpus/{one}/end-process/": {"pid": "8"},
        f"/orders/{order.pk}/cancel/": {},
    }


def test_a_member_sees_no_button_and_may_press_none(cast: Cast, node: Node) -> None:
    read(gpu(node, 1), processes=[{"pid": 8, "command": "miner", "start_time": 1.0}])
    wanted = posts(node)
    before = (Event.objects.count(), HardwareOrder.objects.count())
    assert "data-act=" not in page(cast.bob, "/nodes/h1/")
    for path, body in wanted.items():
        assert client_of(cast.bob).post(path, body).status_code == 403, path
        assert client_of(cast.bob).get(path).status_code == 405, path
        assert Client().post(path, body).status_code == 302, path
    assert (Event.objects.count(), HardwareOrder.objects.count()) == before
    assert 'data-act="/gpus/' in page(cast.alice, "/nodes/h1/")


def test_an_admin_quarantines_and_releases_a_gpu(cast: Cast, node: Node) -> None:
    alice, uuid_ = client_of(cast.alice), gpu_uuid("h1", 1)
    html = alice.post(f"/gpus/{uuid_}/quarantine/", {"reason": "noise"}, follow=True).content.decode()
    assert "GPU 1 is quarantined." in html and "noise" in shown(html, 1)
    assert gpu(node, 1).state == "quarantined" and overview.cluster(cast.bob).groups[0].free == 3
    html = alice.post(f"/gpus/{uuid_}/release/", follow=True).content.decode()
    assert "GPU 1 is released." in html and gpu(node, 1).state == "ok"


def test_a_refusal_is_said_on_the_page(cast: Cast, node: Node) -> None:
    answer = client_of(cast.alice).post(f"/gpus/{gpu_uuid('h1', 1)}/end-process/", {"pid": "8"}, follow=True)
    assert "No such foreign process is on GPU 1 any more." in answer.content.decode()
    assert not HardwareOrder.objects.exists()


def test_an_admin_ends_a_foreign_process_but_never_that_of_a_job(cast: Cast, node: Node) -> None:
    one, alice = gpu(node, 0), client_of(cast.alice)
    mine = {"pid": 7, "start_time": 5.0, "attempt": str(uuid.uuid4())}
    read(one, processes=[mine, {"pid": 8, "command": "miner", "start_time": 6.0}])
    alice.post(f"/gpus/{one.uuid}/end-process/", {"pid": "7"})
    assert not HardwareOrder.objects.exists()
    alice.post(f"/gpus/{one.uuid}/end-process/", {"pid": "8"})
    order = HardwareOrder.objects.get()
    assert (order.kind, order.order["pid"], order.order["start_time"]) == ("stop_foreign", 8, 6.0)


def test_an_admin_drains_a_node_and_offers_it_again(cast: Cast, node: Node) -> None:
    alice = client_of(cast.alice)
    html = alice.post("/nodes/h1/drain/", {"reason": "new fan"}, follow=True).content.decode()
    assert "h1 gets no new jobs." in html and "new fan" in html and "Offer again" in html
    alice.post("/nodes/h1/offer/")
    assert Node.objects.get(pk=node.pk).schedulable


def test_an_admin_lets_the_driver_go(cast: Cast, node: Node) -> None:
    html = client_of(cast.alice).post("/nodes/h1/release-driver/", follow=True).content.decode()
    order = HardwareOrder.objects.get()
    assert order.kind == "release" and order.requested_by == cast.alice
    assert "Let go of the GPU driver for 60" in html


# --- MIG --------------------------------------------------------------------------------------------------------------


def plan(user: User, wanted: str, index: int = 0) -> str:
    query = {"gpu": gpu_uuid("h1", index), "wanted": wanted}
    answer = client_of(user).get("/nodes/h1/mig/plan/", query)
    assert answer.status_code == 200
    return answer.content.decode()


def test_a_plan_keeps_what_stays_and_names_what_goes(cast: Cast, node: Node) -> None:
    cut(node, 0, ("3g.40gb", 4, 4), ("1g.10gb", 0, 1))
    html = plan(cast.alice, "2 x 3g.40gb")
    assert html.count("stays") == 1 and html.count(">new<") == 1 and "Removed: 1g.10gb." in html
    assert "Cut GPU 0 into 2 × 3g.40gb?" in html and "1g.10gb will be gone." in html
    assert "This is how it is cut now." in plan(cast.alice, "3g.40gb + 1g.10gb")
    html = plan(cast.alice, "off")
    assert "whole GPU" in html and "Switch MIG off on GPU 0?" in html and "Removed: 1g.10gb + 3g.40gb." in html


def test_an_illegal_wish_gets_the_nearest_that_can_be_had(cast: Cast, node: Node) -> None:
    html = plan(cast.bob, "3 × 3g.40gb")
    assert "This GPU cannot be cut so." in html and 'data-wanted="2 × 3g.40gb"' in html
    assert "Apply" not in html
    assert "is not a slice" in plan(cast.bob, "three big ones")


def test_who_is_in_the_way_is_named_and_their_job_only_to_those_who_may_see_it(cast: Cast, node: Node) -> None:
    [one] = cut(node, 0, ("3g.40gb", 4, 4))
    job = hold(cast.charlie, [one], "secret-run")
    own, others = plan(cast.charlie, "7 × 1g.10gb"), plan(cast.bob, "7 × 1g.10gb")
    assert f"#{job.pk} secret-run" in own and "on GPU 0 · 3g.40gb" in own
    assert "a job of charlie" in others and "secret-run" not in others
    assert "An administrator can apply this." in own and "data-act" not in own
    assert "Apply when it is free" in plan(cast.alice, "7 × 1g.10gb")


def test_a_change_is_applied_followed_and_cancelled(cast: Cast, node: Node) -> None:
    hold(cast.bob, [gpu(node, 0)], "train")
    alice, body = client_of(cast.alice), {"gpu": gpu_uuid("h1", 0), "wanted": "7 × 1g.10gb"}
    html = alice.post("/nodes/h1/mig/apply/", body, follow=True).content.decode()
    order = HardwareOrder.objects.get()
    assert "The change of GPU 0 is under way." in html and "GPU 0: cut into 7 × 1g.10gb" in html
    assert 'class="on"' in html and f"/orders/{order.pk}/cancel/" in html
    assert "already under way" in plan(cast.alice, "off") or "how it is cut now" in plan(cast.alice, "off")
    assert "already being changed" in alice.post("/nodes/h1/mig/apply/", body, follow=True).content.decode()
    html = alice.post(f"/orders/{order.pk}/cancel/", follow=True).content.decode()
    assert "The change is cancelled." in html and not gpu(node, 0).draining


def test_cards_that_cannot_be_cut_have_no_editor(cast: Cast, broker_url: str) -> None:
    made = make_node("l1", gpus=2, model="L40S", memory_gib=45)
    made.gpus.update(name="NVIDIA L40S")
    assert 'id="mig"' not in page(cast.bob, "/nodes/l1/")
    answer = client_of(cast.bob).get("/nodes/l1/mig/plan/", {"gpu": gpu_uuid("l1", 0), "wanted": "1g.10gb"})
    assert answer.status_code == 404


def test_the_fragment_holds_the_parts_of_the_page(cast: Cast, node: Node) -> None:
    whole, fragment = page(cast.alice, "/nodes/h1/"), page(cast.alice, "/nodes/h1/?part=live")
    assert "<html" not in fragment
    parts = ("state", "actions", "problem", "facts", "cards", "mig", "health", "jobs", "orders", "links", "nics",
             "processes", "events")  # fmt: skip
    for part in parts:
        assert f'data-part="{part}"' in whole and f'data-part="{part}"' in fragment, part
