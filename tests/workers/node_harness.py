"""A node under test: the real worker process, and a portal small enough to see that nothing is lost or doubled."""

import base64
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import redis

from wire import names, signing
from wire.desired import Acknowledged, Desired, HintBody, Launch, Stop
from wire.hardware import Hardware, HealthEvent
from wire.reports import AttemptEvent, GpuReading, Heartbeat, Inventory, LogChunk, Rejected, Report, Telemetry
from wire.signing import Action, Opener, Signer
from wire.states import ATTEMPT_ENDED, AttemptState
from workers import join

ROOT = Path(__file__).resolve().parent.parent.parent
NODE_RIGHTS = ["+brpop", "+llen", "+sadd", "+multi", "+exec", "+ping", "+hello", "+client|setinfo", "+xadd", "+get"]


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0, what: str = "") -> Any:
    """For what no condition variable announces: processes and files."""
    deadline = time.monotonic() + timeout_s
    turn = threading.Event()
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        turn.wait(0.01)
    return result


class AttemptRecord:
    """What the portal's database would have of one attempt."""

    def __init__(self) -> None:
        self.events: list[AttemptEvent] = []
        self.logs: dict[str, bytearray] = {}
        self.dropped: dict[str, int] = {}
        self.repeated_events = 0
        self.repeated_bytes = 0

    @property
    def state(self) -> AttemptState | None:
        return self.events[-1].state if self.events else None

    @property
    def complete(self) -> bool:
        if self.state not in ATTEMPT_ENDED:
            return False
        return all(len(self.logs.get(name, b"")) == size for name, size in self.events[-1].log_sizes.items())

    def take_event(self, event: AttemptEvent) -> None:
        if event.seq <= len(self.events):
            assert self.events[event.seq - 1] == event, "an event changed its meaning"
            self.repeated_events += 1
        elif event.seq == len(self.events) + 1:
            self.events.append(event)

    def take_chunk(self, chunk: LogChunk) -> None:
        assert zlib.crc32(chunk.data) == chunk.crc32
        log = self.logs.setdefault(chunk.stream, bytearray())
        gap = chunk.offset - len(log)
        if 0 < gap <= chunk.dropped_bytes:
            log.extend(bytes(gap))
            self.dropped[chunk.stream] = self.dropped.get(chunk.stream, 0) + gap
            gap = 0
        if gap > 0:
            return  # will come again
        known = log[chunk.offset:chunk.offset + len(chunk.data)]
        assert known == chunk.data[:len(known)], f"bytes at {chunk.offset} of {chunk.stream} changed"
        self.repeated_bytes += len(known)
        log.extend(chunk.data[len(known):])


