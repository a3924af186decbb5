"""Buckets of time: what is kept of samples when they are no longer young, and how it lies in the table.

A row of `Rollup` is a node's span of one level. Adding to a bucket and adding up buckets is the same operation, so late
samples find their place and a coarser level is made from a finer one.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from django.db import connection

from portal.models import Rollup
from portal.services.raw import ENERGY, FIELDS, Columns

DAY_S = 86_400
ENERGY_GAP_S = 60.0  # longer, and nobody knows when it was used
ENERGY_MOST_MW = 10_000_000


@dataclass(frozen=True)
class Level:
    step_s: int
    span_s: int  # of a row
    keep_s: int
    partition_s: int

    def row_of(self, at: int) -> int:
        return at // self.span_s * self.span_s


FINE = Level(10, 300, 2 * DAY_S, DAY_S // 4)
MINUTES = Level(60, 1800, 14 * DAY_S, DAY_S)
QUARTERS = Level(900, 6 * 3600, 400 * DAY_S, 30 * DAY_S)
LEVELS = (FINE, MINUTES, QUARTERS)


class Stat(NamedTuple):
    """Of the known values of a bucket."""

    low: float
    high: float
    total: float
    known: int

    @property
    def mean(self) -> float:
        return rounded(self.total / self.known)

    def plus(self, other: "Stat") -> "Stat":
        return Stat(
            min(self.low, other.low), max(self.high, other.high), self.total + other.total, self.known + other.known
        )


def rounded(value: float) -> float:
    return round(value, 2) if abs(value) < 10_000 else round(value)


@dataclass
class Track:
    """One GPU over time, by the moment at which a bucket begins. What was not measured is not there."""

    samples: dict[int, int] = field(default_factory=dict)
    stats: dict[str, dict[int, Stat]] = field(default_factory=dict)
    energy: dict[int, float] = field(default_factory=dict)  # millijoules used in the bucket
    last: tuple[float, float] | None = None  # newest moment and where the energy counter stood

    def add(self, other: "Track") -> None:
        for at, count in other.samples.items():
            self.samples[at] = self.samples.get(at, 0) + count
        for at, used in other.energy.items():
            self.energy[at] = self.energy.get(at, 0.0) + used
        for name, more in other.stats.items():
            mine = self.stats.setdefault(name, {})
            for at, stat in more.items():
                known = mine.get(at)
                mine[at] = known.plus(stat) if known else stat
        self.last = max((one for one in (self.last, other.last) if one), default=None)

    def coarser(self, step_s: int) -> "Track":
        made = Track(last=self.last)
        for name, mine in self.stats.items():
            made.stats[name] = gathered(mine, step_s)
        for at, count in self.samples.items():
            place = at // step_s * step_s
            made.samples[place] = made.samples.get(place, 0) + count
        for at, used in self.energy.items():
            place = at // step_s * step_s
            made.energy[place] = made.energy.get(place, 0.0) + used
        return made

    def by_row(self, level: Level) -> dict[int, "Track"]:
        rows: dict[int, Track] = {}
        for at, count in self.samples.items():
            rows.setdefault(level.row_of(at), Track(last=self.last)).samples[at] = count
        for start, row in rows.items():
            row.energy = within(self.energy, start, level)
            for name, mine in self.stats.items():
                if found := within(mine, start, level):
                    row.stats[name] = found
        return rows


def gathered(stats: dict[int, Stat], step_s: int) -> dict[int, Stat]:
    made: dict[int, Stat] = {}
    for at, stat in stats.items():
        place = at // step_s * step_s
        known = made.get(place)
        made[place] = known.plus(stat) if known else stat
    return made


def within(values: dict[int, Any], start: int, level: Level) -> dict[int, Any]:
    return {at: value for at, value in values.items() if start <= at < start + level.span_s}


# --- from samples -----------------------------------------------------------------------------------------------------
def track_of(columns: Columns, step_s: int, last: tuple[float, float] | None = None) -> Track:
    """`columns` sorted by time. `last` is where the energy counter stood before; later than the first: no energy."""
    track = Track()
    at = [moment for moment in columns["at"] if moment is not None]
    for place, begin, end in runs(at, step_s):
        track.samples[place] = end - begin
        for name in FIELDS:
            known = [value for value in columns[name][begin:end] if value is not None]
            if known:
                stat = Stat(min(known), max(known), sum(known), len(known))
                track.stats.setdefault(name, {})[place] = stat
    if at and not (last and last[0] >= at[0]):
        add_energy(track, at, columns[ENERGY], last, step_s)
    return track


def runs(at: list[float], step_s: int) -> Iterator[tuple[int, int, int]]:
    """-> (bucket, first row, row after the last) for times in order."""
    begin = 0
    while begin < len(at):
        place = int(at[begin] // step_s * step_s)
        end = begin + 1
        while end < len(at) and at[end] < place + step_s:
            end += 1
        yield place, begin, end
        begin = end


def add_energy(
    track: Track, at: list[float], counter: list[float | None], last: tuple[float, float] | None, step_s: int
) -> None:
    for moment, value in zip(at, counter, strict=True):
        if value is None:
            continue
        elapsed_s, used = (moment - last[0], value - last[1]) if last else (math.inf, 0.0)
        if elapsed_s <= ENERGY_GAP_S and 0 <= used <= ENERGY_MOST_MW * (elapsed_s + 1):
            place = int(moment // step_s * step_s)
            track.energy[place] = track.energy.get(place, 0.0) + used
        last = (moment, value)
    track.last = last


# --- in the table -----------------------------------------------------------------------------------------------------
Numbers = list[float | None]


class Packed(msgspec.Struct, array_like=True):
    """A Track as lists over the buckets of its row. `counts` is left out where every sample was known."""

    samples: list[int]
    stats: dict[str, tuple[Numbers, Numbers, Numbers, list[int] | None]]  # low, mean, high, count
    energy: Numbers | None = None
    last: tuple[float, float] | None = None


Row = dict[str, Track]
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
decode_packed = msgspec.msgpack.Decoder(Packed).decode


def packed(track: Track, start: int, level: Level) -> Packed:
    places = range(start, start + level.span_s, level.step_s)
    samples = [track.samples.get(at, 0) for at in places]
    stats = {}
    for name, mine in track.stats.items():
        found = [mine.get(at) for at in places]
        counts = [stat.known if stat else 0 for stat in found]
        stats[name] = (
            [stat and stat.low for stat in found],
            [stat and stat.mean for stat in found],
            [stat and stat.high for stat in found],
            None if counts == samples else counts,
        )
    return Packed(samples, stats, [track.energy.get(at) for at in places] if track.energy else None, track.last)


def unpacked(raw: bytes | msgspec.Raw, start: int, level: Level) -> Track:
    row = decode_packed(raw)
    places = range(start, start + level.span_s, level.step_s)
    track = Track(last=row.last)
    track.samples = {at: count for at, count in zip(places, row.samples, strict=True) if count}
    if row.energy:
        track.energy = {at: used for at, used in zip(places, row.energy, strict=True) if used is not None}
    for name, (lows, means, highs, counts) in row.stats.items():
        mine = track.stats[name] = {}
        for at, low, mean, high, count in zip(places, lows, means, highs, counts or row.samples, strict=True):
            if low is not None and mean is not None and high is not None:
                mine[at] = Stat(low, high, mean * count, count)
    return track


def read(
    level: Level, node_ids: Iterable[int], since: float, until: float
) -> Iterator[tuple[int, int, dict[str, msgspec.Raw]]]:
    """-> (node id, start, {GPU: its track, still packed}) of every row that touches the time."""
    rows = Rollup.objects.filter(
        step_s=level.step_s, node_id__in=node_ids, started_at__gt=since - level.span_s, started_at__lte=until
    )
    columns = rows.order_by("started_at").values_list("node_id", "started_at", "payload")
    for node_id, start, payload in columns.iterator(chunk_size=200):
        yield node_id, start, decode(payload)


def add(level: Level, node_id: int, start: int, more: Row) -> None:
    """Into a row that may be there already. Within a transaction that keeps others away from the node."""
    found = Rollup.objects.filter(step_s=level.step_s, node_id=node_id, started_at=start)
    payload = found.values_list("payload", flat=True).first()
    tracks: dict[str, Any] = dict(decode(payload)) if payload else {}
    for gpu, track in more.items():
        if gpu in tracks:
            whole = unpacked(tracks[gpu], start, level)
            whole.add(track)
            track = whole
        tracks[gpu] = packed(track, start, level)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO portal_rollup (step_s, node_id, started_at, payload) VALUES (%s, %s, %s, %s) "
            "ON CONFLICT (step_s, node_id, started_at) DO UPDATE SET payload = EXCLUDED.payload",
            [level.step_s, node_id, start, encode(tracks)],
        )


# --- partitions -------------------------------------------------------------------------------------------------------
def keep_partitions(now: float) -> list[str]:
    """Make those that will be needed, drop those past their time. -> what was dropped. Repeating it changes nothing."""
    dropped: list[str] = []
    with connection.cursor() as cursor:
        for level in LEVELS:
            parent = f"portal_rollup_{level.step_s}"
            there = partitions(cursor, parent)
            for start in wanted(level, now):
                if start not in there:
                    cursor.execute(
                        f"CREATE TABLE IF NOT EXISTS {parent}_{start} PARTITION OF {parent} "
                        f"FOR VALUES FROM ({start}) TO ({start + level.partition_s})"
                    )
            for start in there:
                if start + level.partition_s <= now - level.keep_s:
                    cursor.execute(f"DROP TABLE IF EXISTS {parent}_{start}")
                    dropped.append(f"{parent}_{start}")
    return dropped


def wanted(level: Level, now: float) -> range:
    """From the oldest moment that a sample may still have to a whole partition ahead."""
    width = level.partition_s
    since = int(now - DAY_S - level.span_s) // width * width
    return range(since, int(now) + 2 * width, width)


def partitions(cursor: Any, parent: str) -> list[int]:
    cursor.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", [parent])
    return sorted(int(name.rpartition("_")[2]) for (name,) in cursor.fetchall())
