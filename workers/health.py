"""Health events on their way home, kept on disk until they surely arrived, and the slow-moving details of the GPUs.

A broker that loses everything loses no event: each is sent again for ten minutes, and its key makes a repeat harmless.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from wire.hardware import GpuHardware, Hardware, HealthEvent, Nic, NvLink
from wire.reports import GpuInfo, GpuReading
from workers.outbox import Clock, Pulse
from workers.publish import Publisher

RESEND_AFTER_S = (10.0, 60.0, 600.0)  # after the first sending
STORM_EVERY_S = 5.0  # an event that only became more numerous
SAME_WITHIN_S = 10.0  # of one cause; the driver's two ways to tell of it are seconds apart
MERGED = frozenset({"xid", "sxid", "ecc", "throttle"})
KEPT_MOST = 500
HARDWARE_EVERY_S = 30.0
COUNTERS = ("transmitted_bytes", "received_bytes", "replay_errors", "recovery_errors", "crc_errors")

logger = logging.getLogger(__name__)


class Kept(msgspec.Struct, kw_only=True):
    """An event and how often each source told of it."""

    event: HealthEvent
    counts: dict[str, int]


class Waiting:
    """A kept event in this process: when it was sent."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.sends = 0
        self.first_sent_at = self.sent_at = float("-inf")
        self.beats_at_send = 0
        self.changed = False

    def is_due(self, now: float) -> bool:
        if self.sends == 0:
            return True
        if self.changed and now - self.sent_at >= STORM_EVERY_S:
            return True
        return self.sends <= len(RESEND_AFTER_S) and now - self.first_sent_at >= RESEND_AFTER_S[self.sends - 1]

    def note_sent(self, now: float, beats: int) -> None:
        if self.sends == 0:
            self.first_sent_at = now
        self.sends += 0 if self.changed and self.sends else 1
        self.sent_at, self.beats_at_send, self.changed = now, beats, False

    def has_arrived(self, echoed: int) -> bool:
        """Sent to the last, and a heartbeat that went out later came back."""
        return self.sends > len(RESEND_AFTER_S) and not self.changed and echoed > self.beats_at_send


class HealthOutbox:
    def __init__(self, path: Path, publisher: Publisher, pulse: Pulse, clock: Clock = time.monotonic) -> None:
        self._path, self._publisher, self._pulse, self._clock = path, publisher, pulse, clock
        self._waiting = [Waiting(kept) for kept in self._load()]

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, events: Iterable[HealthEvent]) -> None:
        news = [self._note(event) for event in events]
        if any(news):
            self._save()

    def run_once(self) -> int:
        """-> how many were sent. Raises BrokerDown; nothing is lost by it."""
        now = self._clock()
        due = [one for one in self._waiting if one.is_due(now)]
        if due:
            self._publisher.send_all([one.kept.event for one in due])
            for one in due:
                one.note_sent(now, self._pulse.sent)
        arrived = [one for one in self._waiting if one.has_arrived(self._pulse.echoed)]
        if arrived:
            self._waiting = [one for one in self._waiting if one not in arrived]
            self._save()
        return len(due)

    def _note(self, event: HealthEvent) -> bool:
        known = self._same(event) if event.kind in MERGED else None
        if known is not None:
            return merge(known, event)
        self._waiting.append(Waiting(Kept(event=event, counts={event.source: event.count})))
        if len(self._waiting) > KEPT_MOST:
            logger.warning("more than %d health events wait to be confirmed; the oldest is given up", KEPT_MOST)
            del self._waiting[0]
        return True

    def _same(self, event: HealthEvent) -> Waiting | None:
        place = event.gpu_uuid or event.pci_bus_id
        for one in reversed(self._waiting):
            old = one.kept.event
            same = (old.kind, old.code, old.gpu_uuid or old.pci_bus_id) == (event.kind, event.code, place)
            if same and 0 <= event.at - old.at + SAME_WITHIN_S / 2 <= SAME_WITHIN_S * 1.5:
                return one
        return None

    def _load(self) -> list[Kept]:
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=list[Kept])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("the health events in %s cannot be read and are given up: %s", self._path, error)
            return []

    def _save(self) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.msgpack.encode([one.kept for one in self._waiting]))
            fresh.rename(self._path)
        except OSError as error:
            logger.error("%d health events cannot be kept in %s (%s); they are sent all the same",
                         len(self._waiting), self._path, error.strerror)


def merge(known: Waiting, event: HealthEvent) -> bool:
    """The same thing told again: by the same source it happened again, by another one it is the other view of it."""
    kept = known.kept
    kept.counts[event.source] = kept.counts.get(event.source, 0) + event.count
    count = max(kept.counts.values())
    message = max(kept.event.message, event.message, key=len)
    changed = (count, message) != (kept.event.count, kept.event.message)
    kept.event.count, kept.event.message = count, message
    known.changed |= changed and known.sends > 0
    return changed


class Attempts(Protocol):
    def active(self) -> list[str]: ...

    def processes(self, attempt: str) -> set[int]: ...


def claim(readings: Iterable[GpuReading], attempts: Attempts) -> None:
    """A process may have lost what names its attempt (some rewrite their environment); its group still knows it."""
    nameless = [process for reading in readings for process in reading.processes or () if process.attempt is None]
    if not nameless:
        return
    owners = {pid: attempt for attempt in attempts.active() for pid in attempts.processes(attempt)}
    for process in nameless:
        process.attempt = owners.get(process.pid)


def located(event: HealthEvent, infos: Iterable[GpuInfo]) -> HealthEvent:
    """With the UUID of the GPU that is at the event's place, so that both ways to tell of it are seen as one."""
    if event.gpu_uuid is None and event.pci_bus_id is not None:
        wanted = slot(event.pci_bus_id)
        event.gpu_uuid = next((info.uuid for info in infos if info.pci_bus_id and info.parent_uuid is None
                               and slot(info.pci_bus_id) == wanted), None)
    return event


def slot(pci_bus_id: str) -> list[int] | str:
    """The same place however it is written: 00000000:07:00.0 or 0000:07:00."""
    try:
        return [int(part, 16) for part in pci_bus_id.partition(".")[0].split(":")][-3:]
    except ValueError:
        return pci_bus_id


class HardwareDesk:
    """Sends the details of the GPUs every half minute, and at once when more than a counter changed."""

    def __init__(self, newest: Callable[[], Hardware | None], nics: Callable[[], list[Nic]],
                 send: Callable[[Hardware], None], clock: Clock = time.monotonic) -> None:
        self._newest, self._nics, self._send, self._clock = newest, nics, send, clock
        self._waiting: Hardware | None = None
        self._sent_at = float("-inf")
        self._sent_shape = b""

    def turn(self) -> None:
        """Raises BrokerDown; then the same is sent at the next turn."""
        self._waiting = self._newest() or self._waiting
        if self._waiting is None:
            return
        shape = shape_of(self._waiting)
        if shape == self._sent_shape and self._clock() - self._sent_at < HARDWARE_EVERY_S:
            return
        self._waiting.nics = self._nics()
        self._send(self._waiting)
        self._waiting, self._sent_at, self._sent_shape = None, self._clock(), shape


def shape_of(hardware: Hardware) -> bytes:
    """What does not change by itself."""
    return msgspec.msgpack.encode([still(gpu) for gpu in hardware.gpus])


def still(gpu: GpuHardware) -> GpuHardware:
    links: list[NvLink] = [msgspec.structs.replace(link, **dict.fromkeys(COUNTERS)) for link in gpu.links]
    return msgspec.structs.replace(gpu, links=links)