class MiniPortal:
    """Signs orders, reads the stream, remembers, acknowledges."""

    def __init__(self, broker_url: str, node: str = "node1") -> None:
        self.node = node
        self.private_key = signing.new_private_key()
        self.public_key = signing.public_key_of(self.private_key)
        self.client = redis.Redis.from_url(broker_url, socket_timeout=5)
        self.signer = Signer(self.private_key, names.PORTAL)
        self.opener: Opener | None = None
        self.changed = threading.Condition(threading.RLock())
        self.serial = 0
        self.launches: list[Launch] = []
        self.stops: list[Stop] = []
        self.forget: list[str] = []
        self.echo = ""
        self.digest = ""
        self.records: dict[str, AttemptRecord] = {}
        self.heartbeats: list[Heartbeat] = []
        self.inventories: list[Inventory] = []
        self.rejected: list[Rejected] = []
        self.readings = 0
        self.newest: dict[str, GpuReading] = {}
        self.health: list[HealthEvent] = []
        self.hardware: list[Hardware] = []
        self._may_read, self._paused = threading.Event(), threading.Event()
        self._may_read.set()
        self._cursor = b"0"
        self._stopping = False
        self._thread = threading.Thread(target=self._ingest, daemon=True)

    def meet(self, node_public_key: bytes) -> None:
        self.opener = Opener(node_public_key, sender=self.node, audience=names.PORTAL, action=Action.REPORT,
                             lifetime_s=None)
        self._thread.start()

    def pause(self) -> None:
        """Ingest is down: when this returns, nothing more is read."""
        self._paused.clear()
        self._may_read.clear()
        assert self._paused.wait(10)

    def resume(self) -> None:
        self._may_read.set()

    def unread(self) -> int:
        return int(self.client.xlen(names.upstream_key(self.node)))

    def close(self) -> None:
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join(10)
        self.client.close()

    def launch(self, command: str, *, hint: bool = True, **fields: Any) -> Launch:
        fields = {"job": len(self.launches) + 1, "epoch": 1, "launcher": "script"} | fields
        launch = Launch(attempt=str(uuid.uuid4()), name="test", user="alice", command=command, **fields)
        with self.changed:
            self.launches.append(launch)
            self.serial += 1
            self.publish()
        if hint:
            self.hint()
        return launch

    def stop(self, launch: Launch, grace_s: float = 5.0) -> None:
        with self.changed:
            self.stops.append(Stop(attempt=launch.attempt, job=launch.job, epoch=launch.epoch, grace_s=grace_s))
            self.serial += 1
            self.publish()
        self.hint()

    def desired(self) -> Desired:
        return Desired(
            node=self.node, serial=self.serial, launches=list(self.launches), stops=list(self.stops),
            forget=list(self.forget), echo=self.echo, inventory_digest=self.digest,
            acknowledged={attempt: Acknowledged(event_seq=len(record.events),
                                                log_offsets={name: len(log) for name, log in record.logs.items()})
                          for attempt, record in self.records.items()},
        )

    def seal(self, body: Any, action: Action, *, audience: str | None = None, signer: Signer | None = None) -> bytes:
        return (signer or self.signer).seal(body, audience=audience or self.node, action=action, epoch=self.serial)

    def publish(self) -> None:
        with self.changed:
            self.put(self.seal(self.desired(), Action.DESIRED))

    def put(self, sealed: bytes) -> None:
        self.client.set(names.desired_key(self.node), sealed)

    def hint(self) -> None:
        self.push_task(base64.b64encode(self.seal(HintBody(serial=self.serial), Action.HINT)).decode())

    def push_task(self, argument: str, task: str = names.HINT_TASK) -> None:
        """A Celery message, as it lies on the queue."""
        body = base64.b64encode(json.dumps([[argument], {}, {}]).encode()).decode()
        tag, queue = str(uuid.uuid4()), names.hint_queue(self.node)
        message = {
            "body": body, "content-type": "application/json", "content-encoding": "utf-8",
            "headers": {"lang": "py", "task": task, "id": tag, "root_id": tag, "parent_id": None, "group": None},
            "properties": {"correlation_id": tag, "delivery_mode": 2, "delivery_tag": tag, "body_encoding": "base64",
                           "delivery_info": {"exchange": "", "routing_key": queue}, "priority": 0},
        }
        self.push_raw(json.dumps(message).encode())

    def push_raw(self, data: bytes) -> None:
        self.client.lpush(names.hint_queue(self.node), data)

    def wait(self, condition: Callable[[], Any], timeout_s: float = 20.0, what: str = "") -> Any:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), f"not within {timeout_s} s: {what or self.describe()}"
            return condition()

    def record(self, launch: Launch) -> AttemptRecord:
        with self.changed:
            return self.records.setdefault(launch.attempt, AttemptRecord())

    def wait_state(self, launch: Launch, *states: AttemptState, timeout_s: float = 20.0) -> AttemptRecord:
        record = self.record(launch)
        self.wait(lambda: record.state in states, timeout_s)
        return record

    def wait_complete(self, launch: Launch, timeout_s: float = 20.0) -> AttemptRecord:
        record = self.record(launch)
        self.wait(lambda: record.complete, timeout_s)
        return record

    def wait_heartbeat(self, timeout_s: float = 20.0) -> None:
        count = len(self.heartbeats)
        self.wait(lambda: len(self.heartbeats) > count, timeout_s, "a heartbeat")

    def describe(self) -> str:
        return str({attempt: [event.state.value for event in record.events] for attempt, record in self.records.items()}
                   | {"heartbeats": len(self.heartbeats), "rejected": [report.code for report in self.rejected]})

    def _ingest(self) -> None:
        for turn in itertools.count():
            if self._stopping:
                return
            try:
                self._read_once(turn)
            except redis.RedisError:
                threading.Event().wait(0.1)

    def _read_once(self, turn: int) -> None:
        if not self._may_read.is_set():
            self._paused.set()
            self._may_read.wait(0.1)
            return
        answer = self.client.xread({names.upstream_key(self.node): self._cursor}, count=200, block=200)
        for _, entries in answer or []:
            with self.changed:
                for entry_id, fields in entries:
                    self._take(fields[names.MESSAGE_FIELD])
                    self._cursor = entry_id
                self.client.xdel(names.upstream_key(self.node), *[entry_id for entry_id, _ in entries])
                self.publish()
                self.changed.notify_all()
        if not answer and turn % 5 == 0:
            self.publish()
            if not self.client.exists(names.upstream_key(self.node)):
                self._cursor = b"0"

    def _take(self, sealed: bytes) -> None:
        assert self.opener is not None
        report: Any = signing.decode(self.opener.open(sealed).body, Report)
        match report:
            case AttemptEvent():
                self.records.setdefault(report.attempt, AttemptRecord()).take_event(report)
            case LogChunk():
                self.records.setdefault(report.attempt, AttemptRecord()).take_chunk(report)
            case Heartbeat():
                self.heartbeats.append(report)
                self.echo = report.nonce
            case Inventory():
                self.inventories.append(report)
                self.digest = report.digest
            case Telemetry():
                self.readings += len(report.readings)
                self.newest |= {reading.uuid: reading for reading in report.readings}
            case HealthEvent():
                self.health.append(report)
            case Hardware():
                self.hardware.append(report)
            case Rejected():
                self.rejected.append(report)


