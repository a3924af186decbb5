"""Reads every node's stream: entries into the database, then acknowledged, then the node is told what is durable."""

import contextlib
import json
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import psycopg
import redis
from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from portal.models import Node
from portal.services import broker, desired
from portal.services.gauges import Board
from portal.services.intake import DatabaseDown, Entry, Intake, require_database
from portal.services.judging import Picture
from wire.names import INGEST_GROUP, MESSAGE_FIELD, upstream_key

CONSUMER = "ingest-1"
LOCK_KEY = 0x67707579_696E  # of PostgreSQL's advisory locks: there is one ingest
BLOCK_S = 0.5
SOCKET_TIMEOUT_S = 5.0
NODES_EVERY_S = 2.0
ENTRIES_PER_ROUND = 512  # shared out among the nodes, so that memory does not grow with their number
ENTRIES_LEAST = 16
PAUSE_PER_STREAM_S = 0.0002  # between two rounds: none to speak of with ten nodes, a fifth of a second with a thousand
PAUSE_LEAST_S = 0.005
PAUSE_MOST_S = 0.2
PUBLISH_EVERY_S = 0.5
CAP_EVERY_S = 10.0
STREAM_CAP = 20_000
ALIVE_KEY = "ingest.alive"
ALIVE_EVERY_S = 1.0
ALIVE_FOR_S = 3600
BACKOFF_MOST_S = 2.0

log = logging.getLogger(__name__)


def lag_s() -> float | None:
    """How far ingest is behind; None if none has run for an hour. Raises redis.RedisError."""
    raw: Any = broker.client().get(ALIVE_KEY)
    if raw is None:
        return None
    alive = json.loads(raw)
    silent_s = max(0.0, time.time() - alive["at"])
    return round(alive["lag_s"] + (silent_s if silent_s > 2 * ALIVE_EVERY_S else 0.0), 1)


class AnotherIngest(Exception):
    """Two of them would race for the same bytes. The second one waits."""


WAIT_FOR = (AnotherIngest, DatabaseDown, DatabaseError, InterfaceError, psycopg.Error, redis.RedisError)


class SoleLock:
    """Held on a connection of its own for as long as the process lives: a pooled one would outlive it."""

    def __init__(self) -> None:
        self._connection: psycopg.Connection[Any] | None = None

    def hold(self) -> None:
        """Raises AnotherIngest, or psycopg.Error when the database is gone."""
        if self._connection and not self._connection.broken:
            self._connection.execute("SELECT 1")
            return
        self.release()
        fresh = psycopg.connect(**connection.get_connection_params(), autocommit=True)
        row = fresh.execute("SELECT pg_try_advisory_lock(%s)", [LOCK_KEY]).fetchone()
        if not row or not row[0]:
            fresh.close()
            raise AnotherIngest("Another ingest is at work on this database. This one waits until it ends.")
        self._connection = fresh

    def release(self) -> None:
        held, self._connection = self._connection, None
        if held:
            with contextlib.suppress(psycopg.Error):  # the end of the connection is the end of the lock
                held.execute("SELECT pg_advisory_unlock(%s)", [LOCK_KEY])
            held.close()


@dataclass
class Line:
    """One node's stream and what is still to be told to the node."""

    intake: Intake
    published_at: float = 0.0
    owed: bool = False  # something became durable since

    @property
    def key(self) -> str:
        return upstream_key(self.intake.node.name)


