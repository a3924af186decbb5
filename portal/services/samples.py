"""Telemetry over time as it is drawn: aligned series with honest gaps, from raw samples while they are young and from
rollups beyond."""

import math
import time
from dataclasses import dataclass, field
from datetime import datetime

from portal.models import Attempt, Gpu
from portal.services import raw, rollups
from portal.services.raw import CLOCK_AHEAD_S, FIELDS, Column, Columns, append, columns_of, decode_samples, plausible
from portal.services.rollups import LEVELS, Level, Stat, Track

__all__ = [
    "CLOCK_AHEAD_S", "FIELDS", "READINGS_PER_REPORT", "Column", "Columns", "GpuSeries", "Series", "Span", "append",
    "collected", "counts", "for_attempt", "for_gpu", "plausible", "series", "spans_of", "stats_of", "stretched",
]  # fmt: skip

READINGS_PER_REPORT = 1024
STANDS_FOR_S = 3.0  # how long a sample holds until the next one; longer is a gap
POINTS_MOST = 5000
RAW_S = 900.0  # while a sample is younger than that it is kept as it was read


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


@dataclass
class Found:
    """What is known of a span: samples that are still raw, and rollups of one level."""

    span: Span
    columns: Columns
    track: Track
    resolution_s: float  # 1 if everything is still raw

    @property
    def samples(self) -> int:
        return len(self.columns["at"]) + sum(self.track.samples.values())

    def ends(self) -> list[float]:
        at = [moment for moment in (self.columns["at"][:1] + self.columns["at"][-1:]) if moment is not None]
        return at + ([min(self.track.samples), max(self.track.samples)] if self.track.samples else [])


# --- what is drawn ----------------------------------------------------------------------------------------------------
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
    return sum(found.samples for found in collected(spans_of(attempt), 1.0))


def spans_of(attempt: Attempt) -> list[Span]:
    rows = attempt.allocations.select_related("gpu", "gpu__node").order_by("rank")
    return [
        Span(row.gpu, row.allocated_at.timestamp(), end_of(row.released_at, attempt.ended_at), row.rank) for row in rows
    ]


def end_of(*moments: datetime | None) -> float:
    """The first of them that is known; a node's clock may run ahead while nothing has ended."""
    return next((moment.timestamp() for moment in moments if moment), time.time() + CLOCK_AHEAD_S)


