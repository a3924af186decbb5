"""What a node does beside its one Celery task, wired together: each method is one turn of a loop (see steps)."""

import logging
import os
import shutil
import time

import psutil

from wire.hardware import Nic
from wire.reports import GpuInfo, Heartbeat, Inventory, Telemetry
from wire.signing import public_key_of
from workers import inventory, topology
from workers.gpus import AUTO, SIMULATED, GpuList, sim_nics
from workers.health import HardwareDesk, HealthOutbox, claim, located
from workers.kernel_log import KernelLog
from workers.logs import Shipper
from workers.loops import Loop, Restarter
from workers.orders import Orders
from workers.outbox import EventOutbox, Pulse
from workers.preflight import Preflight
from workers.publish import Publisher
from workers.settings import Settings
from workers.spool import Spool
from workers.supervisor import Supervisor
from workers.sync import Doorbell, Rejections, Sync, Upward
from workers.telemetry import Reader

UNACKNOWLEDGED_SYNC_INTERVAL_S = 0.5
"""While something waits to be acknowledged: the windows of the log shipper open only as fast as this."""

STUCK_AFTER_S = 60.0
INVENTORY_RESEND_S = 5.0
INVENTORY_UNHEARD_RESEND_S = 60.0
FIRST_ANSWER_S = 15.0
DAY_S = 86_400.0
TIDY_INTERVAL_S = 3600.0

logger = logging.getLogger(__name__)


