"""A node as the broker sees it, and the life of a run as it reports it."""

import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from portal.models import Allocation, Attempt, Event, Job, Node, Share
from portal.services import ingest, logs
from tests.portal.conftest import Cast
from wire.desired import Desired, Launch
from wire.names import desired_key, upstream_key
from wire.reports import (
    AttemptEvent,
    Heartbeat,
    LogChunk,
    Report,
)
from wire.signing import Action, Signer, new_private_key, public_key_of
from wire.states import AttemptState, EndReason


@dataclass
class Machine:
    """A node as the broker sees it."""

    node: Node
    broker: redis.Redis
    key: bytes = field(default_factory=new_private_key)
    sent: int = 0

    def __post_init__(self) -> None:
        Node.objects.filter(pk=self.node.pk).update(public_key=public_key_of(self.key))

    def send(self, *reports: Report, key: bytes | None = None, audience: str = "portal") -> None:
        signer = Signer(key or self.key, self.node.name)
        for report in reports:
            self.sent += 1
            self.send_raw(signer.seal(report, audience=audience, action=Action.REPORT, epoch=self.sent))

    def send_raw(self, sealed: bytes) -> None:
        self.broker.xadd(upstream_key(self.node.name), {b"m": sealed})

    def desired(self) -> Desired | None:
        raw = self.broker.get(desired_key(self.node.name))
        if raw is None:
            return None
        body, _signature = msgspec.msgpack.decode(raw, type=tuple[bytes, bytes])
        return msgspec.msgpack.decode(msgspec.msgpack.decode(body, type=list)[7], type=Desired)

    def waiting(self) -> int:
        return self.broker.xlen(upstream_key(self.node.name))


def start_attempt(cast: Cast, node: Node) -> Attempt:
    job = Job.objects.create(
        owner=cast.bob, project=cast.bob.personal_project, name="train", spec={}, gpu_count=1, state="starting"
    )
    attempt = Attempt.objects.create(job=job, number=1)
    order = Launch(attempt=str(attempt.pk), job=job.pk, epoch=1, name="t", user="bob", launcher="script", command="x")
    Share.objects.create(attempt=attempt, node=node, launch=msgspec.to_builtins(order))
    Allocation.objects.create(attempt=attempt, gpu=node.gpus.get(index=0), rank=0)
    return attempt


def event(attempt: Attempt, seq: int, state: AttemptState, **fields: Any) -> AttemptEvent:
    return AttemptEvent(
        attempt=str(attempt.pk), job=attempt.job_id, epoch=1, seq=seq, at=time.time(), state=state, **fields
    )


def chunk(attempt: Attempt, offset: int, data: bytes) -> LogChunk:
    return LogChunk(attempt=str(attempt.pk), job=attempt.job_id, epoch=1, stream="rank-0", offset=offset, data=data,
                    crc32=zlib.crc32(data))


def heartbeat(nonce: str = "n", **fields: Any) -> Heartbeat:
    return Heartbeat(boot_id="boot-1", nonce=nonce, serial=0, at=time.time(), started_at=0.0, **fields)


def drain(reader: ingest.Ingest) -> int:
    """Rounds until a round finds nothing."""
    taken = 0
    while count := reader.run_once(block_s=0.001):
        taken += count
    return taken + reader.run_once(block_s=0.001)


def a_whole_life(attempt: Attempt) -> list[Report]:
    return [
        event(attempt, 1, AttemptState.STARTING), event(attempt, 2, AttemptState.RUNNING),
        chunk(attempt, 0, b"epoch 1\n"), chunk(attempt, 8, b"epoch 2\n"),
        event(attempt, 3, AttemptState.SUCCEEDED, reason=EndReason.EXITED, exit_code=0, log_sizes={"rank-0": 16}),
    ]


def assert_whole(attempt: Attempt) -> None:
    job = Job.objects.get(pk=attempt.job_id)
    piece = logs.read(job, 0, 0, 100)
    assert (job.state, piece.data, piece.complete) == ("succeeded", b"epoch 1\nepoch 2\n", True)
    assert Share.objects.get(attempt=attempt).event_seq == 3
    assert not Allocation.objects.filter(released_at=None).exists()
    assert Event.objects.filter(job=job, kind="job.state", to_state="succeeded").count() == 1
