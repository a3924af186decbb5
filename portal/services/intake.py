"""What the entries of one node's stream mean: opened, checked to be its own, applied in one transaction.

Everything here may happen twice: a batch that was committed but not acknowledged to the broker comes again and changes
nothing.
"""

import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection, transaction

from portal.models import LogStream, Node, Share
from portal.services import attempts, events, hardware_reports, health, live, logs, nodes, orders
from portal.services.gauges import Gauges
from portal.services.judging import Judge, Picture
from portal.services.samples import READINGS_PER_REPORT
from wire.hardware import Hardware, HealthEvent, OrderResult
from wire.names import PORTAL
from wire.reports import AttemptEvent, Heartbeat, Inventory, LogChunk, Rejected, Report, Telemetry
from wire.signing import Action, Opener, Refused

MAX_ENTRY_BYTES = 4 * 1024 * 1024
HEARTBEAT_LIFETIME_S = 120.0  # an older one proves nothing about now, whoever put it into the stream
SAME_COMPLAINT_EVERY_S = 60.0
SET_ASIDE_MOST = 1000

Entry = tuple[bytes, bytes | None]  # id, sealed report; None: trimmed away meanwhile
InOrder = AttemptEvent | Inventory | Rejected | Hardware | HealthEvent | OrderResult

decode_report = msgspec.msgpack.Decoder(Report).decode
log = logging.getLogger(__name__)


class DatabaseDown(Exception):
    """Nothing was applied and nothing may be acknowledged: the same entries are read again later."""


@dataclass
class Outcome:
    """`progress`: the node waits for an acknowledgement. `urgent`: and somebody waits for the node because of it."""

    progress: bool = False
    urgent: bool = False

    def add(self, other: "Outcome") -> None:
        self.progress |= other.progress
        self.urgent |= other.urgent


class Received(NamedTuple):
    entry_id: bytes
    report: Report
    issued_at: float


@dataclass
class Sorted:
    """The reports of a batch, by what they need."""

    chunks: list[LogChunk] = field(default_factory=list)
    in_order: list[InOrder] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    telemetry: list[Telemetry] = field(default_factory=list)
    shares: dict[uuid.UUID, Share] = field(default_factory=dict)

    @property
    def is_to_store(self) -> bool:
        """Telemetry alone, which is nearly everything that comes, needs no transaction of its own."""
        return bool(self.chunks or self.in_order or self.heartbeat)

    def attempts(self) -> list[str]:
        of_events = [report.attempt for report in self.in_order if isinstance(report, AttemptEvent)]
        return [*of_events, *(chunk.attempt for chunk in self.chunks)]

    def share(self, chunk: LogChunk) -> Share:
        return self.shares[uuid.UUID(chunk.attempt)]


