"""The `gpuyard` command against a portal that answers over a real socket, and sometimes does not."""

import json
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from client import api
from client.cli import main
from client.following import Lines

TOKEN = "gy_test"


@dataclass
class Portal:
    """What the portal knows: one job that moves on by one state each time it is looked at."""

    states: list[str] = field(default_factory=lambda: ["waiting", "running", "succeeded"])
    logs: dict[str, bytes] = field(default_factory=dict)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    hang_up: int = 0  # so many requests are cut off without an answer
    piece_bytes: int = 7
    refusal: dict[str, Any] | None = None
    asked: list[str] = field(default_factory=list)

    def job(self) -> dict[str, Any]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        ended = state in api.ENDED
        return {
            "id": 7,
            "name": "ddp",
            "project": "bob",
            "owner": "bob",
            "state": state,
            "gpus": 2,
            "exit_code": 0 if ended else None,
            "reason": {"code": "wait_gpus", "message": "Waits for 2 GPUs."} if state == "waiting" else None,
            "world_size": 2,
            "attempts": [] if state == "waiting" else [{"number": 1}],
            "allocation": [],
            "times": {"submitted_at": "2026-01-01T00:00:00Z", "queued_s": 0.1, "starting_s": None, "running_s": None},
        }

    def log(self, rank: str, offset: int) -> tuple[bytes, int, bool]:
        whole = self.logs[rank]
        data = whole[offset : offset + self.piece_bytes]
        end = offset + len(data)
        return data, end, end == len(whole) and self.states[0] in api.ENDED


class Handler(BaseHTTPRequestHandler):
    portal: Portal

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.portal.asked.append(self.path)
        if self.portal.hang_up:
            self.portal.hang_up -= 1
            self.close_connection = True
            return
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.problem(401, {"type": "invalid_token", "detail": "This token is unknown."})
        elif self.portal.refusal:
            self.problem(self.portal.refusal["status"], self.portal.refusal)
        elif url.path == "/api/v1/me":
            self.json(200, {"username": "bob"})
        elif url.path == "/api/v1/jobs" and self.command == "POST":
            self.portal.submitted.append(json.loads(body))
            self.portal.keys.append(self.headers["Idempotency-Key"])
            self.json(201, self.portal.job())
        elif url.path == "/api/v1/jobs":
            self.json(200, self.page(parse_qs(url.query)))
        elif url.path == "/api/v1/jobs/7":
            self.json(200, self.portal.job())
        elif url.path == "/api/v1/jobs/7/logs":
            self.log(parse_qs(url.query))
        else:
            self.problem(404, {"type": "not_found", "detail": "There is nothing here."})

    def page(self, query: dict[str, list[str]]) -> dict[str, Any]:
        last = "cursor" in query
        return {"jobs": [self.portal.job() | {"id": 3 if last else 4}], "next_cursor": None if last else "4"}

    def log(self, query: dict[str, list[str]]) -> None:
        rank = query["rank"][0]
        if rank not in self.portal.logs:
            self.problem(404, {"type": "not_found", "detail": "This job has no such rank."})
            return
        data, end, complete = self.portal.log(rank, int(query["offset"][0]))
        self.send(200, data, {"X-Next-Offset": str(end), "X-Log-Complete": "true" if complete else "false"})

    def json(self, status: int, body: object) -> None:
        self.send(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def problem(self, status: int, body: object) -> None:
        self.send(status, json.dumps(body).encode(), {"Content-Type": "application/problem+json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def portal() -> Portal:
    return Portal()


@pytest.fixture
def url(portal: Portal) -> Iterator[str]:
    handler = type("PortalHandler", (Handler,), {"portal": portal})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GPUYARD_URL", "GPUYARD_TOKEN", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def bob(home: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Signed in by environment; his home is the answer."""
    monkeypatch.setenv("GPUYARD_URL", url)
    monkeypatch.setenv("GPUYARD_TOKEN", TOKEN)
    monkeypatch.setattr(api.time, "sleep", lambda _: None)  # the waits between tries, not their number
    return home


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=text)


def job_file(folder: Path) -> str:
    path = folder / "job.yaml"
    path.write_text("name: ddp\nlauncher: torchrun\ncommand: train.py\nresources:\n  gpus: 2\n")
    return str(path)


def test_login_stores_url_and_token_for_the_owner_alone(home: Path, url: str) -> None:
    result = run("login", url, text=f"{TOKEN}\n")
    assert result.exit_code == 0, result.output
    assert "Signed in" in result.output and "as bob" in result.output
    stored = home / ".config" / "gpuyard" / "config.json"
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert TOKEN not in result.output
    assert run("job", "7").exit_code == 0


def test_login_with_a_wrong_token_stores_nothing(home: Path, url: str) -> None:
    result = run("login", url, "--token", "gy_wrong")
    assert (result.exit_code, "This token is unknown." in result.output) == (3, True)
    assert not (home / ".config" / "gpuyard" / "config.json").exists()


def test_without_login_the_way_out_is_named(home: Path) -> None:
    result = run("jobs")
    assert result.exit_code == 3
    assert "gpuyard login" in result.output


def test_a_stored_token_is_not_sent_to_another_portal(home: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("login", url, "--token", TOKEN).exit_code == 0
    monkeypatch.setenv("GPUYARD_URL", "http://127.0.0.1:9")
    result = run("jobs")
    assert (result.exit_code, "GPUYARD_TOKEN" in result.output) == (3, True)


def test_an_unreachable_portal_is_exit_status_five(bob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_URL", "http://127.0.0.1:9")
    result = run("nodes")
    assert result.exit_code == 5
    assert "127.0.0.1:9 cannot be reached" in result.output


def test_submit_sends_the_file_with_its_changes(bob: Path, portal: Portal) -> None:
    result = run("submit", job_file(bob), "--set", "resources.gpus=8", "--set", "resources.gpu=[A100, H100]", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["id"] == 7
    assert portal.submitted[0]["resources"] == {"gpus": 8, "gpu": ["A100", "H100"]}


def test_a_submit_cut_off_in_the_middle_is_repeated_under_its_key(bob: Path, portal: Portal) -> None:
    portal.hang_up = 2
    assert run("submit", job_file(bob)).exit_code == 0
    assert portal.asked == ["/api/v1/jobs"] * 3
    assert len(portal.keys) == 1 and len(portal.keys[0]) >= 32


def test_a_refusal_names_its_fields_and_means_wrong_input(bob: Path, portal: Portal) -> None:
    portal.refusal = {
        "status": 422,
        "type": "unsatisfiable",
        "detail": "No node has 9 GPUs.",
        "errors": [{"field": "resources.gpus", "message": "at most 8"}],
    }
    result = run("submit", job_file(bob))
    assert result.exit_code == 2
    assert result.output == "gpuyard: No node has 9 GPUs.\n  resources.gpus: at most 8\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: [", "line 1 is not YAML"),
        ("- a\n- b\n", "holds no job"),
    ],
)
def test_a_file_that_is_no_job_is_refused_before_it_is_sent(
    bob: Path, portal: Portal, text: str, sentence: str
) -> None:
    path = bob / "bad.yaml"
    path.write_text(text)
    result = run("submit", str(path))
    assert (result.exit_code, sentence in result.output) == (2, True), result.output
    assert portal.asked == []


def test_follow_marks_every_ranks_lines_and_ends_with_the_jobs_result(bob: Path, portal: Portal) -> None:
    portal.logs = {"0": "step 1 — loss 2.3\nstep 2\n".encode(), "1": b"50%\r100%\nbye"}
    result = run("submit", job_file(bob), "--follow")
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if "r0" in line] == [" r0 │ step 1 — loss 2.3", " r0 │ step 2"]
    assert [line for line in result.stdout.splitlines() if "r1" in line] == [" r1 │ 100%", " r1 │ bye"]
    assert "#7 succeeded" in result.stderr


def test_follow_of_a_failed_job_fails(bob: Path, portal: Portal) -> None:
    portal.states, portal.logs = ["running", "failed"], {"0": b"Traceback\n"}
    assert run("logs", "7", "-f").exit_code == 1


def test_follow_goes_on_after_a_long_absence_with_every_byte_once(bob: Path, portal: Portal) -> None:
    portal.states, portal.logs = (
        ["running", "running", "succeeded"],
        {"0": b"".join(b"line %d\n" % n for n in range(40))},
    )
    portal.hang_up = api.TRIES * 3
    result = run("logs", "7", "-f")
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if "r0" in line] == [f" r0 │ line {n}" for n in range(40)]
    assert result.stderr.count("cannot be reached") == 1


