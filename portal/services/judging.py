"""Readings weighed once a second: what is on a GPU that no allocation explains makes it dirty until it is gone.

Nearly every reading is as it should be, so the way through here without a finding costs no query.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.utils import timezone

from portal.hardware.verdicts import SELF_HEALING, Unexplained, is_held_back, is_quiet, unexplained
from portal.models import Allocation, Attempt, Gpu, Health, Node
from portal.services import foreign, health
from portal.services.desired import is_uuid
from wire.reports import GpuReading

EVERY_S = 0.9  # a little under the pace of the readings
PICTURE_AGE_S = 2.0
CLEAN_READINGS = 2  # in a row, until what is gone counts as gone
UNTHROTTLED_READINGS = 30
CONFIRMED_AFTER_S = {"foreign": 0.5, "leftover": 5.0, "memory": 5.0}
"""A short-lived process, and memory that comes back a moment after its job, are no finding."""

Clock = Callable[[], float]

log = logging.getLogger(__name__)


class Picture:
    """What the database knows that readings are held against, read for all nodes together and only when needed."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._holders: dict[str, str] = {}
        self._open: dict[str, dict[str, int]] = {}
        self._cut: set[str] = set()
        self.holders_at = self._open_at = float("-inf")

    def holder(self, uuid: str) -> str | None:
        if self._clock() - self.holders_at > PICTURE_AGE_S:
            self.holders_at = self._clock()
            active = Allocation.objects.filter(released_at=None).values_list("gpu__uuid", "attempt_id")
            self._holders = {gpu: str(attempt) for gpu, attempt in active}
        return self._holders.get(uuid)

    def look(self) -> None:
        """What is open may have been opened elsewhere, too, such as by a check before a start."""
        if self._clock() - self._open_at <= PICTURE_AGE_S:
            return
        self._open_at = self._clock()
        self._open = {}
        rows = Health.objects.filter(resolved_at=None, kind__in=SELF_HEALING | {"throttle"}, gpu__isnull=False)
        for uuid, kind, key, pk in rows.values_list("gpu__uuid", "kind", "key", "pk"):
            self._open.setdefault(uuid, {})[kind if kind == "throttle" else identity_of(key)] = pk
        self._cut = set(Gpu.objects.filter(mig_enabled=True, present=True).values_list("uuid", flat=True))

    def open(self, uuid: str) -> dict[str, int]:
        """Identity -> row, of what is open on this GPU."""
        return self._open.get(uuid, {})

    def note(self, uuid: str, identity: str, row: int | None) -> None:
        """A row that was just opened, or closed."""
        if row is None:
            self._open.get(uuid, {}).pop(identity, None)
        else:
            self._open.setdefault(uuid, {})[identity] = row

    def is_cut(self, uuid: str) -> bool:
        """Into slices, which speak for themselves."""
        return uuid in self._cut


@dataclass
class Suspicion:
    since: float
    readings: int = 0
    absent: int = 0


@dataclass
class Watch:
    """One GPU that shows, or showed, something unexplained."""

    suspicions: dict[str, Suspicion] = field(default_factory=dict)


