"""`python -m allinone up` as a person runs it: real servers, real services, a real job, and nothing left afterwards."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from allinone import leftovers
from allinone.children import wait_until
from allinone.faults import ALREADY_RUNNING
from allinone.options import CHECKOUT
from allinone.valkey import some_free_port
from client.api import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
PATIENCE_S = 120.0
LONG_JOB = {"name": "long", "launcher": "script", "command": "sleep 600", "resources": {"gpus": 2}}


class Up:
    """One start of the portal in a folder of its own."""

    def __init__(self, home: Path) -> None:
        self.state_dir = home / "var"
        self.url = ""
        self.port = some_free_port()
        self.log = home / "terminal.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def env(self) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        return {
            **kept,
            "GPUYARD_STATE_DIR": str(self.state_dir),
            "PORT": str(self.port),
            "GPUYARD_SIMULATE": "DGX-H100-8",
        }

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def start(self) -> "Up":
        self.url = f"http://127.0.0.1:{self.port}"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "allinone", "up"],
                cwd=CHECKOUT,
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        process = self.process
        wait_until(lambda: "Ctrl-C stops everything" in self.said or process.poll() is not None, PATIENCE_S)
        assert "Ctrl-C stops everything" in self.said, self.said
        return self

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def client(self, user: str = "bob") -> Client:
        return Client(self.url, (self.state_dir / f"token.{user}").read_text())

    def processes(self) -> set[int]:
        """Everything that runs and names this folder in its arguments or its environment."""
        place = os.fsencode(str(self.state_dir))
        own = {pid for pid in leftovers.every_pid() if leftovers.parent_of(pid) is not None} - {os.getpid()}
        return {pid for pid in own if place in leftovers.read(pid, "environ") + leftovers.read(pid, "cmdline")}

    def pid_of(self, words: str) -> int:
        found = [
            pid for pid in self.processes() if words.encode() in leftovers.read(pid, "cmdline").replace(b"\0", b" ")
        ]
        assert len(found) == 1, f"{words}: {found}\n{self.said}"
        return found[0]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    home = Path(tempfile.mkdtemp(prefix="gpuyard-up-"))
    home.chmod(0o711)
    portal = Up(home)
    try:
        yield portal.start()
    finally:
        if portal.process and portal.process.poll() is None:
            portal.stop()
        shutil.rmtree(home, ignore_errors=True)


def ready(up: Up) -> bool:
    try:
        return httpx.get(f"{up.url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_it_says_where_it_is_and_how_to_sign_in(up: Up) -> None:
    assert up.url in up.said
    login = re.search(r"sign in as (.+)\n\s+password (\S+)", up.said)
    assert login and login[1] == "alice · bob · charlie"
    with httpx.Client(base_url=up.url, follow_redirects=True) as browser:
        page = browser.get("/login/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        assert token
        form = {"login": "bob", "password": login[2], "csrfmiddlewaretoken": token[1]}
        inside = browser.post("/login/", data=form, headers={"Referer": f"{up.url}/login/"})
        assert inside.status_code == 200 and inside.url.path == "/"


def test_its_node_offers_eight_gpus(up: Up) -> None:
    with up.client("alice") as portal:
        gpus = portal.gpus()
    assert len(gpus) == 8
    assert {gpu["model"] for gpu in gpus} == {"H100"}


def test_a_second_start_beside_it_says_so_and_changes_nothing(up: Up) -> None:
    before = up.processes()
    answer = subprocess.run(
        [sys.executable, "-m", "allinone", "up"],
        cwd=CHECKOUT,
        env=up.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == ALREADY_RUNNING
    assert up.url in answer.stderr and "Traceback" not in answer.stderr
    assert up.processes() == before
    assert ready(up)


def test_no_secret_is_in_a_command_line(up: Up) -> None:
    secrets = [
        (up.state_dir / name).read_text().strip() for name in ("valkey/password", "demo.password", "token.alice")
    ]
    for pid in up.processes():
        arguments = leftovers.read(pid, "cmdline").decode(errors="replace")
        assert not [secret for secret in secrets if secret in arguments], arguments


def test_the_node_knows_no_database(up: Up) -> None:
    variables = leftovers.read(up.pid_of("workers.app"), "environ").split(b"\0")
    assert not [v for v in variables if v.startswith((b"DATABASE_URL", b"REDIS_URL", b"GPUYARD_SECRET_KEY"))]


def command(up: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = up.env | {"GPUYARD_URL": up.url, "GPUYARD_TOKEN": (up.state_dir / "token.alice").read_text()}
    return subprocess.run(
        [sys.executable, "-m", "client.cli", *arguments],
        cwd=CHECKOUT,
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_the_command_line_client_submits_follows_and_looks(up: Up) -> None:
    (up.state_dir / "job.yaml").write_text(
        "name: two-lines\nlauncher: script\ncommand: sh -c 'echo one; echo two >&2'\nresources: {gpus: 1}\n"
    )
    submitted = command(up, "submit", str(up.state_dir / "job.yaml"), "--follow")
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout.splitlines()[:2] == [" r0 │ one", " r0 │ two"]
    number = re.search(r"Job #(\d+)", submitted.stderr)
    assert number and f"#{number[1]} succeeded" in submitted.stderr
    assert "GPU-" in command(up, "job", number[1]).stdout
    assert command(up, "logs", number[1], "--rank", "0").stdout == "one\ntwo\n"
    assert command(up, "jobs").stdout.splitlines()[1].split()[:3] == [number[1], "succeeded", "two-lines"]
    assert command(up, "nodes").stdout.splitlines()[1].split()[:4] == ["node1", "ready", "8", "8"]
    assert len(command(up, "gpus", "--free").stdout.splitlines()) == 9


def test_the_command_line_client_passes_on_the_jobs_result_and_the_portals_refusals(up: Up) -> None:
    (up.state_dir / "job.yaml").write_text(
        "name: bad\nlauncher: script\ncommand: sh -c 'exit 3'\nresources: {gpus: 1}\n"
    )
    failed = command(up, "submit", str(up.state_dir / "job.yaml"), "--follow")
    assert failed.returncode == 1 and "failed" in failed.stderr
    refused = command(up, "submit", str(up.state_dir / "job.yaml"), "--set", "resources.gpus=-1")
    assert refused.returncode == 2 and "resources.gpus" in refused.stderr
    assert command(up, "job", "999999").returncode == 4


@pytest.mark.parametrize("service", ["uvicorn", "manage.py ingest", "workers.app", "valkey-server"])
def test_a_killed_service_comes_back(up: Up, service: str) -> None:
    before = up.pid_of(service)
    os.kill(before, signal.SIGKILL)

    def back() -> bool:
        gone = leftovers.parent_of(before) is None
        return gone and any(
            service.encode() in leftovers.read(pid, "cmdline").replace(b"\0", b" ") for pid in up.processes()
        )

    assert wait_until(back, 30), up.said
    assert wait_until(lambda: ready(up), 60), up.said
    assert "ended (signal 9); starting it again now." in up.said


def test_ctrl_c_stops_a_running_job_and_everything_else(up: Up) -> None:
    with up.client("alice") as portal:
        job = portal.submit(LONG_JOB)["id"]
        assert wait_until(lambda: portal.job(job)["state"] == "running", 60, 0.1), portal.job(job)
    assert leftovers.of_jobs(up.state_dir)
    assert up.stop() == 0
    assert up.processes() == set(), up.said
    assert leftovers.of_jobs(up.state_dir) == set()
    assert "Stopping 1 running job" in up.said

    up.start()
    with up.client("alice") as portal:
        assert portal.job(job)["state"] == "stopped"
        assert all(gpu["free"] for gpu in portal.gpus())
    assert up.stop(signal.SIGTERM) == 0
    assert up.processes() == set(), up.said