def test_one_ranks_log_comes_byte_for_byte(bob: Path, portal: Portal) -> None:
    portal.states, portal.logs = ["succeeded"], {"0": bytes(range(256)) * 3}
    assert run("logs", "7", "--rank", "0").stdout_bytes == bytes(range(256)) * 3


def test_a_jobs_output_cannot_steer_the_terminal(bob: Path, portal: Portal) -> None:
    portal.states, portal.logs = ["succeeded"], {"0": b"\x1b]0;title\x07red\x1b[31m\xe2\x80\xae\n"}
    line = next(line for line in run("logs", "7").stdout.splitlines() if "r0" in line)
    assert line == " r0 │ ]0;titlered[31m"


def test_someone_elses_job_is_not_found(bob: Path) -> None:
    result = run("job", "8")
    assert (result.exit_code, result.output) == (4, "gpuyard: There is nothing here.\n")


def test_a_list_reads_every_page_and_stops_at_the_limit(bob: Path, portal: Portal) -> None:
    assert [job["id"] for job in json.loads(run("jobs", "--all", "--json").output)] == [4, 3]
    portal.asked.clear()
    assert [job["id"] for job in json.loads(run("jobs", "--all", "--json", "-n", "1").output)] == [4]
    assert len(portal.asked) == 1


def test_wrong_use_is_exit_status_two(bob: Path) -> None:
    assert run("job", "0").exit_code == 2
    assert run("logs", "7", "--rank", "first").exit_code == 2
    assert run("submit", job_file(bob), "--set", "nonsense").exit_code == 2


def test_a_letter_split_between_two_pieces_stays_whole() -> None:
    lines = Lines()
    assert [*lines.feed("ä".encode()[:1]), *lines.feed("ä".encode()[1:] + b"\n")] == ["ä"]
    assert lines.feed(b"\xff\n") == ["\ufffd"]
    assert lines.feed(b"unfinished", final=True) == ["unfinished"]
