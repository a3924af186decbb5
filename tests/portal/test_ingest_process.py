"""`manage.py ingest` as a real process: killed, cut off from database and broker, and nothing is lost or doubled."""

import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psycopg
import pytest
import redis
from django.conf import settings
from django.db import connection

from allinone.valkey import Valkey
from portal.models import Attempt, Event, Job, LogStream, Node, Share
from portal.services import logs
from tests.portal.conftest import Cast, make_node
from tests.portal.sessions import database_of_the_tests, wait_for_no_sessions
from wire.desired import Desired, Launch
from wire.names import desired_key, upstream_key
from wire.reports import AttemptEvent, Heartbeat, LogChunk, Report
from wire.signing import Action, Signer, new_private_key, public_key_of
from wire.states import AttemptState, EndReason

ROOT = Path(settings.BASE_DIR)
DEADLINE_S = 60.0
PIECE = 512
NAME = "ingest-under-test"


@pytest.fixture
def cast(transactional_db: None, cast: Cast) -> Cast:
    """The process sees only what is committed."""
    return cast


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S:.0f} s"
        time.sleep(0.02)


@contextmanager
def running_ingest(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"DATABASE_URL": database_of_the_tests(), "PGAPPNAME": NAME} | variables
    process = subprocess.Popen([sys.executable, "manage.py", "ingest"], cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(20)
        wait_for_no_sessions(NAME)


class SpooledNode:
    """Sends a run's log and events, keeps all of it, and goes back to what is acknowledged: as a node does."""

    def __init__(self, cast: Cast, broker: redis.Redis, text: bytes) -> None:
        self._broker, self._text = broker, text
        self._key = new_private_key()
        self._signer = Signer(self._key, "n1")
        self._sent = 0
        self.node = make_node("n1", gpus=1)
        Node.objects.filter(pk=self.node.pk).update(public_key=public_key_of(self._key))
        self.job = Job.objects.create(
            owner=cast.bob, project=cast.bob.personal_project, name="t", spec={}, gpu_count=1, state="starting"
        )
        self.attempt = Attempt.objects.create(job=self.job, number=1)
        order = Launch(attempt=str(self.attempt.pk), job=self.job.pk, epoch=1, name="t", user="bob", launcher="script",
                       command="x")
        Share.objects.create(attempt=self.attempt, node=self.node, launch=msgspec.to_builtins(order))
        self.events = [
            self._event(1, AttemptState.STARTING), self._event(2, AttemptState.RUNNING),
            self._event(3, AttemptState.SUCCEEDED, reason=EndReason.EXITED, log_sizes={"rank-0": len(text)}),
        ]

    def _event(self, seq: int, state: AttemptState, **fields: object) -> AttemptEvent:
        return AttemptEvent(
            attempt=str(self.attempt.pk), job=self.job.pk, epoch=1, seq=seq, at=time.time(), state=state,
            **fields,  # type: ignore[arg-type]
        )

    def chunks(self, since: int, until: int) -> Iterator[LogChunk]:
        for offset in range(since, until, PIECE):
            data = self._text[offset : min(until, offset + PIECE)]
            yield LogChunk(attempt=str(self.attempt.pk), job=self.job.pk, epoch=1, stream="rank-0", offset=offset,
                           data=data, crc32=zlib.crc32(data))

    def send(self, *reports: Report) -> None:
        for report in reports:
            self._sent += 1
            sealed = self._signer.seal(report, audience="portal", action=Action.REPORT, epoch=self._sent)
            self._broker.xadd(upstream_key("n1"), {b"m": sealed})

    def heartbeat(self) -> None:
        self.send(Heartbeat(boot_id="boot-1", nonce=str(self._sent), serial=0, at=time.time(), started_at=0.0))

    def acknowledged(self) -> tuple[int, int]:
        """-> (events, log bytes) that the portal says are durable."""
        raw = self._broker.get(desired_key("n1"))
        if raw is None:
            return 0, 0
        body, _signature = msgspec.msgpack.decode(raw, type=tuple[bytes, bytes])
        order = msgspec.msgpack.decode(msgspec.msgpack.decode(body, type=list)[7], type=Desired)
        if str(self.attempt.pk) in order.forget:
            return len(self.events), len(self._text)
        mine = order.acknowledged.get(str(self.attempt.pk))
        return (mine.event_seq, mine.log_offsets.get("rank-0", 0)) if mine else (0, 0)

    def send_rest(self) -> bool:
        """Everything that is not acknowledged, again. -> whether all of it is durable."""
        seq, size = self.acknowledged()
        if (seq, size) == (len(self.events), len(self._text)):
            return True
        self.send(*self.chunks(size, len(self._text)), *self.events[seq:])
        self.heartbeat()
        return False

    def settle(self) -> None:
        """Send, wait for the answer, send again what is missing."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.send_rest():
            until = time.monotonic() + 3
            while time.monotonic() < until and self.acknowledged() != (len(self.events), len(self._text)):
                time.sleep(0.02)
            assert time.monotonic() < deadline, f"acknowledged after {DEADLINE_S:.0f} s: {self.acknowledged()}"

    def assert_whole(self) -> None:
        piece = logs.read(Job.objects.get(pk=self.job.pk), 0, 0, len(self._text) + 1)
        assert piece.data == self._text
        assert piece.complete
        kinds = Event.objects.filter(job=self.job, kind="job.state").order_by("id").values_list("to_state", flat=True)
        assert list(kinds) == ["running", "succeeded"]
        assert LogStream.objects.get(attempt=self.attempt).line_count == self._text.count(b"\n")


@pytest.fixture
def broker(broker_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker_url) as client:
        yield client


@pytest.fixture
def node(cast: Cast, broker: redis.Redis) -> SpooledNode:
    text = b"".join(b"step %d loss %.6f \x00\xff\r\n" % (step, 1 / (step + 1)) for step in range(3000))
    return SpooledNode(cast, broker, text)


def stored(node: SpooledNode) -> int:
    return LogStream.objects.filter(attempt=node.attempt).values_list("size_bytes", flat=True).first() or 0


def test_killed_again_and_again_in_mid_stream_it_keeps_every_byte_once(node: SpooledNode) -> None:
    pieces = list(node.chunks(0, 90_000))
    for round_number in range(3):
        with running_ingest() as process:
            before = stored(node)
            share = pieces[round_number * 40 : (round_number + 1) * 40]
            for piece in share:
                node.send(piece)
            wait(lambda before=before: stored(node) > before, "progress")  # type: ignore[misc]
            process.kill()
    with running_ingest():
        node.settle()
    node.assert_whole()


def test_a_flushed_broker_in_mid_run_is_made_good(node: SpooledNode, broker: redis.Redis) -> None:
    with running_ingest():
        node.send(node.events[0], *node.chunks(0, 20_000))
        wait(lambda: stored(node) > 0, "progress")
        broker.flushall()
        node.settle()
        broker.flushall()
        node.heartbeat()
        wait(lambda: Node.objects.get(pk=node.node.pk).echo_nonce != "", "a heartbeat after the flush")
    node.assert_whole()


def test_a_database_that_turns_everybody_away_loses_nothing(node: SpooledNode, broker: redis.Redis) -> None:
    name = str(connection.settings_dict["NAME"])
    with running_ingest(), psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as admin:
        node.send(node.events[0])
        wait(lambda: Share.objects.get(attempt=node.attempt).event_seq == 1, "the first event")
        connection.close()
        connection.close_pool()  # those of the test itself would be dead too
        try:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            node.send(node.events[1], *node.chunks(0, 20_000))
            waiting = broker.xlen(upstream_key("n1"))
            wait(lambda: pending(broker) > 0 or broker.xlen(upstream_key("n1")) == waiting, "a try")
            assert broker.xlen(upstream_key("n1")) == waiting, "entries were acknowledged that no database has"
        finally:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        wait(lambda: stored(node) > 0, "the way back")
        node.settle()
    node.assert_whole()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """One that may be killed; it keeps nothing over a restart."""
    server = Valkey(tmp_path / "valkey", durable=False)
    server.start()
    yield server
    server.stop()


def test_a_broker_that_is_killed_and_comes_back_empty_is_found_again(cast: Cast, own_valkey: Valkey) -> None:
    node = SpooledNode(cast, redis.Redis.from_url(own_valkey.url), b"line\n" * 20_000)
    with running_ingest(REDIS_URL=own_valkey.url):
        node.send(node.events[0], *node.chunks(0, 30_000))
        wait(lambda: stored(node) > 0, "progress")
        assert own_valkey.pid is not None
        os.kill(own_valkey.pid, signal.SIGKILL)
        own_valkey.stop()
        own_valkey.start()
        node.settle()
    node.assert_whole()


def test_a_broker_that_stands_still_is_waited_for(cast: Cast, own_valkey: Valkey) -> None:
    node = SpooledNode(cast, redis.Redis.from_url(own_valkey.url), b"line\n" * 20_000)
    with running_ingest(REDIS_URL=own_valkey.url) as process:
        node.heartbeat()
        wait(lambda: Node.objects.get(pk=node.node.pk).echo_nonce != "", "a heartbeat")
        assert own_valkey.pid is not None
        os.kill(own_valkey.pid, signal.SIGSTOP)
        try:
            asked_at = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0, "a broker that hangs must not keep ingest from ending"
            assert time.monotonic() - asked_at < 12
        finally:
            os.kill(own_valkey.pid, signal.SIGCONT)
    with running_ingest(REDIS_URL=own_valkey.url):
        node.settle()
    node.assert_whole()


def pending(broker: redis.Redis) -> int:
    return int(broker.xpending(upstream_key("n1"), "ingest")["pending"])


def test_it_ends_within_seconds_of_being_asked(node: SpooledNode) -> None:
    with running_ingest() as process:
        node.heartbeat()
        wait(lambda: Node.objects.get(pk=node.node.pk).echo_nonce != "", "a heartbeat")
        asked_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - asked_at < 5


def test_a_second_process_takes_over_when_the_first_one_dies(node: SpooledNode) -> None:
    with running_ingest() as first:
        node.heartbeat()
        wait(lambda: Node.objects.get(pk=node.node.pk).echo_nonce != "", "the first one's work")
        with running_ingest():
            first.kill()
            node.settle()
    node.assert_whole()
