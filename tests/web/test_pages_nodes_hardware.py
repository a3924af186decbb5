"""The page of a node: its GPUs in every state, what is unknown, slices, links, processes, health."""

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from portal.models import Gpu, Health, Node, User
from portal.services import gpu_facts, node_details, overview
from portal.services.cells import Cell, cells
from tests.portal.conftest import Cast, gpu_uuid, make_node
from tests.web.test_pages_overview import hold, page, queries, read

pytestmark = pytest.mark.django_db
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def node(cast: Cast, broker_url: str) -> Node:
    made = make_node("h1", gpus=4, driver="550.144", nvswitch=True)
    made.gpus.update(name=CARD)
    return made


def gpu(node: Node, index: int) -> Gpu:
    return node.gpus.get(index=index, parent_uuid="")


def told(one: Gpu, **hardware: Any) -> None:
    one.hardware = {"uuid": one.uuid, **hardware}
    one.save(update_fields=["hardware"])


def cut(node: Node, index: int, *slices: tuple[str, int, int]) -> list[Gpu]:
    """As inventory and hardware reports leave it: (profile, start, memory slots)."""
    card = gpu(node, index)
    made = [
        Gpu.objects.create(
            node=node, uuid=f"MIG-{card.uuid[4:]}-{start}", index=index, vendor="nvidia", name=f"{CARD} MIG {profile}",
            model="H100", parent_uuid=card.uuid, mig_profile=profile,
        )
        for profile, start, _ in slices
    ]
    card.mig_enabled = True
    card.save(update_fields=["mig_enabled"])
    instances = [
        {"uuid": one.uuid, "profile": profile, "start": start, "size": size}
        for one, (profile, start, size) in zip(made, slices, strict=True)
    ]
    told(card, mig={"enabled": True, "pending": True, "profiles": [], "instances": instances})
    return made


def shown(html: str, index: int) -> str:
    """The card of a GPU."""
    begin = html.index(f'id="gpu-{index}"')
    return html[begin:html.index("</section>", begin)]


def card_cell(user: User, node: Node, index: int) -> Cell:
    return cells(user, [Node.objects.get(pk=node.pk)])[node.pk][index]


# --- states and facts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "word", "kind"), [
    ("dirty", "Foreign process", "k-dirty"), ("suspect", "Suspect", "k-suspect"),
    ("quarantined", "Quarantined", "k-quar"), ("lost", "Lost", "k-lost"),
])
def test_every_state_has_its_badge_its_reason_and_since_when(
    cast: Cast, node: Node, state: str, word: str, kind: str
) -> None:
    since = timezone.now() - timedelta(minutes=12)
    node.gpus.filter(index=2).update(state=state, state_reason="It smells of smoke.", state_since=since)
    html = shown(page(cast.bob, "/nodes/h1/"), 2)
    assert f'class="st {kind}"' in html and word in html
    assert "It smells of smoke." in html and "since 12 min" in html
    assert "It smells" not in shown(page(cast.bob, "/nodes/h1/"), 1)


def test_a_card_that_drains_says_why(cast: Cast, node: Node) -> None:
    node.gpus.filter(index=1).update(draining="It is about to be cut.")
    html = shown(page(cast.bob, "/nodes/h1/"), 1)
    assert "Draining" in html and "It is about to be cut." in html
    assert overview.cluster(cast.bob).groups[0].free == 3


def test_what_wants_a_look_is_marked_and_what_is_unknown_has_its_reason(cast: Cast, node: Node) -> None:
    one = gpu(node, 0)
    told(one, pcie_generation=4, pcie_width=8, pcie_generation_max=5, pcie_width_max=16, row_remap_pending=True,
         links=[{"link": number, "active": number > 4} for number in range(18)])
    read(one, throttle_reasons=0x40, sm_clock_mhz=1110, ecc_uncorrected=None, missing={"ecc_uncorrected": "timeout"})
    facts = {fact.name: fact for fact in gpu_facts.live_facts(card_cell(cast.bob, node, 0))}
    assert (facts["NVLink"].text, facts["NVLink"].alarming) == ("13 of 18 up", True)
    assert (facts["PCIe"].text, facts["PCIe"].alarming) == ("gen 4 ×8 of gen 5 ×16", True)
    assert facts["Held back by"].text == "too hot, slowed by the hardware" and facts["Held back by"].alarming
    assert facts["ECC"].text is None and facts["ECC"].why == "the driver did not answer in time"
    assert facts["Row remap"].alarming
    html = shown(page(cast.bob, "/nodes/h1/"), 0)
    assert html.count('class="alarm"') == 4 and 'title="the driver did not answer in time"' in html


