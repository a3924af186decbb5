"""An administrator at a real browser before a machine with every trouble: sees it, releases a GPU, cuts a card."""

import re
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.system.test_browser_jobs import WATCHED, WCAG, Visit, chromium, open_page, pytestmark
from tests.system.yard import Yard, running

__all__ = ["chromium", "pytestmark"]

FAULTS = "gpu1:lost@15s gpu2:memstuck gpu3:xid79@15s+5s gpu4:nometric=power gpu5:nvlink2down gpu6:throttle"


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    with running(simulate="DGX-H100-8", faults=FAULTS) as yard:
        yield yard


@pytest.fixture
def visit(chromium: Browser, yard: Yard) -> Iterator[Visit]:
    """Signs somebody in, in a fresh browser. Afterwards: no script of a page failed and no policy was broken."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def enter(user: str = "alice", theme: str = "light", width: int = 1440) -> Page:
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme))  # type: ignore[arg-type]
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
        page.on("console", lambda message: complaints.append(message.text) if "Security" in message.text else None)
        open_page(page, yard, "/login/")
        page.get_by_label("Username").fill(user)
        page.get_by_label("Password", exact=True).fill((yard.state_dir / "demo.password").read_text())
        page.keyboard.press("Enter")
        page.wait_for_url(f"{yard.stack.options.url}/")
        return page

    yield enter
    for context in contexts:
        context.close()
    assert not complaints


def node_page(page: Page, yard: Yard) -> None:
    name = yard.bob.nodes()[0]["name"]
    yard.wait("every trouble has come", lambda: {1, 2, 3} <= fenced(yard), 60)
    open_page(page, yard, f"/nodes/{name}/")
    expect(page.locator("#gy-live span")).to_have_text("Live", timeout=WATCHED)


def fenced(yard: Yard) -> set[int]:
    return {gpu["index"] for gpu in yard.bob.gpus() if gpu["state"] != "ok"}


def answer(page: Page, label: str) -> None:
    """The dialog that asks once."""
    page.locator("#act-dialog").get_by_role("button", name=label).click()


def test_every_trouble_is_seen_with_its_reason_and_its_neighbours_are_well(visit: Visit, yard: Yard) -> None:
    page = visit("bob")
    node_page(page, yard)
    for index, word, reason in (
        (1, "Lost", "."), (2, "Foreign process", "no process explains"), (3, "Quarantined", "Xid 79"),
    ):  # fmt: skip
        card = page.locator(f"#gpu-{index}")
        expect(card.locator(".top .st")).to_have_text(word, timeout=WATCHED)
        expect(card.locator(".why-state")).to_contain_text(reason)
    expect(page.locator("#gpu-4 [data-meter=power_mw] .na")).to_have_attribute("title", "this GPU does not offer it")
    expect(page.locator("#gpu-5 .alarm", has_text="NVLink")).to_contain_text("17 of 18 up", timeout=WATCHED)
    expect(page.locator("#gpu-6 .alarm", has_text="Held back")).to_be_visible(timeout=WATCHED)
    for index in (0, 4, 7):
        expect(page.locator(f"#gpu-{index} .top .st")).to_have_text("Free")
    expect(page.locator("#health")).to_contain_text("Xid")
    expect(page.locator(".topo .lab.down")).to_have_text("17 of 18")
    assert page.locator("[data-act]").count() == 0


def test_the_overview_leads_to_what_wants_attention(visit: Visit, yard: Yard) -> None:
    page = visit("bob")
    node_page(page, yard)
    open_page(page, yard, "/")
    page.locator("[data-part=attention]").get_by_text("quarantined").click()
    page.wait_for_url(re.compile(r"#gpu-3$"))
    expect(page.locator("#gpu-3")).to_be_in_viewport()


def test_an_admin_releases_and_fences_a_gpu_drains_the_node_and_offers_it_again(visit: Visit, yard: Yard) -> None:
    page = visit()
    node_page(page, yard)
    page.locator("#gpu-3").get_by_role("button", name="Release").click()
    answer(page, "Release")
    expect(page.locator("#gpu-3 .top .st")).to_have_text("Free", timeout=WATCHED)
    page.locator("#gpu-3").get_by_role("button", name="Quarantine").click()
    page.get_by_label("Why").fill("Xid 79 came back")
    answer(page, "Quarantine")
    expect(page.locator("#gpu-3 .why-state")).to_contain_text("Xid 79 came back", timeout=WATCHED)
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_label("Why").fill("a new fan")
    answer(page, "Drain")
    expect(page.locator("[data-part=state]")).to_contain_text("a new fan")
    expect(page.locator("#gpu-0 .top .st")).to_have_text("Draining")
    page.get_by_role("button", name="Offer again").click()
    answer(page, "Offer again")
    expect(page.locator("#gpu-0 .top .st")).to_have_text("Free", timeout=WATCHED)


def test_a_card_is_planned_cut_and_used_and_the_page_follows_by_itself(visit: Visit, yard: Yard) -> None:
    page = visit()
    node_page(page, yard)
    editor = page.locator("#mig")
    editor.get_by_role("button", name="GPU 7").click()
    page.get_by_label("Wanted layout").fill("4 × 3g.40gb")
    expect(editor).to_contain_text("This GPU cannot be cut so.")
    editor.locator(".nearest .chip").first.click()
    expect(page.get_by_label("Wanted layout")).to_have_value("2 × 3g.40gb")
    editor.get_by_role("button", name="Apply").click()
    expect(page.locator("#act-dialog")).to_contain_text("Cut GPU 7 into 2 × 3g.40gb?")
    answer(page, "Apply")
    page.wait_for_load_state()
    page.evaluate("window.notReloaded = true")
    expect(page.locator("#gpu-7 .top .st")).to_have_text("MIG, 2 slices", timeout=60_000)
    expect(page.locator("#gpu-7 .slices li")).to_have_count(2)
    expect(page.locator("#orders")).to_contain_text("GPU 7: cut into 2 × 3g.40gb")
    number = int(yard.bob.submit({"command": "sleep 300", "resources": {"gpus": 1, "mig": "3g.40gb"}})["id"])
    yard.reaches(number, "running")
    expect(page.locator("#gpu-7 .slices")).to_contain_text("bob", timeout=WATCHED)
    assert page.evaluate("window.notReloaded") is True
    open_page(page, yard, "/")
    expect(page.locator(".gy-grid .gc.mig > span")).to_have_count(3)  # two slices, and what no slice covers
    yard.bob.cancel(number)
    yard.ended(number, timeout_s=90)


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_troubled_pages_are_accessible_and_fit(theme: str, width: int, visit: Visit, yard: Yard) -> None:
    page = visit("alice", theme, width)
    node_page(page, yard)
    name = yard.bob.nodes()[0]["name"]
    problems = []
    for path in (f"/nodes/{name}/", "/nodes/", "/"):
        open_page(page, yard, path)
        for fold in page.locator("details.gmore > summary").all()[:1]:
            fold.click()
        found = Axe().run(page, options=WCAG)
        if found.violations_count:
            problems.append(f"{path}\n{found.generate_report()}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path} scrolls sideways"
    assert not problems, "\n".join(problems)
