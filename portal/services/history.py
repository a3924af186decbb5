"""The past of the GPUs: what is no longer young is rolled up, and anybody may ask how it was.

Rolling up consumes: in one transaction the raw blocks of a node's stretch are added to the buckets of every level and
deleted. A crash in the middle leaves all as it was; a block that comes late is consumed in turn and finds its bucket.
"""

import logging
import math
import time
from dataclasses import dataclass

from django.db import DatabaseError, connection, transaction
from django.db.models import F
from django.db.models.functions import Floor

from portal.models import Gpu, SampleBlock
from portal.services import raw, rollups
from portal.services.errors import Problem, field_problem
from portal.services.raw import ENERGY, FIELDS, Columns, columns_of, decode_payload, decode_samples
from portal.services.rollups import FINE, LEVELS, Track
from portal.services.samples import POINTS_MOST, RAW_S, Found, Span, collected, stats_of, stretched

BUDGET_S = 2.0  # of a run; the scheduler waits for the same processor
STRETCHES_PER_RUN = 2000
BLOCKS_AT_ONCE = 1000
LOCK_CLASS = 0x726F6C6C  # of PostgreSQL's advisory locks: one at a time per node

METRICS = (*FIELDS, ENERGY)
POINTS_USUAL = 600
VALUES_MOST = 200_000  # of an answer, each with its least, mean and most

log = logging.getLogger(__name__)

Column = list[float | None]


@dataclass(frozen=True)
class Window:
    since: float
    until: float
    step_s: float | None = None  # None: as fits a chart


@dataclass(frozen=True)
class Answer:
    """`spans` in the order in which they were asked for, each with its columns on the shared time axis."""

    at: list[float]
    step_s: float
    resolution_s: float  # of what it was made from
    spans: list["SpanAnswer"]


@dataclass(frozen=True)
class SpanAnswer:
    """None is a gap. A counter has only `total`: what it grew by."""

    span: Span
    least: Column
    mean: Column
    most: Column
    count: list[int]
    total: Column | None = None


# --- asking -----------------------------------------------------------------------------------------------------------
def query(spans: list[Span], metric: str, window: Window) -> Answer:
    """Refuses what would be too much, with the step that would not. No finer than what is kept of the time."""
    check(spans, metric, window)
    wanted_s = window.step_s or (window.until - window.since) / POINTS_USUAL
    found = collected(spans, wanted_s)
    resolution_s = max((one.resolution_s for one in found), default=1.0)
    step_s = max(1, math.ceil(wanted_s / resolution_s)) * resolution_s
    first = window.since // step_s * step_s
    buckets = max(1, math.ceil((window.until - first) / step_s))
    answer = energy_of if metric == ENERGY else gauge_of
    at = [first + step_s * number for number in range(buckets)]
    return Answer(at, step_s, resolution_s, [answer(one, metric, first, step_s, buckets) for one in found])


