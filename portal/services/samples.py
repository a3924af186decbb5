"""Telemetry over time: blocks of a whole node's samples in, aligned series with honest gaps out."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Count, F
from django.db.models.functions import Floor

from portal.models import Attempt, Gpu, Node, SampleBlock
from wire.reports import GpuReading

# Field -> (least, most): anything else is a broken reading and is kept as unknown.
FIELDS: dict[str, tuple[float, float]] = {
    "utilization_percent": (0, 100),
    "memory_used_bytes": (0, 1 << 44),
    "power_mw": (0, 10_000_000),
    "temperature_c": (-50, 200),
    "sm_clock_mhz": (0, 20_000),
}
READINGS_PER_REPORT = 1024
CLOCK_AHEAD_S = 120.0  # of the portal's: later than that is no time at all
OLDEST_S = 86_400.0
STANDS_FOR_S = 3.0  # how long a sample holds until the next one; longer is a gap
BLOCK_S = 300.0
SETTLED_S = 120.0  # younger blocks are left alone: their neighbours may still come
COMPACT_ROWS = 2000
COMPACT_STRETCHES = 200
POINTS_MOST = 5000

Column = list[float | None]
Columns = dict[str, Column]  # "at" and every name of FIELDS, equally long
Payload = dict[str, Columns]

encode_payload = msgspec.msgpack.Encoder().encode
raw_payload = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
columns_decoder = msgspec.msgpack.Decoder(dict[str, list[float | None]])


@dataclass(frozen=True)
class GpuSeries:
    """One GPU on the shared time axis. `mean` and `peak` have a list per name of FIELDS; None is a gap."""

    uuid: str
    index: int
    node: str
    rank: int | None
    mean: Columns
    peak: Columns


@dataclass(frozen=True)
class Series:
    at: list[float]
    step_s: float
    gpus: list[GpuSeries] = field(default_factory=list)
    samples: int = 0


@dataclass(frozen=True)
class Span:
    """When a GPU is looked at: while it was held, or in a window of time."""

    gpu: Gpu
    since: float
    until: float
    rank: int | None = None


# --- writing ----------------------------------------------------------------------------------------------------------
def append(node: Node, readings: Iterable[GpuReading], *, now: float | None = None) -> int:
    """One block of what the node read. -> samples stored; the implausible ones are dropped or made unknown."""
    payload: Payload = {}
    now = time.time() if now is None else now
    for reading in readings:
        if not now - OLDEST_S < reading.at < now + CLOCK_AHEAD_S:  # false for NaN as well
            continue
        columns = payload.setdefault(reading.uuid, {name: [] for name in ("at", *FIELDS)})
        columns["at"].append(reading.at)
        for name in FIELDS:
            columns[name].append(plausible(name, getattr(reading, name)))
    if not payload:
        return 0
    store(node.pk, {gpu: ordered(columns) for gpu, columns in payload.items()})
    return sum(len(columns["at"]) for columns in payload.values())


def plausible(name: str, value: float | None) -> float | None:
    least, most = FIELDS[name]
    return value if value is not None and math.isfinite(value) and least <= value <= most else None


def ordered(columns: Columns) -> Columns:
    """Sorted by time, each moment once: repeated reports leave one sample."""
    at = columns["at"]
    rows: dict[float, int] = {}
    for row, moment in enumerate(at):
        if moment is not None:
            rows.setdefault(moment, row)
    order = [rows[moment] for moment in sorted(rows)]
    return {name: [column[row] for row in order] for name, column in columns.items()}


def store(node_id: int, payload: Payload) -> None:
    times = [moment for columns in payload.values() for moment in columns["at"] if moment is not None]
    SampleBlock.objects.create(
        node_id=node_id, started_at=min(times), ended_at=max(times), payload=encode_payload(payload)
    )


# --- reading ----------------------------------------------------------------------------------------------------------
def for_attempt(attempt: Attempt, since: float | None = None, points: int = 600) -> Series:
    """The GPUs of an attempt while it held them."""
    spans = spans_of(attempt)
    if since is not None:
        spans = [Span(s.gpu, max(s.since, since), s.until, s.rank) for s in spans]
    return series(spans, points)


def for_gpu(gpu: Gpu, since: float | None = None, points: int = 600) -> Series:
    """One GPU, whoever held it: the last half hour unless told otherwise."""
    now = time.time()
    return series([Span(gpu, now - 1800 if since is None else since, now + CLOCK_AHEAD_S)], points)


def counts(attempt: Attempt) -> int:
    """Samples of the attempt's GPUs while it held them."""
    spans = spans_of(attempt)
    return sum(len(columns["at"]) for _, columns in collected(spans).values())


def spans_of(attempt: Attempt) -> list[Span]:
    rows = attempt.allocations.select_related("gpu", "gpu__node").order_by("rank")
    return [
        Span(row.gpu, row.allocated_at.timestamp(), end_of(row.released_at, attempt.ended_at), row.rank) for row in rows
    ]


def end_of(*moments: datetime | None) -> float:
    """The first of them that is known; a node's clock may run ahead while nothing has ended."""
    return next((moment.timestamp() for moment in moments if moment), time.time() + CLOCK_AHEAD_S)