def test_nothing_told_is_not_taken_for_zero(cast: Cast, node: Node) -> None:
    facts = gpu_facts.live_facts(card_cell(cast.bob, node, 0))
    assert {fact.name for fact in facts} == {"SM clock", "Held back by", "PCIe", "ECC"}
    assert all(fact.text is None and fact.why and not fact.alarming for fact in facts)
    about = {fact.name: fact for fact in gpu_facts.identity(card_cell(cast.bob, node, 0))}
    assert about["Serial"].text is None and about["Rows remapped"].why == gpu_facts.NOT_TOLD
    assert about["UUID"].text == gpu_uuid("h1", 0) and about["UUID"].copy


def test_what_a_lost_gpu_was_like_is_not_shown_as_if_it_were_so(cast: Cast, node: Node) -> None:
    told(gpu(node, 0), pcie_generation=5, pcie_width=16, links=[{"link": 0, "active": True}])
    node.gpus.filter(index=0).update(state="lost", state_reason="It fell off the bus.")
    facts = gpu_facts.live_facts(card_cell(cast.bob, node, 0))
    assert {"PCIe", "NVLink"} <= {fact.name for fact in facts}
    assert {(fact.text, fact.why) for fact in facts} == {(None, "the GPU is lost")}


@pytest.mark.parametrize(("bits", "words"), [
    (0, ""), (0x1, "idle"), (0x4 | 0x20, "power limit, too warm"), (0x4 | 0x4000, "power limit, 0x4000"),
])
def test_reasons_are_words_and_a_strange_bit_is_kept(bits: int, words: str) -> None:
    assert gpu_facts.reasons_in_words(bits) == words


# --- slices -----------------------------------------------------------------------------------------------------------


def test_a_cut_card_is_one_cell_with_its_slices_by_compute_and_the_rest_hatched(cast: Cast, node: Node) -> None:
    slices = cut(node, 3, ("3g.40gb", 4, 4), ("1g.10gb", 0, 1), ("1g.10gb", 1, 1))
    hold(cast.bob, [slices[0]], "tune")
    Gpu.objects.filter(pk=slices[2].pk).update(state="dirty", state_reason="pid 8")
    card = card_cell(cast.bob, node, 3)
    assert (card.state, card.unused, card.free) == ("mig", 2, False)
    assert [(one.gpu.mig_profile, one.state) for one in card.slices] == [
        ("1g.10gb", "free"), ("1g.10gb", "dirty"), ("3g.40gb", "mine"),
    ]
    html = page(cast.bob)
    assert html.count('<a class="gc ') == 4
    strip = '<span class="f" style="--w:1"></span><span class="d" style="--w:1"></span>' \
            '<span class="m" style="--w:3"></span><span class="u" style="--w:2"></span>'
    assert strip in html and "3g.40gb mine (bob)" in html


def test_slices_are_counted_beside_whole_cards_never_as_such(cast: Cast, node: Node) -> None:
    slices = cut(node, 0, ("3g.40gb", 0, 4), ("2g.20gb", 4, 2))
    hold(cast.charlie, [slices[0]])
    view = overview.cluster(cast.bob)
    group = view.groups[0]
    assert (group.total, group.free, group.split, group.slices, group.slices_free, group.off) == (4, 3, 1, 2, 1, 0)
    assert view.counts == {"free": 4, "busy": 1, "mig": 1}
    [holding] = view.holdings
    assert (holding.models, holding.gpus, round(holding.share, 3)) == ("1× H100 3g.40gb", 1, 0.429)
    html = page(cast.bob)
    assert "1 in MIG slices, 1 of 2 free" in html and "MIG <b>1</b>" in html


