"""The newest reading of every GPU of a node, and the samples on their way to the database.

A report a second per node would be a row and eight updates a second; gathered, it is half of the rows and one update.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from portal.models import Gpu, Node
from portal.services import live, samples
from portal.services.text import storable
from wire.reports import GpuReading

LATEST_EVERY_S = 0.9  # a little under the pace of the reports, so that none is held back for another second
BLOCK_EVERY_S = 1.9
PROCESSES_MOST = 64
NUMBER_MOST = 2.0**53  # what a browser can count to
SIGNED = frozenset({"temperature_c", "memory_temperature_c"})
LIVE_FIELDS = ("utilization_percent", "memory_used_bytes", "power_mw", "temperature_c")


class Gauges:
    """Of one node. Nothing here is worth keeping: a lost second is a gap in a chart."""

    def __init__(self, node: Node, clock: Callable[[], float] = time.time) -> None:
        self._node = node
        self._clock = clock
        self._newest: dict[str, GpuReading] = {}
        self._readings: list[GpuReading] = []
        self._shown_at = self._stored_at = 0.0

    def add(self, readings: Iterable[GpuReading]) -> None:
        limit = self._clock() + samples.CLOCK_AHEAD_S
        for reading in readings:
            if math.isfinite(reading.at) and reading.at < limit:
                self._readings.append(reading)
                newest = self._newest.get(reading.uuid)
                if newest is None or newest.at <= reading.at:
                    self._newest[reading.uuid] = reading

    def flush(self, *, force: bool = False) -> None:
        """Show and store what is due."""
        now = self._clock()
        if self._newest and (force or not 0 <= now - self._shown_at < LATEST_EVERY_S):
            newest, self._newest, self._shown_at = self._newest, {}, now
            show(self._node, newest)
        if self._readings and (force or not 0 <= now - self._stored_at < BLOCK_EVERY_S):
            readings, self._readings, self._stored_at = self._readings, [], now
            samples.append(self._node, own_only(self._node, readings), now=now)


def own_only(node: Node, readings: list[GpuReading]) -> list[GpuReading]:
    """A node tells of its own GPUs, of no others."""
    own = set(Gpu.objects.filter(node=node).values_list("uuid", flat=True))
    return [reading for reading in readings if reading.uuid in own]


def show(node: Node, newest: dict[str, GpuReading]) -> None:
    gpus = list(Gpu.objects.filter(node=node, uuid__in=list(newest)).only("uuid", "latest"))
    for gpu in gpus:
        gpu.latest = tidy(newest[gpu.uuid])
    if gpus:
        Gpu.objects.bulk_update(gpus, ["latest"])
        at = max(newest[gpu.uuid].at for gpu in gpus)
        live.notify(live.CLUSTER, "gpus", at=at, values={gpu.uuid: live_values(gpu.latest) for gpu in gpus})


def live_values(latest: dict[str, Any]) -> list[float | None]:
    """-> [utilisation %, memory B, power mW, temperature °C], each None if it is not known."""
    return [latest.get(name) for name in LIVE_FIELDS]


def tidy(reading: GpuReading) -> dict[str, Any]:
    """As JSON that a database column and a browser can take; what is not plausible is not known."""
    raw = msgspec.to_builtins(reading)
    if raw.get("processes"):
        raw["processes"] = raw["processes"][:PROCESSES_MOST]
    values: dict[str, Any] = tidied(raw)
    for name in samples.FIELDS:
        values[name] = samples.plausible(name, getattr(reading, name))
    return values


def tidied(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {storable(str(key), 80): tidied(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [tidied(inner) for inner in value]
    if isinstance(value, str):
        return storable(value, 200)
    if isinstance(value, int | float) and not isinstance(value, bool):
        least = -NUMBER_MOST if name in SIGNED else 0
        return value if math.isfinite(value) and least <= value <= NUMBER_MOST else None
    return value