class NodeProcess:
    """`python -m workers.app` on a state directory of its own."""

    def __init__(self, home: Path, portal: MiniPortal, broker_url: str, **env: str) -> None:
        self.state_dir = home / "state"
        self.log_path = home / "worker.log"
        self.env = env
        self.public_key = join.make_key(self.state_dir)
        self.config = join.store(self.state_dir, portal.node, {
            "node": portal.node, "portal_public_key": portal.public_key.hex(), "broker_url": broker_url,
            "protocol": names.PROTOCOL}, "DGX-H100-8")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT),
               "GPUYARD_NODE_CONFIG": str(self.config), "GPUYARD_NODE_HEARTBEAT_INTERVAL_S": "1", **self.env}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "workers.app"], env=env, stdout=log, stderr=log,
                                            cwd=self.state_dir)
        return self.process

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def terminate(self, timeout_s: float = 10.0) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def leave_nothing(self) -> None:
        """Whatever the test left: the worker, shims and jobs, found by this test's own directory."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        wait_until(lambda: not kill_all(str(self.state_dir)), 10, "no process of the test is left")


def kill_all(mark: str) -> int:
    """-> how many processes that carry `mark` in their command line or environment were killed."""
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if any(mark.encode() in (entry / name).read_bytes() for name in ("cmdline", "environ")):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
        except (OSError, ProcessLookupError):
            continue
    return killed


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def node_url(broker_url: str, portal: MiniPortal) -> str:
    """A broker user with exactly the rights of a node; -> its URL."""
    node = portal.node
    queue = names.hint_queue(node)
    portal.client.execute_command(
        "ACL", "SETUSER", node, "reset", "on", ">passw0rd-of-the-node", "-@all", f"~{queue}*",
        f"~_kombu.binding.{queue}",
        f"~_kombu.binding_permanent.{queue}", f"%W~{names.upstream_key(node)}", f"%R~{names.desired_key(node)}",
        *NODE_RIGHTS)
    host = broker_url.rpartition("@")[2].removeprefix("redis://")
    return f"redis://{node}:passw0rd-of-the-node@{host}"
