"""A person at a real browser: submits through the form, watches the log and the charts, stops the job."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.system.yard import Yard

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="There is no Chromium on this machine: apt install chromium."),
]
WATCHED = 20_000  # ms that a person waits for something to move
WCAG = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}
HOSTILE = (
    "import sys, time\n"
    "print('<img src=x onerror=alert(1)> </script><script>alert(2)</script>')\n"
    "print('\\x1b]0;title\\x07\\x1b]8;;javascript:alert(3)\\x07a link\\x1b]8;;\\x07 \\x1b[31mred\\x1b[0m')\n"
    "for n in range(50): print(f'\\rloading {n}%', end='')\n"
    "print('\\rloaded all', flush=True)\n"
    "sys.stdout.buffer.write(b'\\xff\\xfe bytes that are no text\\n')\n"
    "print('the end', flush=True)\n"
    "time.sleep(float(sys.argv[1]))\n"
)

Visit = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(chromium: Browser, yard: Yard) -> Iterator[Visit]:
    """Signs bob in, in a fresh browser. Afterwards: no script of a page failed and no policy was broken."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def enter(theme: str = "light", width: int = 1280) -> Page:
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme))  # type: ignore[arg-type]
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on("console", lambda message: complaints.append(message.text) if "Security" in message.text else None)
        sign_in(page, yard)
        return page

    yield enter
    for context in contexts:
        context.close()
    assert not complaints


def sign_in(page: Page, yard: Yard) -> None:
    page.goto(f"{yard.stack.options.url}/login/")
    page.get_by_label("Username").fill("bob")
    page.get_by_label("Password", exact=True).fill((yard.state_dir / "demo.password").read_text())
    page.keyboard.press("Enter")
    page.wait_for_url(f"{yard.stack.options.url}/")


def open_page(page: Page, yard: Yard, path: str) -> None:
    page.goto(f"{yard.stack.options.url}{path}")


def number_of(page: Page) -> int:
    return int(page.url.rstrip("/").rsplit("/", 1)[-1])


def script(yard: Yard, name: str, text: str) -> Path:
    path = yard.state_dir / name
    path.write_text(text)
    return path


def points(page: Page, chart: str) -> int:
    return int(page.locator(f'[data-chart="{chart}"]').get_attribute("data-points") or 0)