def series(spans: list[Span], points: int) -> Series:
    points = max(1, min(points, POINTS_MOST))
    until = min(max((span.until for span in spans), default=0.0), time.time() + CLOCK_AHEAD_S)
    guess = (until - min((span.since for span in spans), default=0.0)) / points
    found = collected(spans, guess)
    known = [moment for one in found for moment in one.ends()]
    if not known:
        return Series([], 1.0, [drawn(one, 0.0, 1.0, 0) for one in found])
    resolution_s = max(one.resolution_s for one in found)
    first, last = math.floor(min(known)), max(known)
    step = max(1.0, math.ceil((last - first) / points / resolution_s) * resolution_s)
    if resolution_s > 1:
        first = int(first // step * step)
    buckets = int((last - first) // step) + 1
    gpus = [drawn(one, first, step, buckets) for one in found]
    return Series([first + step * number for number in range(buckets)], step, gpus, sum(one.samples for one in found))


def drawn(found: Found, first: float, step: float, buckets: int) -> GpuSeries:
    mean: Columns = {}
    peak: Columns = {}
    for name in FIELDS:
        stats = stretched(*stats_of(found, name, first, step, buckets), step)
        mean[name] = [stat.mean if stat else None for stat in stats]
        peak[name] = [stat.high if stat else None for stat in stats]
    gpu = found.span.gpu
    return GpuSeries(gpu.uuid, gpu.index, gpu.node.name, found.span.rank, mean, peak)


def stats_of(
    found: Found, name: str, first: float, step: float, buckets: int
) -> tuple[list[Stat | None], set[int]]:
    """Of one metric per bucket. -> with the buckets in which it was asked for and not known."""
    made: list[Stat | None] = [None] * buckets
    inside: dict[int, list[float]] = {}
    unknown: set[int] = set()
    for moment, value in zip(found.columns["at"], found.columns[name], strict=True):
        place = int(((moment or 0.0) - first) // step)
        if not 0 <= place < buckets:
            continue
        if value is None:
            unknown.add(place)
        else:
            inside.setdefault(place, []).append(value)
    for place, values in inside.items():
        made[place] = Stat(min(values), max(values), sum(values), len(values))
    for at, stat in found.track.stats.get(name, {}).items():
        place = int((at - first) // step)
        if 0 <= place < buckets:
            there = made[place]
            made[place] = there.plus(stat) if there else stat
    return made, unknown


def stretched(stats: list[Stat | None], unknown: set[int], step: float) -> list[Stat | None]:
    """A sample stands for STANDS_FOR_S unless something follows: only then does an empty bucket become a gap."""
    made = list(stats)
    age = most = math.ceil(STANDS_FOR_S / step)
    for place, stat in enumerate(stats):
        if stat:
            age = 0
        elif place in unknown:
            age = most
        elif (age := age + 1) < most:
            made[place] = made[place - 1]
    return made


# --- what is known ----------------------------------------------------------------------------------------------------
def collected(spans: list[Span], step_s: float) -> list[Found]:
    """Every sample and bucket within the spans, as fine as it is kept and no finer than `step_s` needs."""
    if not spans:
        return []
    since, until = min(span.since for span in spans), max(span.until for span in spans)
    nodes = {span.gpu.node_id for span in spans}
    samples: list[list[raw.Sample]] = [[] for _ in spans]
    for node_id, payload in raw.payloads(nodes, since, until):
        for span, mine in zip(spans, samples, strict=True):
            if span.gpu.node_id == node_id and span.gpu.uuid in payload:
                rows = decode_samples(payload[span.gpu.uuid])
                mine.extend(row for row in rows if span.since <= row.at <= span.until)
    level = level_for(since, step_s)
    tracks = rolled(spans, level, since, until) if level else [Track() for _ in spans]
    resolution_s = float(level.step_s) if level and any(track.samples for track in tracks) else 1.0
    return [
        Found(span, columns_of(mine), track, resolution_s)
        for span, mine, track in zip(spans, samples, tracks, strict=True)
    ]


def level_for(since: float, step_s: float) -> Level | None:
    """None: all of it is still raw. Else the coarsest that is fine enough, among those that go back so far."""
    age_s = time.time() - since
    if age_s <= RAW_S:
        return None
    reaching = [level for level in LEVELS if age_s <= level.keep_s] or [LEVELS[-1]]
    return next((level for level in reversed(reaching) if level.step_s <= step_s), reaching[0])


def rolled(spans: list[Span], level: Level, since: float, until: float) -> list[Track]:
    tracks = [Track() for _ in spans]
    for node_id, start, row in rollups.read(level, {span.gpu.node_id for span in spans}, since, until):
        for span, track in zip(spans, tracks, strict=True):
            if span.gpu.node_id == node_id and span.gpu.uuid in row:
                track.add(inside(rollups.unpacked(row[span.gpu.uuid], start, level), span, level.step_s))
    return tracks


def inside(track: Track, span: Span, step_s: int) -> Track:
    """The buckets whose middle lies in the span: what is left of others' time is less than half a bucket."""

    def kept(at: int) -> bool:
        return span.since <= at + step_s / 2 <= span.until

    made = Track(last=track.last)
    made.samples = {at: count for at, count in track.samples.items() if kept(at)}
    made.energy = {at: used for at, used in track.energy.items() if kept(at)}
    made.stats = {
        name: {at: stat for at, stat in stats.items() if kept(at)} for name, stats in track.stats.items()
    }
    return made