class Agent:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started_at = time.time()
        self.pulse = Pulse()
        self.publisher = Publisher(settings)
        self.spool = Spool(settings.spool_root)
        self.preflight = Preflight(settings.state_dir, self._listed, lambda: self.reader.status)
        self.supervisor = Supervisor(self.spool, settings, preflight=self.preflight)
        self.logs = Shipper(self.spool, self.publisher, self.pulse)
        self.events = EventOutbox(self.spool, self.publisher, self.pulse, self.logs.stream_sizes)
        self.rejections = Rejections()
        # Two yards on one machine may both have a node1: its key tells their simulated GPUs apart.
        identity = f"{settings.node}.{public_key_of(settings.private_key).hex()[:16]}"
        self.reader = Reader(SIMULATED if settings.simulate else AUTO, settings.simulate, identity,
                             interval_s=settings.telemetry_interval_s)
        self.orders = Orders(settings.state_dir, self.reader, self.supervisor)
        self.sync = Sync(settings, self.publisher, self.supervisor,
                         Upward(self.events, self.logs, self.pulse, self.orders), self.rejections)
        self.kernel_log = KernelLog()
        self.health = HealthOutbox(settings.state_dir / "health.msgpack", self.publisher, self.pulse)
        self.hardware = HardwareDesk(self.reader.hardware, self._nics, self.publisher.send)
        self.restarter = Restarter(settings.state_dir / "restarted_at")
        self.sync_loop = Loop("sync", self.sync_turn)
        self.watch_loop = Loop("watch", self.watch_turn)
        self.event_loop = Loop("events", self.event_turn)
        self.log_loop = Loop("logs", self.log_turn)
        self.telemetry_loop = Loop("telemetry", self.telemetry_turn)
        self.health_loop = Loop("health", self.health_turn)
        self.inventory_loop = Loop("inventory", self.inventory_turn)
        self.heartbeat_loop = Loop("heartbeat", self.heartbeat_turn)
        self.tidy_loop = Loop("tidy", self.tidy_turn)
        self.doorbell = Doorbell(settings, self.rejections, self.sync_loop.wake)
        self._desk = InventoryDesk(self)

    def recover(self) -> None:
        """Before anything else: what runs here already is found again, so that no order starts it twice."""
        try:
            self.supervisor.recover()
        except Exception:
            logger.exception("recovering the attempts on this node failed; the node goes on with what it found")

    def sync_turn(self) -> float:
        if self.sync.run_once():
            self.event_loop.wake()
        self.rejections.send(self.publisher)
        self.publisher.send_all(self.orders.results())
        waiting = self.events.outstanding or self.logs.outstanding
        return min(self.settings.sync_interval_s, UNACKNOWLEDGED_SYNC_INTERVAL_S if waiting else float("inf"))

    def watch_turn(self) -> float:
        self.supervisor.wait(self.settings.poll_interval_s)
        self.supervisor.poll()
        self.event_loop.wake()
        return 0.0

    def event_turn(self) -> float:
        self.events.run_once()
        return self.settings.sync_interval_s  # woken by every watch turn

    def log_turn(self) -> float:
        return 0.0 if self.logs.run_once() else self.settings.poll_interval_s

    def telemetry_turn(self) -> float:
        readings = self.reader.latest()
        if readings:
            claim(readings, self.supervisor)
            self.preflight.note(readings)
            self.publisher.send(Telemetry(boot_id=inventory.boot_id(), readings=readings))
        return self.settings.telemetry_interval_s

    def health_turn(self) -> float:
        infos, _ = self._listed()
        events = [located(event, infos or []) for event in (*self.reader.health(), *self.kernel_log.read())]
        for event in events:
            self.preflight.note_event(event)
        self.health.add(events)
        self.health.run_once()
        self.hardware.turn()
        return self.settings.telemetry_interval_s

    def inventory_turn(self) -> float:
        self._desk.turn()
        return 1.0

    def heartbeat_turn(self) -> float:
        stuck = [loop.name for loop in (self.sync_loop, self.watch_loop) if loop.stuck_s() > STUCK_AFTER_S]
        if stuck:  # no heartbeat either: the portal is to see that this node does nothing
            self.restarter.restart(f"{' and '.join(stuck)} has not come back for {STUCK_AFTER_S:.0f} s")
            return self.settings.heartbeat_interval_s
        self.publisher.send(self._heartbeat())
        silence_s = self.pulse.silence_s()
        if silence_s is not None and silence_s > self.settings.deaf_after_s:
            self.restarter.restart(f"none of its heartbeats came back for {silence_s:.0f} s although they are sent")
        return self.settings.heartbeat_interval_s

    def tidy_turn(self) -> float:
        self.spool.clear_kept(self.settings.keep_work_days * DAY_S, time.time())
        return TIDY_INTERVAL_S

    def _listed(self) -> tuple[list[GpuInfo] | None, str | None]:
        """What the driver listed last; never waits for it."""
        listed = self._desk.listed
        return (listed.infos, listed.problem) if listed else (None, None)

    def _nics(self) -> list[Nic]:
        listed = self.reader.inventory()
        infos = listed.infos if listed else []
        if self.settings.simulate:
            return sim_nics.nics(self.settings.simulate, infos)
        return topology.nics({info.uuid: info.pci_bus_id for info in infos})

    def _heartbeat(self) -> Heartbeat:
        memory = psutil.virtual_memory()
        return Heartbeat(
            boot_id=inventory.boot_id(), nonce=self.pulse.beat(), serial=self.sync.serial, at=time.time(),
            started_at=self.started_at, load_1m=os.getloadavg()[0], memory_used_bytes=memory.total - memory.available,
            spool_free_bytes=shutil.disk_usage(self.settings.state_dir).free,
            attempts=[attempt.path.name for attempt in self.spool.attempts()], gpu_reader=self.reader.status,
        )


class InventoryDesk:
    """Reports what the node has: at the start, after a change, and when the portal has something else."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.listed: GpuList | None = None
        self._current: Inventory | None = None
        self._sent_at = float("-inf")
        self._sent_digest = ""

    def turn(self) -> None:
        self._look()
        now = time.monotonic()
        if self._current is None or not self._is_due(self._current.digest, now):
            return
        self._agent.publisher.send(self._current)
        self._sent_at, self._sent_digest = now, self._current.digest

    def _look(self) -> None:
        """A reader that hangs does not make the GPUs vanish; one that never answered is reported with its reason."""
        listed = self._agent.reader.inventory()
        if listed is None and (self._current or time.time() - self._agent.started_at < FIRST_ANSWER_S):
            return
        if self._current is None or listed is not self.listed:
            self.listed = listed
            self._current = inventory.build(listed, simulated=self._agent.settings.simulate is not None)

    def _is_due(self, digest: str, now: float) -> bool:
        if digest != self._sent_digest:
            return True
        portal_has = self._agent.sync.inventory_digest
        if portal_has is None:
            return now - self._sent_at > INVENTORY_UNHEARD_RESEND_S
        return portal_has != digest and now - self._sent_at > INVENTORY_RESEND_S
