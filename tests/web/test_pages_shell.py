"""What every page has: the policy against foreign scripts, a request id, navigation, refusals with a sentence."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.staticfiles import finders
from django.db import OperationalError
from django.test import Client

from portal.web.limits import BodyLimit
from tests.portal.conftest import Cast

pytestmark = pytest.mark.django_db
TEMPLATES = Path(settings.BASE_DIR) / "templates"


@pytest.fixture
def bob(cast: Cast, broker_url: str) -> Client:
    client = Client()
    client.force_login(cast.bob)
    return client


def test_a_page_loads_nothing_foreign_and_runs_no_script_of_its_own(bob: Client) -> None:
    answer = bob.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "script-src" not in policy  # so scripts fall under default-src: files of our own only
    html = answer.content.decode()
    assert re.search(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)", html) is None
    assert re.search(r"\son[a-z]+=", html) is None
    assert "http://" not in html.replace("http://www.w3.org/", "")


@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.html")), ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_a_template_holds_no_inline_script_and_no_handler(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"<script(?![^>]*\bsrc=)", text) is None
    assert re.search(r"<[^>]*\son(click|load|submit|change|input|error)=", text) is None
    assert "javascript:" not in text and "|safe}}" not in text.replace(" ", "").replace("help_text|safe", "")


def test_every_file_that_a_page_names_is_served(bob: Client) -> None:
    html = bob.get("/nodes/").content.decode()
    named = re.findall(r'(?:src|href)="(/static/[^"]+)"', html)
    assert len(named) > 8
    for path in named:
        plain = re.sub(r"\.[0-9a-f]{12}(?=\.\w+$)", "", path.removeprefix("/static/"))
        assert finders.find(plain), path


def test_a_module_imports_the_others_by_the_names_that_hold_their_content() -> None:
    script = next(Path(settings.STATIC_ROOT, "js").glob("overview.????????????.js")).read_text()
    assert re.search(r'from "\./live\.[0-9a-f]{12}\.js"', script)


def test_the_request_id_comes_back_and_a_strange_one_is_replaced(bob: Client) -> None:
    assert bob.get("/healthz", headers={"X-Request-ID": "abc-12345678"}).headers["X-Request-ID"] == "abc-12345678"
    replaced = bob.get("/healthz", headers={"X-Request-ID": "x<script>"}).headers["X-Request-ID"]
    assert re.fullmatch(r"[0-9a-f]{32}", replaced)


def test_the_navigation_marks_where_one_is_and_leads_nowhere_dead(bob: Client) -> None:
    html = bob.get("/nodes/").content.decode()
    nav = re.search(r'<nav class="gy-nav".*?</nav>', html, re.S)
    assert nav
    assert re.findall(r'href="([^"]+)" aria-current="page"', nav[0]) == ["/nodes/"]
    for href in re.findall(r'href="([^"]+)"', nav[0]):
        assert bob.get(href).status_code == 200, href


def test_what_does_not_exist_and_what_is_not_ones_own_answer_alike(bob: Client) -> None:
    missing, absurd = bob.get("/nodes/none/"), bob.get("/no/such/page/")
    assert (missing.status_code, absurd.status_code) == (404, 404)
    assert "There is no node of this name." in missing.content.decode()
    assert "or it is not yours to see" in absurd.content.decode()


def test_a_form_without_its_token_changes_nothing_and_says_so(cast: Cast) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(cast.bob)
    answer = client.post("/tokens/make/", {"name": "x"})
    assert answer.status_code == 403
    assert "Nothing was changed" in answer.content.decode()
    assert not cast.bob.tokens.exists()


def test_a_page_without_database_is_a_503_with_a_sentence(bob: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr("portal.web.overview.cluster", away)
    bob.raise_request_exception = False
    answer = bob.get("/")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "5"
    assert "cannot reach its database" in answer.content.decode()


def test_an_announced_body_that_is_too_large_is_refused_unread(bob: Client) -> None:
    answer = bob.post("/jobs/new/check/", b"{}", content_type="application/json",
                      headers={"Content-Length": str(settings.MAX_BODY_BYTES + 1)})
    assert answer.status_code == 413
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert json.loads(answer.content)["type"] == "body_too_large"


# --- the limit below Django -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sizes", "announced", "status"), [
    ([400, 400], None, 200),
    ([400, 400, 400], None, 413),
    ([400], 100_000, 413),
    ([], 1000, 200),
])
def test_a_body_is_counted_as_it_arrives(sizes: list[int], announced: int | None, status: int) -> None:
    sent: list[dict[str, Any]] = []
    parts: Iterator[int] = iter(sizes)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in sizes:
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * next(parts), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", str(announced).encode())] if announced else []
    asyncio.run(BodyLimit(app, 1000)({"type": "http", "headers": headers}, receive, send))
    assert sent[0]["status"] == status


def test_a_refused_body_is_not_read_first() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("reached the application")

    async def receive() -> dict[str, Any]:
        raise AssertionError("read the body")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(BodyLimit(app, 10)({"type": "http", "headers": [(b"content-length", b"11")]}, receive, send))
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["status"] == 413