class Ingest:
    def __init__(self, client: redis.Redis | None = None) -> None:
        self._redis = client or new_client()
        self._lines: dict[bytes, Line] = {}
        self._picture = Picture()
        self._board = Board()
        self._nodes_at = self._capped_at = self._alive_at = self._read_at = 0.0
        self._backlog = True  # entries that were delivered to us before and never acknowledged
        self._lag_s = 0.0

    # --- the loop -----------------------------------------------------------------------------------------------------
    def run(self, stop: threading.Event) -> None:
        lock, pause_s, told = SoleLock(), 0.1, ""
        while not stop.is_set():
            try:
                lock.hold()
                close_old_connections()
                self.run_once()
                pause_s, told = 0.1, ""
            except WAIT_FOR as error:
                if told != (told := f"{type(error).__name__}: {error}"):
                    log.warning("Ingest waits. %s", told)
                self.retreat()
                stop.wait(pause_s)
                pause_s = min(BACKOFF_MOST_S, pause_s * 2)
            except Exception:
                log.exception("A round of ingest failed and is repeated.")
                self.retreat()
                stop.wait(BACKOFF_MOST_S)
        self.finish()
        lock.release()

    def run_once(self, block_s: float = BLOCK_S) -> int:
        """One round: read, apply, commit, acknowledge, tell. -> entries taken."""
        self._find_nodes()
        taken = 0
        done: dict[bytes, list[bytes]] = {}
        try:
            for key, entries in self._read(block_s):
                taken += len(entries)
                self._take(key, entries)
                done[key] = [entry_id for entry_id, _ in entries]
        finally:
            if done:
                self._acknowledge(done)
        if self._backlog and not taken:
            self._backlog = False
        self._flush_gauges()
        self._tell_nodes()
        self._keep_in_bounds()
        self._show_alive()
        return taken

    def retreat(self) -> None:
        """What was delivered and not applied is read again, over connections that are new."""
        self._backlog = True
        self._nodes_at = 0.0
        if not connection.in_atomic_block:
            connection.close()

    def finish(self) -> None:
        try:
            self._flush_gauges(force=True)
        except (DatabaseDown, DatabaseError, InterfaceError) as error:
            log.warning("The last seconds of telemetry were not stored: %s", error)

    # --- reading ------------------------------------------------------------------------------------------------------
    def _find_nodes(self) -> None:
        if time.monotonic() - self._nodes_at < NODES_EVERY_S and self._nodes_at:
            return
        lines: dict[bytes, Line] = {}
        for node in Node.objects.only("name", "public_key"):
            key = upstream_key(node.name).encode()
            known = self._lines.get(key)
            same = known is not None and bytes(known.intake.node.public_key) == bytes(node.public_key)
            lines[key] = known if known and same else Line(Intake(node, picture=self._picture))
        fresh = [key for key in lines if key not in self._lines]
        self._lines, self._nodes_at = lines, time.monotonic()
        self._make_groups(fresh)
        self._backlog = self._backlog or bool(fresh)

    def _make_groups(self, keys: list[bytes]) -> None:
        """From the very beginning of the stream: what a node sent before its group existed counts as well."""
        for key in keys:
            try:
                self._redis.xgroup_create(key, INGEST_GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def _read(self, block_s: float) -> list[tuple[bytes, list[Entry]]]:
        if not self._lines:
            time.sleep(block_s)
            return []
        since = "0" if self._backlog else ">"
        block_ms = None if self._backlog else max(1, int(min(block_s, self._until_due_s()) * 1000))
        count = max(ENTRIES_LEAST, ENTRIES_PER_ROUND // len(self._lines))
        self._pace()
        try:
            reply: Any = self._redis.xreadgroup(
                INGEST_GROUP, CONSUMER, dict.fromkeys(self._lines, since), count=count, block=block_ms
            )
        except redis.ResponseError as error:
            if not any(word in str(error) for word in ("NOGROUP", "UNBLOCKED")):
                raise
            log.warning("The broker lost its streams; they are made anew and the nodes send again what was in them.")
            self._make_groups(list(self._lines))
            return []
        return [(key, [entry_of(*pair) for pair in entries]) for key, entries in reply or [] if entries]

    def _pace(self) -> None:
        """Asking costs as much as there are streams, so the more there are the more entries should wait in them."""
        pause_s = self._read_at + min(PAUSE_MOST_S, len(self._lines) * PAUSE_PER_STREAM_S) - time.monotonic()
        if pause_s > PAUSE_LEAST_S:
            time.sleep(pause_s)
        self._read_at = time.monotonic()

    def _take(self, key: bytes, entries: list[Entry]) -> None:
        line = self._lines[key]
        outcome = line.intake.take(entries)
        self._lag_s = max(self._lag_s, time.time() - int(entries[0][0].split(b"-")[0]) / 1000)
        line.owed |= outcome.progress
        if outcome.urgent:
            self._tell(line)

    def _acknowledge(self, done: dict[bytes, list[bytes]]) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            for key, ids in done.items():
                pipeline.xack(key, INGEST_GROUP, *ids)
                pipeline.xdel(key, *ids)
            pipeline.execute()

    # --- besides ------------------------------------------------------------------------------------------------------
    def _flush_gauges(self, *, force: bool = False) -> None:
        try:
            self._board.flush([line.intake.gauges for line in self._lines.values()], force=force)
        except Exception:
            require_database()
            log.exception("The newest seconds of telemetry were lost.")

    def _until_due_s(self) -> float:
        now = time.monotonic()
        due = [line.published_at + PUBLISH_EVERY_S - now for line in self._lines.values() if line.owed]
        return max(0.0, min(due, default=BLOCK_S))

    def _tell_nodes(self) -> None:
        now = time.monotonic()
        for line in self._lines.values():
            if line.owed and now - line.published_at >= PUBLISH_EVERY_S:
                self._tell(line)

    def _tell(self, line: Line) -> None:
        """The desired state anew, for the acknowledgements in it. If this one is lost, the periodic one follows."""
        line.owed, line.published_at = False, time.monotonic()
        desired.publish(Node.objects.get(pk=line.intake.node.pk))

    def _keep_in_bounds(self) -> None:
        """A node that floods its stream loses the oldest entries of it, not the broker its memory."""
        if time.monotonic() - self._capped_at < CAP_EVERY_S:
            return
        self._capped_at = time.monotonic()
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in self._lines:
                pipeline.xlen(key)
            lengths = pipeline.execute()
        for (key, line), length in zip(self._lines.items(), lengths, strict=True):
            if length > STREAM_CAP:
                self._redis.xtrim(key, maxlen=STREAM_CAP, approximate=False)
                sentence = f"{length} reports are waiting, more than {STREAM_CAP}; the oldest were dropped."
                line.intake.complain("node.violation", "flood", sentence)
                line.intake.tell()

    def _show_alive(self) -> None:
        if time.monotonic() - self._alive_at < ALIVE_EVERY_S:
            return
        self._alive_at = time.monotonic()
        self._redis.set(ALIVE_KEY, json.dumps({"at": time.time(), "lag_s": self._lag_s}), ex=ALIVE_FOR_S)
        self._lag_s = 0.0


def entry_of(entry_id: bytes, fields: dict[bytes, bytes] | None) -> Entry:
    """A pending entry that was trimmed meanwhile has no fields; one without ours counts as empty garbage."""
    return entry_id, (fields.get(MESSAGE_FIELD, b"") if fields else None)


def new_client() -> redis.Redis:
    """No silent repeats: after a broken read, what was delivered in it must be asked for as backlog."""
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=SOCKET_TIMEOUT_S,
        socket_keepalive=True, health_check_interval=15, protocol=2, retry=Retry(NoBackoff(), 0),
    )