def test_a_person_submits_watches_and_stops_a_job(visit: Visit, yard: Yard) -> None:
    page = visit()
    page.get_by_role("link", name="New job").click()
    page.get_by_label("Name", exact=True).fill("watched")
    page.get_by_label("GPUs", exact=True).fill("2")
    page.get_by_label("Command", exact=True).fill(f"{sys.executable} {yard.counting} 100000 0.1")
    expect(page.locator("#start")).to_contain_text("Starts at once", timeout=WATCHED)
    expect(page.locator("#yaml")).to_have_value(re.compile(r"name: watched\n(.|\n)*gpus: 2"), timeout=WATCHED)
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/jobs/*/")
    number = number_of(page)

    expect(page.locator("#job-head .st")).to_have_text("Running", timeout=WATCHED)
    expect(page.locator(".xterm-rows")).to_contain_text("xxxx", timeout=WATCHED)
    shown = yard.wait("the log grows in the terminal", lambda: bytes_shown(page), 20)
    yard.wait("and grows on", lambda: bytes_shown(page) > shown + 500, 20)
    before = yard.wait("a chart has readings", lambda: points(page, "memory_used_bytes"), 20)
    yard.wait("the chart moves", lambda: points(page, "memory_used_bytes") >= before + 3, 20)
    expect(page.locator('[data-chart="utilization_percent"] [data-value]')).to_contain_text("mean ")
    expect(page.locator('tr[data-gpu] [data-metric="power_mw"]').first).to_contain_text(" W")

    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text("lost on 2 GPUs")
    page.get_by_role("button", name="Stop the job").click()
    expect(page.locator("#job-head .st")).to_have_text("Stopped by bob", timeout=WATCHED)
    expect(page.locator("[data-complete]")).to_be_visible(timeout=WATCHED)
    assert yard.job(number)["state"] == "stopped" and not yard.processes(number)


def bytes_shown(page: Page) -> int:
    return int(page.locator("#job-log").get_attribute("data-term-bytes") or 0)


def test_output_is_text_whatever_it_holds(visit: Visit, yard: Yard) -> None:
    page = visit()
    path = script(yard, "hostile.py", HOSTILE)
    number = yard.submit(str(path), gpus=2, launcher="torchrun", name="<b onmouseover=alert(4)>bold</b>")
    open_page(page, yard, f"/jobs/{number}/")
    expect(page.locator("h1")).to_have_text("<b onmouseover=alert(4)>bold</b>")
    ended = yard.ended(number, 60)
    assert ended["state"] == "failed", "it needs an argument that it was not given"
    open_page(page, yard, f"/jobs/{number}/")
    page.get_by_role("button", name="Merged").click()
    merged = page.locator("[data-merged]")
    for rank in ("r0", "r1"):
        row = merged.locator(".l", has=page.locator(".rk", has_text=rank))
        expect(row.filter(has_text="<img src=x onerror=alert(1)>").first).to_be_visible(timeout=WATCHED)
        expect(row.filter(has_text="loaded all").first).to_be_visible()
    expect(merged.get_by_text("loading 49%")).to_have_count(0)
    page.get_by_role("button", name="Rank 1").click()
    terminal = page.locator(".xterm-rows")
    expect(terminal).to_contain_text("</script><script>alert(2)</script>", timeout=WATCHED)
    expect(terminal).to_contain_text("loaded all")
    expect(terminal).not_to_contain_text("loading 49%")
    terminal.get_by_text("a link").first.click(force=True)
    assert page.locator("#job-log img, #job-log script").count() == 0
    expect(page.locator("[data-complete]")).to_be_visible(timeout=WATCHED)


def test_a_failed_job_says_what_happened_in_its_first_lines(visit: Visit, yard: Yard) -> None:
    page = visit()
    path = script(yard, "fails.py", "print('so far so good'); raise ValueError('the loss is NaN')\n")
    number = yard.submit(f"{sys.executable} {path}")
    open_page(page, yard, f"/jobs/{number}/")
    answer = page.locator("#job-answer")
    expect(answer).to_contain_text("ValueError: the loss is NaN", timeout=WATCHED)
    expect(answer).to_contain_text("exit code 1")
    expect(page.locator("#job-head .st")).to_have_text("Failed")


def test_yaml_and_form_are_one_request(visit: Visit, yard: Yard) -> None:
    page = visit()
    open_page(page, yard, "/jobs/new/")
    page.locator("#yaml").fill("command: train.py\nlauncher: torchrun\nresources: {gpus: 4, memory: 24GB}\n")
    expect(page.get_by_label("Memory, at least")).to_have_value("24GB", timeout=WATCHED)
    expect(page.get_by_label("Launcher")).to_have_value("torchrun")
    page.get_by_label("GPUs", exact=True).fill("-3")
    expect(page.locator("#e-gpus")).to_be_visible(timeout=WATCHED)
    expect(page.get_by_label("GPUs", exact=True)).to_have_attribute("aria-invalid", "true")
    page.get_by_label("GPUs", exact=True).fill("64")
    expect(page.locator("#start")).to_contain_text("Can never start", timeout=WATCHED)
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("Can never start")
    expect(page.get_by_label("GPUs", exact=True)).to_have_value("64")


def test_a_waiting_job_says_why_and_starts_before_ones_eyes(visit: Visit, yard: Yard) -> None:
    page = visit()
    first = yard.submit("sleep 60", gpus=8, by=yard.charlie)
    yard.reaches(first, "running")
    number = yard.submit("sleep 60", gpus=8)
    open_page(page, yard, f"/jobs/{number}/")
    expect(page.locator("#job-answer")).to_contain_text("Waiting for 8", timeout=WATCHED)
    yard.charlie.cancel(first)
    expect(page.locator("#job-head .st")).to_have_text("Running", timeout=WATCHED)
    expect(page.locator("#job-ranks tr[data-gpu]")).to_have_count(8)


def test_the_list_changes_in_place_and_new_jobs_wait_to_be_asked_for(visit: Visit, yard: Yard) -> None:
    page = visit()
    number = yard.submit("sleep 60", name="listed")
    yard.reaches(number, "running")
    open_page(page, yard, "/jobs/")
    row = page.locator(f"#job-{number}")
    expect(row.locator(".st")).to_have_text("Running")
    expect(page.locator("#gy-live span")).to_have_text("Live", timeout=WATCHED)
    later = yard.submit("sleep 60", name="later")
    expect(page.locator("#fresh")).to_have_text("1 new job", timeout=WATCHED)
    assert page.locator(f"#job-{later}").count() == 0, "nothing moves under the reader"
    yard.bob.cancel(number)
    expect(row.locator(".st")).to_have_text("Stopped", timeout=WATCHED)
    page.locator("#fresh").click()
    expect(page.locator(f"#job-{later}")).to_be_visible(timeout=WATCHED)


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_are_accessible_and_fit(theme: str, width: int, visit: Visit, yard: Yard) -> None:
    page = visit(theme, width)
    running = yard.count_job(100_000, 0.2)
    failed = yard.submit("sh -c 'exit 3'")
    yard.reaches(running, "running")
    yard.ended(failed)
    problems = []
    for path in ("/jobs/?who=all", "/jobs/new/?example=ddp", f"/jobs/{running}/", f"/jobs/{failed}/"):
        open_page(page, yard, path)
        expect(page.locator("#gy-live span")).to_have_text("Live", timeout=WATCHED)
        found = Axe().run(page, options=WCAG)
        if found.violations_count:
            problems.append(f"{path}\n{found.generate_report()}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path} scrolls sideways"
    assert not problems, "\n".join(problems)
