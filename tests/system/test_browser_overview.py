"""A person at a real browser: the grid moves by itself, the keyboard walks it, a broken stream says so."""

import os
import re
import signal

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.system.test_browser_jobs import WATCHED, WCAG, Visit, chromium, open_page, pytestmark, visit
from tests.system.yard import Yard

__all__ = ["chromium", "pytestmark", "visit"]


def label(page: Page) -> str:
    """Of the cell that has the keyboard."""
    return str(page.evaluate("document.activeElement.getAttribute('aria-label')"))


def marker(page: Page, word: str) -> None:
    expect(page.locator("#gy-live span")).to_have_text(re.compile(word), timeout=40_000)


def test_a_job_takes_its_cells_and_gives_them_back_before_ones_eyes(visit: Visit, yard: Yard) -> None:
    page = visit()
    marker(page, "Live")
    expect(page.locator(".gy-grid .gc.free")).to_have_count(8)
    page.evaluate("window.notReloaded = true")
    number = yard.submit("sleep 300", gpus=3, name="seen")
    expect(page.locator(".gy-grid .gc.mine")).to_have_count(3, timeout=WATCHED)
    expect(page.locator(".free-c .big")).to_have_text("5")
    running = page.locator("[data-part=running]")
    expect(running).to_contain_text("seen")
    expect(running.locator(f'[data-job-use="{number}"]')).to_have_text(re.compile(r"^\d+%$"), timeout=WATCHED)
    page.locator(".gy-grid .gc.mine").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text(f"seen #{number}, rank 0")
    expect(page.locator(".gy-grid .gc.same")).to_have_count(2)
    yard.bob.cancel(number)
    expect(page.locator(".gy-grid .gc.free")).to_have_count(8, timeout=WATCHED)
    expect(running).to_contain_text("Nothing of yours runs.")
    assert page.evaluate("window.notReloaded") is True


def test_values_move_where_they_stand(visit: Visit, yard: Yard) -> None:
    page = visit()
    number = yard.count_job(100_000, 0.001)
    cell = page.locator(".gy-grid .gc.mine")
    expect(cell).to_have_count(1, timeout=WATCHED)
    cell.evaluate("cell => { cell.kept = true; }")
    yard.wait("its process holds memory", lambda: int(cell.get_attribute("data-memory") or 0) > 0, 20)
    place = cell.bounding_box()
    seen: set[str] = set()
    yard.wait("its values move", lambda: len(seen.add(values(cell)) or seen) > 1, 30)  # type: ignore[func-returns-value]
    assert cell.evaluate("cell => cell.kept") is True and cell.bounding_box() == place
    yard.bob.cancel(number)


def values(cell: object) -> str:
    return str(cell.evaluate("c => [c.dataset.utilization, c.dataset.power, c.dataset.temperature].join()"))  # type: ignore[attr-defined]


def test_the_keyboard_walks_the_grid_and_opens_a_gpu(visit: Visit, yard: Yard) -> None:
    page = visit()
    expect(page.locator(".gy-grid .gc[tabindex='0']")).to_have_count(1)
    page.locator(".gy-grid .gc").first.focus()
    for key, index in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowUp", 1)):
        page.keyboard.press(key)
        assert re.search(rf"GPU {index}, Free", label(page)), label(page)
    expect(page.get_by_role("tooltip")).to_contain_text("GPU 1")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_have_count(0)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/nodes/[^/]+/#gpu-1$"))


def test_the_cells_show_what_one_asks_for(visit: Visit, yard: Yard) -> None:
    page = visit()
    number = yard.submit("sleep 300", gpus=1)
    digits = page.locator(".gy-grid .gc.mine b")
    expect(digits).to_have_text(re.compile(r"^\d+$"), timeout=WATCHED)
    page.get_by_role("button", name="Owner").click()
    expect(digits).to_have_text("bo")
    page.get_by_role("button", name="Free only").click()
    expect(page.locator(".gy-grid")).to_have_class(re.compile("free-only"))
    page.get_by_role("searchbox", name="Filter nodes").fill("no-such-node")
    expect(page.get_by_text("No node matches the filter.")).to_be_visible()
    yard.bob.cancel(number)