@pytest.mark.parametrize(("parent", "expected"), [
    ({"state": "quarantined"}, ["quarantined", "quarantined"]),
    ({"state": "suspect"}, ["busy", "suspect"]),
    ({"draining": "It is about to be cut."}, ["busy", "draining"]),
])
def test_what_is_wrong_with_a_card_is_wrong_with_its_slices(
    cast: Cast, node: Node, parent: dict[str, str], expected: list[str]
) -> None:
    slices = cut(node, 1, ("3g.40gb", 0, 4), ("2g.20gb", 4, 2))
    hold(cast.charlie, slices[:1])
    node.gpus.filter(index=1, parent_uuid="").update(**parent)
    assert [one.state for one in card_cell(cast.bob, node, 1).slices] == expected


def test_a_card_with_mig_on_and_no_slice_offers_nothing(cast: Cast, node: Node) -> None:
    cut(node, 2)
    card = card_cell(cast.bob, node, 2)
    assert (card.state, card.unused, card.slices) == ("mig", 7, [])
    assert "no slice has been made" in shown(page(cast.bob, "/nodes/h1/"), 2)


def test_slices_cost_no_more_queries(cast: Cast, node: Node) -> None:
    hold(cast.bob, cut(node, 0, ("3g.40gb", 0, 4)))
    small = {path: queries(cast.bob, path) for path in ("/", "/nodes/h1/")}
    for index in (1, 2, 3):
        for one in cut(node, index, *[("1g.10gb", start, 1) for start in range(7)]):
            hold(cast.bob, [one], f"job-{one.uuid[-8:]}")
    assert {path: queries(cast.bob, path) for path in small} == small


# --- links, processes, health -----------------------------------------------------------------------------------------


def test_network_cards_stand_in_the_matrix_and_name_their_nearest_gpus(cast: Cast, node: Node) -> None:
    uuids = [gpu_uuid("h1", index) for index in range(4)]
    distances = dict(zip(uuids, ("PIX", "PIX", "NODE", "SYS"), strict=True))
    node.nics = [{"name": "mlx5_0", "rdma": True, "rate_gbps": 400.0, "state": "ACTIVE", "distances": distances}]
    node.save(update_fields=["nics"])
    detail = node_details.detail(cast.bob, node)
    assert [row[-1].kind for _, row in detail.matrix] == ["PIX", "PIX", "NODE", "SYS"]
    assert (detail.nics[0].nearest_kind, detail.nics[0].nearest) == ("PIX", "0, 1")
    html = page(cast.bob, "/nodes/h1/")
    assert "400 Gb/s" in html and "18 NVLinks through NVSwitch" in html


def test_between_a_cut_card_and_its_neighbours_there_is_no_nvlink(cast: Cast, node: Node) -> None:
    cut(node, 0, ("3g.40gb", 0, 4))
    matrix = node_details.detail(cast.bob, node).matrix
    assert [(cell.kind, cell.why) for cell in matrix[0][1][1:]] == [("", "MIG")] * 3
    assert matrix[1][1][2].kind == "NV18" and matrix[1][1][2].both_free


def test_a_process_leads_to_its_job_only_for_those_who_may_see_it(cast: Cast, node: Node) -> None:
    job = hold(cast.charlie, [gpu(node, 0)], "secret-run")
    attempt = str(job.attempts.get().pk)
    started = timezone.now().timestamp() - 7200
    read(gpu(node, 0), processes=[{"pid": 7, "command": "python t.py", "attempt": attempt, "start_time": started}])
    read(gpu(node, 1), processes=[{"pid": 8, "command": "miner", "user": "root", "container": "8f1a2b3c4d5e6f"}])
    own, others = page(cast.charlie, "/nodes/h1/"), page(cast.bob, "/nodes/h1/")
    assert f"#{job.pk} secret-run" in own and "2 h 00 m" in own
    assert "secret-run" not in others and "a job" in others
    assert "Not from gpuyard" in others and "8f1a2b3c4d5e" in others