class Intake:
    """One node's way in."""

    def __init__(self, node: Node, clock: Callable[[], float] = time.time, picture: Picture | None = None) -> None:
        self.node = node
        self.gauges = Gauges(node, clock)
        self.judge = Judge(node, picture)
        self._clock = clock
        self._opener = Opener(
            bytes(node.public_key), sender=node.name, audience=PORTAL, action=Action.REPORT, lifetime_s=None
        )
        self._complaints: list[tuple[str, str, str]] = []
        self._complained_at: dict[tuple[str, str], float] = {}

    def take(self, entries: Iterable[Entry]) -> Outcome:
        """Afterwards every entry may be acknowledged. Raises DatabaseDown."""
        received = [opened for entry in entries if (opened := self._open(*entry))]
        outcome = self._apply_together(received) if received else Outcome()
        self._weigh()
        self.tell()
        return outcome

    def complain(self, kind: str, reason: str, message: str) -> None:
        """Something that people should see, at most once a minute for the same thing."""
        now = self._clock()
        if now - self._complained_at.get((kind, reason), -math.inf) >= SAME_COMPLAINT_EVERY_S:
            self._complained_at[kind, reason] = now
            self._complaints.append((kind, reason, message))

    def tell(self) -> None:
        """Complaints become events, outside of the transaction that they complain about."""
        complaints, self._complaints = self._complaints, []
        for kind, reason, message in complaints:
            log.warning("%s, node %s, %s: %s", kind, self.node.name, reason, message)
            try:
                events.record(kind, node=self.node, reason=reason, message=message)
            except DatabaseError:
                require_database()
                log.exception("The event %s about %s was not recorded.", kind, self.node.name)

    def _weigh(self) -> None:
        try:
            self.judge.look()
        except Exception:
            require_database()
            log.exception("The readings of %s could not be weighed; the next ones will be.", self.node.name)

    # --- one entry ----------------------------------------------------------------------------------------------------
    def _open(self, entry_id: bytes, sealed: bytes | None) -> Received | None:
        if sealed is None:
            return None
        try:
            if len(sealed) > MAX_ENTRY_BYTES:
                raise Refused("too_large", f"{len(sealed)} bytes, at most {MAX_ENTRY_BYTES} are accepted")
            envelope = self._opener.open(sealed)
            return Received(entry_id, decode_report(envelope.body), envelope.issued_at)
        except Refused as refusal:
            self.complain("node.rejected", refusal.code, f"A report was not accepted: {refusal.message}")
        except msgspec.MsgspecError as error:
            self.complain("node.rejected", "malformed", f"A report was not accepted: {error}")
        return None

    def _apply_alone(self, one: Received) -> Outcome:
        try:
            return self._apply([one])
        except Exception as error:
            require_database()
            log.exception("Report %s of %s cannot be applied and is set aside.", one.entry_id.decode(), self.node.name)
            set_aside(self.node, one)
            kind = type(one.report).__name__
            self.complain("node.set_aside", kind, f"A {kind} report cannot be applied and was set aside: {error}")
            return Outcome()

    # --- a batch ------------------------------------------------------------------------------------------------------
    def _apply_together(self, received: list[Received]) -> Outcome:
        try:
            return self._apply(received)
        except Exception:
            require_database()
            log.exception("%d reports of %s could not be applied together; each is tried alone.",
                          len(received), self.node.name)
        outcome = Outcome()
        for one in received:
            outcome.add(self._apply_alone(one))
        return outcome

    def _apply(self, received: list[Received]) -> Outcome:
        batch = self._sort(received)
        outcome = self._store(batch) if batch.is_to_store else Outcome()
        for telemetry in batch.telemetry:
            self.gauges.add(telemetry.readings[:READINGS_PER_REPORT])
            self.judge.add(telemetry.readings[:READINGS_PER_REPORT])
        return outcome

    def _store(self, batch: Sorted) -> Outcome:
        batch.shares = own_shares(self.node, batch.attempts())
        chunks = [chunk for chunk in batch.chunks if self._is_own(chunk, batch)]
        written = logs.write(chunk for chunk in chunks if batch.share(chunk).forgotten_at is None)
        outcome = Outcome(progress=bool(chunks or batch.heartbeat))
        with transaction.atomic():
            self._apply_in_order(batch, outcome)
            grown = written.save()
            outcome.urgent |= forget_whole(grown, batch.shares)
            tell_of_logs(grown, batch.shares)
        self._complain_of_chunks(written.refused)
        return outcome

    def _sort(self, received: list[Received]) -> Sorted:
        batch = Sorted()
        for one in received:
            match one.report:
                case LogChunk():
                    batch.chunks.append(one.report)
                case Telemetry():
                    batch.telemetry.append(one.report)
                case Heartbeat():
                    if abs(self._clock() - one.issued_at) <= HEARTBEAT_LIFETIME_S:
                        batch.heartbeat = one.report
                case _:
                    batch.in_order.append(one.report)
        return batch

    def _is_own(self, report: LogChunk | AttemptEvent, batch: Sorted) -> bool:
        key = uuid_of(report.attempt)
        share = batch.shares.get(key) if key else None
        if share and share.attempt.job_id == report.job and share.attempt.number == report.epoch:
            return True
        self.complain("node.violation", "foreign_attempt", f"A report on attempt {report.attempt[:40]!r} of job "
                      f"{report.job}, which this node was never given, was dropped.")
        return False

    def _apply_in_order(self, batch: Sorted, outcome: Outcome) -> None:
        node = Node.objects.get(pk=self.node.pk)
        for report in batch.in_order:
            match report:
                case AttemptEvent():
                    if self._is_own(report, batch):
                        attempts.apply(node, report)
                        outcome.add(Outcome(progress=True, urgent=report.reason is not None))
                case Inventory():
                    nodes.inventory(node, report)
                    outcome.progress = True
                case Rejected():
                    self.complain("node.rejected", report.code, f"The node refused an order: {report.message}")
                case _:
                    apply_hardware(node, report)
        if batch.heartbeat:
            nodes.heartbeat(node, batch.heartbeat)

    def _complain_of_chunks(self, refused: Counter[str]) -> None:
        for code, count in refused.items():
            if code != "gap":  # an ordinary thing: the node goes back and sends what is missing
                self.complain("node.rejected", code, f"{count} log chunk(s) were not accepted: {code}.")


# --- helpers ----------------------------------------------------------------------------------------------------------
def own_shares(node: Node, attempt_ids: list[str]) -> dict[uuid.UUID, Share]:
    wanted = {key for text in attempt_ids if (key := uuid_of(text))}
    if not wanted:
        return {}
    rows = Share.objects.filter(node=node, attempt_id__in=wanted).select_related("attempt")
    return {share.attempt_id: share for share in rows}


def apply_hardware(node: Node, report: Hardware | HealthEvent | OrderResult) -> None:
    match report:
        case Hardware():
            hardware_reports.apply(node, report)
        case HealthEvent():
            health.report(node, report)
        case OrderResult():
            orders.result(node, report)


def uuid_of(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def forget_whole(grown: list[LogStream], shares: dict[uuid.UUID, Share]) -> bool:
    """A log that became whole may be the last thing that a share's end waited for."""
    whole = {stream.attempt_id for stream in grown if stream.complete}
    # Read again: an end in the same batch has moved them.
    for share in Share.objects.filter(pk__in=[shares[attempt_id].pk for attempt_id in whole]):
        attempts.forget_if_whole(share)
    return bool(whole)


def tell_of_logs(grown: list[LogStream], shares: dict[uuid.UUID, Share]) -> None:
    sizes: dict[int, dict[str, int]] = {}
    for stream in grown:
        sizes.setdefault(shares[stream.attempt_id].attempt.job_id, {})[stream.name] = stream.size_bytes
    for job_id, streams in sizes.items():
        live.notify(live.job_channel(job_id), "log", streams=streams)


def require_database() -> None:
    """Tells a faulty report from a missing database. A connection from before a restart of the server is replaced."""
    try:
        if not connection.in_atomic_block:
            connection.close()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except (DatabaseError, InterfaceError) as error:
        raise DatabaseDown(str(error)) from error


def set_aside(node: Node, one: Received) -> None:
    """Kept for whoever looks into it. Never in the way."""
    folder = Path(settings.STATE_DIR) / "aside"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if sum(1 for _ in folder.iterdir()) < SET_ASIDE_MOST:
            (folder / f"{node.name}-{one.entry_id.decode()}.txt").write_text(repr(one.report))
    except OSError as error:
        log.warning("The report could not be kept either: %s", error)