def test_a_broken_stream_is_said_and_comes_back(visit: Visit, yard: Yard) -> None:
    page = visit()
    marker(page, "^Live$")
    web = yard.service("web")
    assert web.pid is not None
    os.kill(web.pid, signal.SIGKILL)
    marker(page, "Reconnecting|Stale")
    yard.wait("web answers again", lambda: answers(yard))
    number = yard.submit("sleep 300", gpus=2, name="while away")
    marker(page, "^Live$")
    expect(page.locator(".gy-grid .gc.mine")).to_have_count(2, timeout=WATCHED)
    yard.bob.cancel(number)


def answers(yard: Yard) -> bool:
    try:
        return httpx.get(f"{yard.stack.options.url}/healthz", timeout=2).is_success
    except httpx.TransportError:
        return False


def test_silence_of_the_node_makes_the_values_stale_with_their_age(visit: Visit, yard: Yard) -> None:
    page = visit()
    marker(page, "^Live$")
    ingest = yard.service("ingest")
    assert ingest.pid is not None
    os.kill(ingest.pid, signal.SIGSTOP)
    try:
        marker(page, r"Stale \d+ s")
        expect(page.locator(".gridcard .gy-age")).to_have_text(re.compile(r"values are \d+ s old"))
        expect(page.locator(".gy-grid .gc")).to_have_count(8)
    finally:
        os.kill(ingest.pid, signal.SIGCONT)
    marker(page, "^Live$")
    expect(page.locator(".gridcard .gy-age")).to_have_text("")


def test_the_page_of_a_node_moves_too(visit: Visit, yard: Yard) -> None:
    page = visit()
    number = yard.submit("sleep 300", gpus=2, name="on node")
    name = yard.bob.nodes()[0]["name"]
    open_page(page, yard, f"/nodes/{name}/")
    marker(page, "^Live$")
    expect(page.locator(".gcard .st", has_text="Mine")).to_have_count(2, timeout=WATCHED)
    chart = page.locator('[data-chart="power_mw"]')
    before = int(yard.wait("the chart has points", lambda: chart.get_attribute("data-points"), 20))
    yard.wait("the chart moves", lambda: int(chart.get_attribute("data-points") or 0) > before + 2, 20)
    expect(page.locator("[data-part=jobs]")).to_contain_text("on node")
    expect(page.locator(".mx td").first).to_be_visible()
    yard.bob.cancel(number)
    expect(page.locator(".gcard .st", has_text="Free")).to_have_count(8, timeout=WATCHED)


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_are_accessible_and_fit(theme: str, width: int, visit: Visit, yard: Yard) -> None:
    page = visit(theme, width)
    number = yard.submit("sleep 300", gpus=2)
    yard.reaches(number, "running")
    name = yard.bob.nodes()[0]["name"]
    problems = []
    for path in ("/", "/nodes/", f"/nodes/{name}/", "/tokens/", "/no/such/page/"):
        open_page(page, yard, path)
        found = Axe().run(page, options=WCAG)
        if found.violations_count:
            problems.append(f"{path}\n{found.generate_report()}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path} scrolls sideways"
    assert page.evaluate("document.documentElement.dataset.bsTheme") == theme
    assert not problems, "\n".join(problems)
    yard.bob.cancel(number)


def test_the_theme_is_ones_own_choice_and_stays(visit: Visit, yard: Yard) -> None:
    page = visit("light")
    page.get_by_role("button", name="Switch theme").click()
    expect(page.locator("html")).to_have_attribute("data-bs-theme", "dark")
    open_page(page, yard, "/nodes/")
    expect(page.locator("html")).to_have_attribute("data-bs-theme", "dark")