def test_a_process_in_a_slice_is_named_once(cast: Cast, node: Node) -> None:
    [one] = cut(node, 0, ("3g.40gb", 0, 4))
    process = {"pid": 7, "command": "python t.py", "user": "bob"}
    read(one, processes=[process])
    read(gpu(node, 0), processes=[process, {"pid": 9, "command": "other"}])
    found = node_details.detail(cast.bob, node).processes
    assert [(row.pid, row.cell.label) for row in found] == [(7, "GPU 0 · 3g.40gb"), (9, "GPU 0")]


def test_health_says_what_it_means_and_what_to_do_the_open_ones_first(cast: Cast, node: Node) -> None:
    now = timezone.now()
    Health.objects.create(
        node=node, gpu=gpu(node, 3), key="a", kind="xid", code=79, severity="critical", message="Fallen off the bus",
        meaning="It no longer answers.", advice="Power-cycle the machine.", at=now - timedelta(hours=1), count=3,
    )
    Health.objects.create(node=node, key="b", kind="driver", severity="info", message="Reader restarted",
                          advice="Nothing to do.", at=now, resolved_at=now)
    detail = node_details.detail(cast.bob, node)
    assert [row.key for row in detail.health] == ["a", "b"] and detail.open_health == 1
    html = page(cast.bob, "/nodes/h1/")
    for words in ("Fallen off the bus", "It no longer answers.", "Power-cycle the machine.", "3×", "Reader restarted"):
        assert words in html
    assert "Nothing to do." not in html


def test_the_history_goes_back_seven_days_and_no_further(cast: Cast, node: Node) -> None:
    client = Client()
    client.force_login(cast.bob)
    for window in ("900", "21600", "604800"):
        found = client.get(f"/nodes/h1/?part=charts&window={window}").json()
        assert [one["label"] for one in found["gpus"]] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert client.get("/nodes/h1/?part=charts&window=99").status_code == 400


# --- the head of the overview -----------------------------------------------------------------------------------------


def test_what_wants_attention_leads_to_its_place(cast: Cast, node: Node) -> None:
    node.gpus.filter(index=2).update(state="quarantined")
    slices = cut(node, 1, ("3g.40gb", 0, 4), ("2g.20gb", 4, 2))
    Gpu.objects.filter(pk=slices[1].pk).update(state="dirty")
    away = make_node("h2", gpus=2)
    Node.objects.filter(pk=away.pk).update(
        state="unreachable", last_heartbeat_at=timezone.now() - timedelta(minutes=6)
    )
    make_node("h3", gpus=0, problem="The driver is not loaded.")
    html = page(cast.bob)
    head = html[html.index('data-part="attention"'):html.index('id="free-title"')]
    assert '<a class="plainlink" href="/nodes/h1/#gpu-2">' in head and "1 GPU quarantined" in head
    assert 'href="/nodes/h1/#gpu-1">' in head and "1 foreign process" in head
    assert "h2 unreachable 6 min" in head and "Problem on h3" in head
    assert 'id="gpu-2"' in page(cast.bob, "/nodes/h1/")


def test_why_a_value_is_missing_is_said_for_people(cast: Cast, node: Node) -> None:
    cut(node, 0, ("3g.40gb", 0, 4))
    read(gpu(node, 0), utilization_percent=None, missing={"utilization_percent": "not_supported"})
    read(gpu(node, 1), utilization_percent=None, power_mw=None, missing={"power_mw": "error:999"})
    read(gpu(node, 2), missing={"gpu": "gpu_lost"})
    why = [[card_cell(cast.bob, node, index).why_missing(name) for name in ("utilization_percent", "power_mw")]
           for index in range(4)]  # fmt: skip
    assert why == [
        ["the driver gives none while MIG is on", "the driver gives none"],
        ["the driver gives none", "the driver answered with error 999"],
        ["the GPU is lost", "the GPU is lost"],
        ["no reading yet", "no reading yet"],
    ]