def series(spans: list[Span], points: int) -> Series:
    found = collected(spans)
    times = [moment for _, columns in found.values() for moment in (columns["at"][:1] + columns["at"][-1:])]
    known = [moment for moment in times if moment is not None]
    if not known:
        return Series([], 1.0, [drawn(span, empty_columns(), 0.0, 1.0, 0) for span in spans])
    first, last = math.floor(min(known)), max(known)
    step = max(1.0, math.ceil((last - first) / max(1, min(points, POINTS_MOST))))
    buckets = int((last - first) // step) + 1
    gpus = [drawn(span, columns, first, step, buckets) for span, columns in found.values()]
    total = sum(len(columns["at"]) for _, columns in found.values())
    return Series([first + step * number for number in range(buckets)], step, gpus, total)


def collected(spans: list[Span]) -> dict[str, tuple[Span, Columns]]:
    """Every sample within the spans, by GPU."""
    found = {span.gpu.uuid: (span, empty_columns()) for span in spans}
    for payload in stored_payloads(spans):
        for gpu_uuid, (span, columns) in found.items():
            if gpu_uuid in payload:
                extend(columns, columns_decoder.decode(payload[gpu_uuid]), span)
    return {gpu_uuid: (span, ordered(columns)) for gpu_uuid, (span, columns) in found.items()}


def stored_payloads(spans: list[Span]) -> Iterator[Mapping[str, msgspec.Raw]]:
    if not spans:
        return
    blocks = SampleBlock.objects.filter(
        node_id__in={span.gpu.node_id for span in spans},
        ended_at__gte=min(span.since for span in spans),
        started_at__lte=max(span.until for span in spans),
    ).order_by("started_at")
    for payload in blocks.values_list("payload", flat=True).iterator(chunk_size=200):
        yield raw_payload.decode(payload)


def extend(columns: Columns, more: Columns, span: Span) -> None:
    inside = [row for row, moment in enumerate(more["at"]) if moment is not None and span.since <= moment <= span.until]
    for name, column in columns.items():
        source = more.get(name)
        column.extend(source[row] if source else None for row in inside)


def empty_columns() -> Columns:
    return {name: [] for name in ("at", *FIELDS)}


def drawn(span: Span, columns: Columns, first: float, step: float, buckets: int) -> GpuSeries:
    places = [int((moment - first) // step) for moment in columns["at"] if moment is not None]
    mean: Columns = {}
    peak: Columns = {}
    for name in FIELDS:
        mean[name], peak[name] = bucketed(columns[name], places, buckets, step)
    gpu = span.gpu
    return GpuSeries(gpu.uuid, gpu.index, gpu.node.name, span.rank, mean, peak)


def bucketed(values: Column, places: list[int], buckets: int, step: float) -> tuple[Column, Column]:
    """-> (mean, peak) per bucket. A sample stands for STANDS_FOR_S: only then does an empty bucket become a gap."""
    mean: Column = [None] * buckets
    peak: Column = [None] * buckets
    inside: dict[int, list[float | None]] = {}
    for place, value in zip(places, values, strict=True):
        inside.setdefault(place, []).append(value)
    for place, found in inside.items():
        known = [value for value in found if value is not None]
        if known:
            mean[place], peak[place] = round(sum(known) / len(known), 2), max(known)
    for place in sorted(inside):
        for empty in range(place + 1, min(buckets, place + math.ceil(STANDS_FOR_S / step))):
            if empty in inside:
                break
            mean[empty], peak[empty] = mean[place], peak[place]
    return mean, peak


# --- keeping it small -------------------------------------------------------------------------------------------------
def compact(*, now: float | None = None) -> int:
    """Merge settled blocks into stretches of BLOCK_S and drop what is past retention. -> blocks that went away."""
    now = time.time() if now is None else now
    oldest = SampleBlock.objects.filter(ended_at__lt=now - settings.SAMPLE_RETENTION_DAYS * 86_400)
    gone, _ = SampleBlock.objects.filter(pk__in=oldest.values("pk")[:COMPACT_ROWS]).delete()
    settled = math.floor((now - SETTLED_S) / BLOCK_S) * BLOCK_S
    crowded = (
        SampleBlock.objects.filter(started_at__lt=settled)
        .annotate(stretch=Floor(F("started_at") / BLOCK_S))
        .values_list("node_id", "stretch")
        .annotate(blocks=Count("pk"))
        .filter(blocks__gt=1)
        .order_by("-stretch")[:COMPACT_STRETCHES]
    )
    return gone + sum(merge(node_id, stretch * BLOCK_S) for node_id, stretch, _ in crowded)


def merge(node_id: int, since: float) -> int:
    with transaction.atomic():
        own = SampleBlock.objects.filter(node_id=node_id, started_at__gte=since, started_at__lt=since + BLOCK_S)
        blocks = list(own.select_for_update(skip_locked=True).order_by("started_at"))
        if len(blocks) < 2:
            return 0
        payload: Payload = {}
        for block in blocks:
            for gpu_uuid, raw in raw_payload.decode(block.payload).items():
                columns, more = payload.setdefault(gpu_uuid, empty_columns()), columns_decoder.decode(raw)
                for name, column in columns.items():
                    column.extend(more.get(name) or [None] * len(more["at"]))
        SampleBlock.objects.filter(pk__in=[block.pk for block in blocks]).delete()
        store(node_id, {gpu_uuid: ordered(columns) for gpu_uuid, columns in payload.items()})
    return len(blocks) - 1
