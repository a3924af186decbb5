"""Samples as they were read, once a second, for as long as they are young: blocks of a node in, columns out."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec

from portal.models import Node, SampleBlock
from wire.reports import GpuReading

# Field -> (least, most): anything else is a broken reading and counts as unknown.
FIELDS: dict[str, tuple[float, float]] = {
    "utilization_percent": (0, 100),
    "memory_used_bytes": (0, 1 << 44),
    "power_mw": (0, 10_000_000),
    "temperature_c": (-50, 200),
    "sm_clock_mhz": (0, 20_000),
    "memory_temperature_c": (-50, 200),
    "pcie_received_bytes_per_s": (0, 1e12),
    "pcie_transmitted_bytes_per_s": (0, 1e12),
    "nvlink_received_bytes_per_s": (0, 1e14),
    "nvlink_transmitted_bytes_per_s": (0, 1e14),
}
ENERGY = "energy_mj"  # a counter: what it grew by counts, not where it stands
COUNTERS: dict[str, tuple[float, float]] = {ENERGY: (0, 1 << 63)}
CLOCK_AHEAD_S = 120.0  # of the portal's: later than that is no time at all
OLDEST_S = 86_400.0

Column = list[float | None]
Columns = dict[str, Column]  # "at" and every name of FIELDS and COUNTERS, equally long
Payload = Mapping[str, msgspec.Raw]


class Sample(msgspec.Struct, array_like=True, gc=False):
    """A row of a block. New ones are added at the end, so that older blocks still read."""

    at: float
    utilization_percent: float | None = None
    memory_used_bytes: float | None = None
    power_mw: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_temperature_c: float | None = None
    pcie_received_bytes_per_s: float | None = None
    pcie_transmitted_bytes_per_s: float | None = None
    nvlink_received_bytes_per_s: float | None = None
    nvlink_transmitted_bytes_per_s: float | None = None
    energy_mj: float | None = None


row_of = attrgetter(*Sample.__struct_fields__)
encode = msgspec.msgpack.Encoder().encode
decode_payload = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
decode_samples = msgspec.msgpack.Decoder(list[Sample]).decode


# --- writing ----------------------------------------------------------------------------------------------------------
def block(node_id: int, readings: Iterable[GpuReading], *, now: float | None = None) -> tuple[SampleBlock | None, int]:
    """-> an unsaved row and the samples in it. Values are judged when they are read: this is a hot path."""
    payload: dict[str, list[tuple[float | None, ...]]] = {}
    now = time.time() if now is None else now
    since, until = now - OLDEST_S, now + CLOCK_AHEAD_S
    times = []
    for reading in readings:
        if since < reading.at < until:  # false for NaN as well
            times.append(reading.at)
            payload.setdefault(reading.uuid, []).append(row_of(reading))
    if not times:
        return None, 0
    made = SampleBlock(node_id=node_id, started_at=min(times), ended_at=max(times), payload=encode(payload))
    return made, len(times)


def append(node: Node, readings: Iterable[GpuReading], *, now: float | None = None) -> int:
    """One block of what the node read. -> samples stored."""
    made, count = block(node.pk, readings, now=now)
    if made:
        made.save(force_insert=True)
    return count


# --- reading ----------------------------------------------------------------------------------------------------------
def payloads(node_ids: set[int], since: float, until: float) -> Iterator[tuple[int, Payload]]:
    """-> (node id, {GPU: its rows, still encoded}) of every block that touches the time."""
    blocks = SampleBlock.objects.filter(node_id__in=node_ids, ended_at__gte=since, started_at__lte=until)
    rows = blocks.order_by("started_at").values_list("node_id", "payload")
    for node_id, payload in rows.iterator(chunk_size=500):
        yield node_id, decode_payload(payload)


def columns_of(samples: Sequence[Sample]) -> Columns:
    """Sorted by time, each moment once: repeated reports leave one sample. What is not plausible is unknown."""
    rows: dict[float, Sample] = {}
    for sample in samples:
        rows.setdefault(sample.at, sample)
    found = [rows[moment] for moment in sorted(rows)]
    columns: Columns = {"at": [sample.at for sample in found]}
    for name, (least, most) in (FIELDS | COUNTERS).items():
        values = map(attrgetter(name), found)
        columns[name] = [value if value is not None and least <= value <= most else None for value in values]
    return columns


def plausible(name: str, value: float | None) -> float | None:
    least, most = FIELDS[name]
    return value if value is not None and least <= value <= most else None