class Judge:
    """Of one node."""

    def __init__(self, node: Node, picture: Picture | None = None, clock: Clock = time.monotonic) -> None:
        self._node, self._clock = node, clock
        self._picture = picture or Picture(clock)
        self._newest: dict[str, GpuReading] = {}
        self._watches: dict[str, Watch] = {}
        self._looked_at = float("-inf")

    def add(self, readings: Iterable[GpuReading]) -> None:
        for reading in readings:
            self._newest[reading.uuid] = reading

    def look(self) -> int:
        """-> how many GPUs needed a closer look."""
        now = self._clock()
        if not self._newest or now - self._looked_at < EVERY_S:
            return 0
        newest, self._newest, self._looked_at = self._newest, {}, now
        self._picture.look()
        closer = [reading for reading in newest.values() if self._is_odd(reading)]
        for reading in closer:
            with transaction.atomic():
                self._weigh(reading, now)
        return len(closer)

    def _is_odd(self, reading: GpuReading) -> bool:
        uuid = reading.uuid
        if uuid in self._watches or self._picture.open(uuid):
            return True
        if is_quiet(reading) or self._picture.is_cut(uuid):
            return False
        return bool(unexplained(reading, self._picture.holder(uuid)))

    def _weigh(self, reading: GpuReading, now: float) -> None:
        uuid = reading.uuid
        watch = self._watches.setdefault(uuid, Watch())
        if reading.processes is None or "gpu" in reading.missing:
            return  # nothing is known: neither found nor gone
        found = {} if self._picture.is_cut(uuid) else {
            one.identity: one for one in unexplained(reading, self._picture.holder(uuid))}  # fmt: skip
        for identity, one in found.items():
            suspicion = watch.suspicions.setdefault(identity, Suspicion(now))
            suspicion.readings, suspicion.absent = suspicion.readings + 1, 0
            if identity not in self._picture.open(uuid) and self._is_confirmed(one, suspicion, now):
                self._open(uuid, one)
        self._note_absent(uuid, watch, {*found, *(["throttle"] if is_held_back(reading) else [])})
        foreign.enforce(self._node, uuid, [one for key, one in found.items() if key in self._picture.open(uuid)])
        if not watch.suspicions and not self._picture.open(uuid):
            del self._watches[uuid]

    def _is_confirmed(self, one: Unexplained, suspicion: Suspicion, now: float) -> bool:
        """Seen twice, for long enough, and held against allocations that were read after it was first seen."""
        if suspicion.readings < 2 or now - suspicion.since < CONFIRMED_AFTER_S[one.kind]:
            return False
        return one.kind == "foreign" or self._picture.holders_at > suspicion.since

    def _note_absent(self, uuid: str, watch: Watch, seen: set[str]) -> None:
        for identity in seen & watch.suspicions.keys():
            watch.suspicions[identity].absent = 0
        for identity in {*watch.suspicions, *self._picture.open(uuid)} - seen:
            if identity == "busy" and seen - {"throttle"}:
                continue  # what the check before a start met is still there; it gets a name of its own soon
            suspicion = watch.suspicions.setdefault(identity, Suspicion(0.0))
            suspicion.absent += 1
            if suspicion.absent >= (UNTHROTTLED_READINGS if identity == "throttle" else CLEAN_READINGS):
                del watch.suspicions[identity]
                self._close(uuid, identity)

    def _open(self, uuid: str, one: Unexplained) -> None:
        gpu = Gpu.objects.select_related("node").filter(node=self._node, uuid=uuid).first()
        if gpu is None:
            return
        now = timezone.now()
        key = f"{one.identity}/{uuid}/{now.timestamp():.3f}"
        level: dict[str, Any] = {"severity": foreign.severity()} if one.kind == "foreign" else {}
        row = health.open_finding(gpu, one.kind, reason_of(gpu, one), key=key, at=now, source="readings",
                                  **level)  # fmt: skip
        self._picture.note(uuid, one.identity, row.pk)

    def _close(self, uuid: str, identity: str) -> None:
        row_id = self._picture.open(uuid).get(identity)
        if row_id is None:
            return
        rows = Health.objects.filter(pk=row_id)
        gpu = Gpu.objects.select_related("node").filter(node=self._node, uuid=uuid).first()
        if gpu is not None and health.resolve(rows):
            health.settle(gpu)
        self._picture.note(uuid, identity, None)


def identity_of(key: str) -> str:
    """-> "foreign/4711" of "foreign/4711/GPU-…/1764500000.123", "memory" of "memory/GPU-…/…"."""
    return key.rsplit("/", 2)[0]


def reason_of(gpu: Gpu, one: Unexplained) -> str:
    if one.kind == "foreign":
        return one.reason
    job = last_job(gpu, one)
    return f"Memory not returned by job #{job}. {one.reason}" if job else one.reason


def last_job(gpu: Gpu, one: Unexplained) -> int | None:
    """Whose memory it probably is: that of the process's attempt, else of whoever held the GPU last."""
    if one.process is not None and one.process.attempt:
        if not is_uuid(one.process.attempt):
            return None
        return Attempt.objects.filter(pk=one.process.attempt).values_list("job_id", flat=True).first()
    past = Allocation.objects.filter(gpu=gpu).exclude(released_at=None).order_by("-released_at")
    return past.values_list("attempt__job_id", flat=True).first()