def check(spans: list[Span], metric: str, window: Window) -> None:
    if metric not in METRICS:
        known = ", ".join(METRICS)
        raise field_problem(400, "invalid", "metric", f"there is no {metric[:60]!r}; choose one of {known}.")
    length_s = window.until - window.since
    if not 0 < length_s < math.inf:
        raise field_problem(400, "invalid", "from", "it must lie before `to`.")
    if window.since < 0:
        raise field_problem(400, "invalid", "from", "there was nothing before 1970.")
    if window.step_s is None:
        return
    if not window.step_s >= 1:
        raise field_problem(400, "invalid", "step", "at least one second.")
    most = max(1, min(POINTS_MOST, VALUES_MOST // max(1, len(spans))))
    if length_s / window.step_s > most:
        sentence = f"{length_s / window.step_s:.0f} points for each of {len(spans)} GPU(s) are too many, at most {most}"
        raise Problem(
            400, "too_many_points", f"{sentence}: use a step of at least {math.ceil(length_s / most)} s.",
            errors=[{"field": "step", "message": f"at least {math.ceil(length_s / most)} s"}],
        )  # fmt: skip


def gauge_of(found: Found, metric: str, first: float, step_s: float, buckets: int) -> SpanAnswer:
    stats, unknown = stats_of(found, metric, first, step_s, buckets)
    count = [stat.known if stat else 0 for stat in stats]  # of its own samples, whatever is drawn over from before
    stats = stretched(stats, unknown, step_s)
    return SpanAnswer(
        found.span,
        least=[stat.low if stat else None for stat in stats],
        mean=[stat.mean if stat else None for stat in stats],
        most=[stat.high if stat else None for stat in stats],
        count=count,
    )


def energy_of(found: Found, _metric: str, first: float, step_s: float, buckets: int) -> SpanAnswer:
    total: Column = [None] * buckets
    last, at = found.track.last, found.columns["at"]
    still_raw = rollups.track_of(found.columns, 1, last if last and at and last[0] < (at[0] or 0) else None)
    for begin, used in (*found.track.energy.items(), *still_raw.energy.items()):
        place = int((begin - first) // step_s)
        if 0 <= place < buckets:
            total[place] = (total[place] or 0) + used
    nothing: Column = [None] * buckets
    return SpanAnswer(found.span, nothing, nothing, nothing, [0] * buckets, total)


# --- rolling up -------------------------------------------------------------------------------------------------------


def keep_house(*, now: float | None = None) -> int:
    """What the control worker does every few seconds. -> raw blocks that were rolled up."""
    now = time.time() if now is None else now
    with transaction.atomic():
        for name in rollups.keep_partitions(now):
            log.info("History past its time was dropped: %s.", name)
    return roll_up(now=now)


def roll_up(*, now: float | None = None, budget_s: float = BUDGET_S) -> int:
    """Stretches that are no longer young, the oldest first, for as long as the budget lasts."""
    until, begun, done = settled(time.time() if now is None else now), time.monotonic(), 0
    for node_id, start in stretches(until):
        try:
            done += consume(node_id, start)
        except DatabaseError:
            log.exception("The samples of node %d from %d on were not rolled up; they are tried again.", node_id, start)
        if time.monotonic() - begun > budget_s:
            break
    return done


def settled(now: float) -> float:
    """Whole stretches alone: a row is then written once and not every few seconds."""
    return math.floor((now - RAW_S) / FINE.span_s) * FINE.span_s


def stretches(until: float) -> list[tuple[int, int]]:
    """-> (node id, start) of what waits, the oldest first."""
    waiting = (
        SampleBlock.objects.filter(started_at__lt=until)
        .annotate(stretch=Floor(F("started_at") / FINE.span_s))
        .order_by("stretch", "node_id")
        .values_list("node_id", "stretch")
        .distinct()
    )
    return [(node_id, int(stretch) * FINE.span_s) for node_id, stretch in waiting[:STRETCHES_PER_RUN]]


def consume(node_id: int, start: int) -> int:
    """-> blocks that became buckets; 0 if somebody else is at it."""
    with transaction.atomic():
        if not alone_with(node_id):
            return 0
        own = SampleBlock.objects.filter(node_id=node_id, started_at__gte=start, started_at__lt=start + FINE.span_s)
        blocks = list(own.order_by("started_at")[:BLOCKS_AT_ONCE])
        add(node_id, start, columns_by_gpu(node_id, blocks))
        SampleBlock.objects.filter(pk__in=[block.pk for block in blocks]).delete()
    return len(blocks)


def alone_with(node_id: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_CLASS, node_id % (1 << 31)])
        return bool(cursor.fetchone()[0])


def columns_by_gpu(node_id: int, blocks: list[SampleBlock]) -> dict[str, Columns]:
    """Of the node's own GPUs."""
    samples: dict[str, list[raw.Sample]] = {}
    own = set(Gpu.objects.filter(node_id=node_id).values_list("uuid", flat=True))
    for block in blocks:
        for gpu, rows in decode_payload(block.payload).items():
            if gpu in own:
                samples.setdefault(gpu, []).extend(decode_samples(rows))
    return {gpu: columns_of(found) for gpu, found in samples.items()}


def add(node_id: int, start: int, columns: dict[str, Columns]) -> None:
    counters = counters_before(node_id, start)
    tracks = {gpu: rollups.track_of(found, FINE.step_s, counters.get(gpu)) for gpu, found in columns.items()}
    for level in LEVELS:
        tracks = {gpu: track.coarser(level.step_s) for gpu, track in tracks.items()}
        rows: dict[int, dict[str, Track]] = {}
        for gpu, track in tracks.items():
            for row_start, part in track.by_row(level).items():
                rows.setdefault(row_start, {})[gpu] = part
        for row_start, row in sorted(rows.items()):
            rollups.add(level, node_id, row_start, row)


def counters_before(node_id: int, start: int) -> dict[str, tuple[float, float]]:
    """Where the energy counters stood when the node's stretches up to this one were rolled up."""
    found: dict[str, tuple[float, float]] = {}
    for _, row_start, row in rollups.read(FINE, [node_id], start - FINE.span_s, start + FINE.span_s):
        for gpu, packed in row.items():
            last = rollups.unpacked(packed, row_start, FINE).last
            if last:
                found[gpu] = max(last, found.get(gpu, last))
    return found
