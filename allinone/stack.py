"""The whole portal as one object: `with Stack(options, terminal)` has it running, leaving the block has it gone."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from allinone import leftovers
from allinone.children import Child, adopt_orphans, tail
from allinone.commands import Commands, log_file
from allinone.faults import Fault
from allinone.options import Options
from allinone.postgres import Postgres
from allinone.preparation import Preparation
from allinone.supervision import Supervision
from allinone.terminal import Terminal
from allinone.valkey import Valkey, write_private
from client.api import ENDED, Client
from client.errors import ClientError

READY_TIMEOUT_S = 60.0
JOBS_STOP_S = 4.0
ADMIN, MEMBER = "alice", "bob"


class Stack:
    """Everything that is started here runs from the main thread: the kernel ties its end to that thread's."""

    def __init__(self, options: Options, terminal: Terminal) -> None:
        self.options = options
        self.terminal = terminal
        self.supervision = Supervision(terminal.say)
        self.commands = Commands(options, options.database_url, options.redis_url)
        self.postgres: Postgres | None = None
        self.control: Child | None = None
        self.not_ours: set[int] = set()
        self.logins: list[str] = []

    def __enter__(self) -> "Stack":
        self.not_ours = leftovers.descendants(os.getpid())
        adopt_orphans()
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # --- up ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._start_servers()
        with self.terminal.step("schema, people, node, static files"):
            self.logins = Preparation(self.commands, self.postgres).run()
        with self.terminal.step(f"portal at {self.options.url}"):
            self._start_services()
            self._wait_for("the portal", self._not_ready, "web")
        with self.terminal.step(f"node {self.options.node} with {self.commands.topology() or 'its own GPUs'}"):
            self._wait_for(f"node {self.options.node}", self._node_missing, "node")

    def tend(self) -> None:
        self.supervision.tend()

    def client(self, user: str = MEMBER) -> Client:
        return Client(self.options.url, self.token(user))

    def token(self, user: str) -> str:
        """A token of this user, kept for the next start as long as the portal still takes it."""
        path = self.options.state_dir / f"token.{user}"
        if path.exists() and accepted(self.options.url, path.read_text()):
            return path.read_text()
        token = self.commands.manage("token", user).strip().split()[-1]
        write_private(path, token)
        return token

    def _start_servers(self) -> None:
        state_dir, log_dir = self.options.state_dir, self.commands.log_dir
        database_url, redis_url = self.options.database_url, self.options.redis_url
        if not database_url:
            with self.terminal.step("PostgreSQL"):
                self.postgres = Postgres(state_dir / "postgres", log=log_file(log_dir, "postgres"))
                self.supervision.start(self.postgres)
                database_url = self.postgres.url
        if not redis_url:
            with self.terminal.step("Valkey"):
                valkey = Valkey(state_dir / "valkey", log=log_file(log_dir, "valkey"))
                self.supervision.start(valkey)
                redis_url = valkey.url
        self.commands = Commands(self.options, database_url, redis_url)

    def _start_services(self) -> None:
        self.control = self.commands.control()
        for service in (self.commands.ingest(), self.commands.node_worker(), self.commands.web(), self.control):
            self.supervision.start(service)

    def _wait_for(self, what: str, problem: Callable[[], str | None], service: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (said := problem()) is not None:
            self.tend()
            if time.monotonic() > deadline:
                log = self.commands.log_dir / f"{service}.log"
                end = tail(log, 8)
                raise Fault(f"{what} is not ready after {READY_TIMEOUT_S:.0f} s: {said}. The end of {log}:\n{end}")
            time.sleep(0.05)

    def _not_ready(self) -> str | None:
        try:
            answer = httpx.get(f"{self.options.url}/readyz", timeout=5)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.status_code == 200 else answer.text[:400]

    def _node_missing(self) -> str | None:
        try:
            with self.client(ADMIN) as portal:
                node = portal.node(self.options.node)
        except ClientError as error:
            return str(error)
        if node["state"] != "ready":
            return f"it is {node['state']}"
        if node["problem"]:
            return str(node["problem"])
        return None if node["gpus_total"] else "it has reported no GPU yet"

    # --- down -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No new work, then the jobs through the portal, then the services in reverse order, then whatever is left."""
        with uninterrupted():
            self._stop()

    def _stop(self) -> None:
        if self.control:
            self.control.stop(5)
            self._stop_jobs()
        self.supervision.stop()
        left = leftovers.end(self._stragglers, grace_s=1.0)
        if left:
            self.terminal.say(f"Processes that the kernel does not let go: {', '.join(map(str, sorted(left)))}.")

    def _stop_jobs(self) -> None:
        """Through the portal as long as it answers, so that they end as stopped and not as lost."""
        if not self._stragglers_of_jobs():
            return
        try:
            with Client(self.options.url, self.token(ADMIN), timeout_s=3) as portal:
                active = [job["id"] for job in portal.jobs(state="active")]
                for job_id in active:
                    portal.cancel(job_id)
                self.terminal.say(f"Stopping {len(active)} running job{'s' * (len(active) != 1)}…")
                deadline = time.monotonic() + JOBS_STOP_S
                while time.monotonic() < deadline and any(portal.job(n)["state"] not in ENDED for n in active):
                    time.sleep(0.1)
        except (ClientError, Fault) as error:
            self.terminal.say(f"The running jobs are ended without the portal: {error}")

    def _stragglers_of_jobs(self) -> set[int]:
        return leftovers.of_jobs(self.options.state_dir)

    def _stragglers(self) -> set[int]:
        return (leftovers.descendants(os.getpid()) - self.not_ours) | self._stragglers_of_jobs()


def accepted(url: str, token: str) -> bool:
    try:
        with Client(url, token, timeout_s=5) as portal:
            return bool(portal.me()["username"])
    except ClientError:
        return False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the processes behind. Signals can be set from the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
