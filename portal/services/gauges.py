"""The newest reading of every GPU, and the samples on their way to the database.

A report a second per node would be a row and eight updates a second each; gathered over a few seconds and over all
nodes, it is one insert and one update.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from django.db import DataError, connection, transaction

from portal.models import Gpu, Node, SampleBlock
from portal.services import live, raw, samples
from portal.services.text import storable
from wire.reports import GpuReading

SHOW_EVERY_S = 0.9  # a little under the pace of the reports, so that none is held back for another second
STORE_EVERY_S = 1.9
GPUS_SHOWN_PER_S = 1600  # beyond, the newest readings are written less often than they come
NODES_STORED_PER_S = 250
OWN_FOR_S = 5.0  # how long it is believed whose a GPU is
OWN_AGAIN_S = 1.0  # at most so often, for one that is not known
PROCESSES_MOST = 64
NUMBER_MOST = 2.0**53  # what a browser can count to
ROWS_PER_INSERT = 500
GPUS_PER_UPDATE = 2000
LIVE_FIELDS = ("utilization_percent", "memory_used_bytes", "power_mw", "temperature_c")
NUMBERS = tuple(
    name for name in GpuReading.__struct_fields__ if name not in {"uuid", "at", "processes", "missing", *raw.FIELDS}
)

WRITE_LATEST = """
    UPDATE portal_gpu SET latest = fresh.latest
    FROM jsonb_to_recordset(%s::jsonb) AS fresh (uuid text, node_id bigint, latest jsonb)
    WHERE portal_gpu.uuid = fresh.uuid AND portal_gpu.node_id = fresh.node_id
    RETURNING portal_gpu.uuid
"""

encode_json = msgspec.json.Encoder().encode
log = logging.getLogger(__name__)


class Gauges:
    """Of one node. Nothing here is worth keeping: a lost second is a gap in a chart."""

    def __init__(self, node: Node, clock: Callable[[], float] = time.time) -> None:
        self.node = node
        self._clock = clock
        self._newest: dict[str, GpuReading] = {}
        self._readings: list[GpuReading] = []

    def add(self, readings: Iterable[GpuReading]) -> None:
        limit = self._clock() + samples.CLOCK_AHEAD_S
        for reading in readings:
            if -math.inf < reading.at < limit:  # false for NaN as well
                self._readings.append(reading)
                newest = self._newest.get(reading.uuid)
                if newest is None or newest.at <= reading.at:
                    self._newest[reading.uuid] = reading

    def take_newest(self) -> dict[str, GpuReading]:
        taken, self._newest = self._newest, {}
        return taken

    def take_readings(self) -> list[GpuReading]:
        taken, self._readings = self._readings, []
        return taken


class Board:
    """Shows and stores what the gauges of all nodes hold, at a pace that the database can keep up with."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._owners = Owners(clock)
        self._shown_at = self._stored_at = -math.inf
        self._gpus = 0

    def flush(self, gauges: Sequence[Gauges], *, force: bool = False) -> None:
        now = self._clock()
        if force or not 0 <= now - self._shown_at < max(SHOW_EVERY_S, self._gpus / GPUS_SHOWN_PER_S):
            self._shown_at = now
            self._show(gauges)
        if force or not 0 <= now - self._stored_at < max(STORE_EVERY_S, len(gauges) / NODES_STORED_PER_S):
            self._stored_at = now
            self._store(gauges, now)

    def _show(self, gauges: Sequence[Gauges]) -> None:
        newest = [
            (each.node.pk, reading)
            for each in gauges
            for uuid, reading in each.take_newest().items()
            if self._owners.owns(each.node.pk, uuid)
        ]
        self._gpus = len(newest)
        for begin in range(0, len(newest), GPUS_PER_UPDATE):
            show(newest[begin : begin + GPUS_PER_UPDATE])

    def _store(self, gauges: Sequence[Gauges], now: float) -> None:
        blocks = []
        for each in gauges:
            own = [one for one in each.take_readings() if self._owners.owns(each.node.pk, one.uuid)]
            block, _ = raw.block(each.node.pk, own, now=now)
            if block:
                blocks.append(block)
        if blocks:
            store(blocks)


class Owners:
    """A node tells of its own GPUs, of no others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._node_of: dict[str, int] = {}
        self._read_at = -math.inf

    def owns(self, node_id: int, uuid: str) -> bool:
        age_s = self._clock() - self._read_at
        if not 0 <= age_s < OWN_FOR_S or (self._node_of.get(uuid) != node_id and age_s >= OWN_AGAIN_S):
            self._read_at = self._clock()
            self._node_of = dict(Gpu.objects.order_by().values_list("uuid", "node_id"))
        return self._node_of.get(uuid) == node_id


# --- writing ----------------------------------------------------------------------------------------------------------
def store(blocks: list[SampleBlock]) -> None:
    SampleBlock.objects.bulk_create(blocks, batch_size=ROWS_PER_INSERT)


def show(newest: list[tuple[int, GpuReading]]) -> None:
    """What cannot be written for one GPU is not lost for the others."""
    tidied_ones = [(node_id, tidy(reading)) for node_id, reading in newest]
    try:
        shown = write_latest(tidied_ones)
    except DataError:
        shown = set()
        for one in tidied_ones:
            try:
                shown |= write_latest([one])
            except DataError as error:
                log.warning("The newest reading of %s cannot be kept: %s", one[1]["uuid"], error)
    values = {latest["uuid"]: live_values(latest) for _, latest in tidied_ones if latest["uuid"] in shown}
    if values:
        at = max(latest["at"] for _, latest in tidied_ones if latest["uuid"] in shown)
        live.notify(live.CLUSTER, "gpus", at=at, values=values)


def write_latest(newest: list[tuple[int, dict[str, Any]]]) -> set[str]:
    """In one statement, however many they are. -> those that are of the node that speaks of them."""
    rows = [{"uuid": latest["uuid"], "node_id": node_id, "latest": latest} for node_id, latest in newest]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(WRITE_LATEST, [encode_json(rows).decode()])
        return {uuid for (uuid,) in cursor.fetchall()}


def live_values(latest: dict[str, Any]) -> list[float | None]:
    """-> [utilisation %, memory B, power mW, temperature °C], each None if it is not known."""
    return [latest.get(name) for name in LIVE_FIELDS]


# --- what a database and a browser can take ---------------------------------------------------------------------------
def tidy(reading: GpuReading) -> dict[str, Any]:
    """Of a reading. What is not plausible is not known."""
    values: dict[str, Any] = {"uuid": reading.uuid, "at": reading.at}
    for name in raw.FIELDS:
        values[name] = raw.plausible(name, getattr(reading, name))
    for name in NUMBERS:
        number = getattr(reading, name)
        if number is not None:
            values[name] = number if 0 <= number <= NUMBER_MOST else None  # false for NaN as well
    if reading.processes is not None:
        values["processes"] = [tidied(msgspec.to_builtins(one)) for one in reading.processes[:PROCESSES_MOST]]
    if reading.missing:
        values["missing"] = tidied(reading.missing)
    return values


def tidied(value: Any) -> Any:
    if isinstance(value, dict):
        return {storable(str(key), 80): tidied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [tidied(inner) for inner in value]
    if isinstance(value, str):
        return storable(value, 200)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if 0 <= value <= NUMBER_MOST else None
    return value
