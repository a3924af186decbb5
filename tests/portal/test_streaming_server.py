"""Live streams through the real server: many at once, on few database connections, ended cleanly."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from django.conf import settings
from django.test import Client

from portal.models import Attempt, Job, LogStream
from portal.services import accounts, live, logs, tokens
from portal.services.streaming import look
from tests.portal.conftest import Cast
from tests.portal.sessions import database_of_the_tests, sessions, wait_for_no_sessions
from wire.reports import LogChunk

POOL = 5
STARTUP_S = 30.0
PEOPLE = 10
STREAMS = 200
NAME = "web-under-test"


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]


@pytest.fixture
def cast(transactional_db: None, cast: Cast, broker_url: str) -> Cast:
    return cast


@pytest.fixture
def attempt(cast: Cast) -> Attempt:
    job = Job.objects.create(
        owner=cast.bob, project=cast.bob.personal_project, name="t", spec={}, gpu_count=1, state="running"
    )
    return Attempt.objects.create(job=job, number=1, state="running")


@pytest.fixture
def server(cast: Cast) -> Iterator[Server]:
    environment = os.environ | {
        "DATABASE_URL": database_of_the_tests(), "GPUYARD_DB_POOL": str(POOL), "PGAPPNAME": NAME,
    }
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        command = [sys.executable, "-m", "uvicorn", "portal.asgi:application", "--fd", str(listener.fileno()),
                   "--timeout-graceful-shutdown", "2", "--log-level", "warning", "--lifespan", "off"]
        process = subprocess.Popen(command, cwd=Path(settings.BASE_DIR), env=environment, pass_fds=[listener.fileno()])
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            answer = httpx.get(f"{url}/healthz", timeout=STARTUP_S)
            assert answer.status_code == 200
            yield Server(url, process)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(20)
            wait_for_no_sessions(NAME)


def write(attempt: Attempt, offset: int, data: bytes) -> None:
    chunk = LogChunk(attempt=str(attempt.pk), job=attempt.job_id, epoch=1, stream="rank-0", offset=offset, data=data,
                     crc32=zlib.crc32(data))
    logs.append([chunk])
    live.notify(live.job_channel(attempt.job_id), "log", streams={"rank-0": offset + len(data)})


async def first_line(response: httpx.Response, prefix: str) -> str:
    async for line in response.aiter_lines():
        if line.startswith(prefix):
            return line
    raise AssertionError("the stream ended")


def test_two_hundred_streams_on_five_database_connections(server: Server, cast: Cast, attempt: Attempt) -> None:
    people = [accounts.create_user(f"user{number}", "correct-horse-battery") for number in range(PEOPLE)]
    for person in people:
        attempt.job.project.memberships.create(user=person)
    headers = [{"Authorization": f"Bearer {tokens.issue(person, 'test')}"} for person in people]
    address = f"{server.url}/api/v1/jobs/{attempt.job_id}/logs/stream"

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            async def opened(number: int) -> httpx.Response:
                request = client.build_request("GET", address, headers=headers[number % PEOPLE])
                return await client.send(request, stream=True)

            responses = [await opened(number) for number in range(STREAMS)]
            assert {response.status_code for response in responses} == {200}
            assert (await opened(0)).status_code == 429
            readers = [asyncio.create_task(first_line(response, "data: {\"offset\"")) for response in responses]
            started_at = time.monotonic()
            me = await client.get(f"{server.url}/api/v1/me", headers=headers[0])
            assert (me.status_code, time.monotonic() - started_at < 2) == (200, True)
            await look(write, attempt, 0, b"hello\n")
            assert len(set(await asyncio.gather(*readers))) == 1
            print(f"a line reached {STREAMS} readers after {time.monotonic() - started_at:.2f} s")
            assert 0 < await asyncio.to_thread(sessions, NAME) <= POOL
            for response in responses:
                await response.aclose()
            # Every place is free again once the server has noticed.
            deadline = time.monotonic() + 20
            while (again := await opened(0)).status_code == 429:
                await again.aclose()
                assert time.monotonic() < deadline
            await again.aclose()

    asyncio.run(scenario())


def test_the_server_ends_within_ten_seconds_under_open_streams_and_readers_resume(
    server: Server, cast: Cast, attempt: Attempt
) -> None:
    headers = {"Authorization": f"Bearer {tokens.issue(cast.bob, 'test')}"}
    address = f"{server.url}/api/v1/jobs/{attempt.job_id}/logs/stream"
    write(attempt, 0, b"before\n")
    with httpx.stream("GET", address, headers=headers, timeout=30) as response:
        lines = response.iter_lines()
        last_id = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
        asked_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)
        assert time.monotonic() - asked_at < 10
    assert last_id == "7"


def test_a_page_streams_by_its_session_and_refuses_without(server: Server, cast: Cast, attempt: Attempt) -> None:
    LogStream.objects.create(attempt=attempt, name="rank-0", final_bytes=0)
    browser = Client()
    browser.force_login(cast.bob)
    stranger = Client()
    stranger.force_login(cast.charlie)

    def ask(path: str, client: Client | None) -> httpx.Response:
        cookies = {"sessionid": client.cookies["sessionid"].value} if client else {}
        with httpx.stream("GET", server.url + path, cookies=cookies, timeout=30) as response:
            if response.status_code != 200:
                response.read()
            return response

    job = f"/live/jobs/{attempt.job_id}/"
    for path in ("/live/cluster/", job, f"{job}log/?rank=0"):
        good = ask(path, browser)
        assert (good.status_code, good.headers["content-type"]) == (200, "text/event-stream")
        assert (good.headers["cache-control"], good.headers["x-accel-buffering"]) == ("no-store", "no")
        assert ask(path, None).status_code == 401
    assert ask(job, stranger).json()["type"] == "not_found"
    assert ask(f"{job}log/?rank=0", stranger).status_code == 404
    assert ask(f"{job}log/?rank=7", browser).status_code == 404
    assert ask(f"{job}log/?rank=0&offset=-1", browser).status_code == 400
