"""Samples grow old: they become buckets, once, in the right place, and a gap stays a gap."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection

from portal.models import Allocation, Attempt, Gpu, Job, Node, Rollup, SampleBlock
from portal.services import history, raw, rollups, samples
from portal.services.rollups import FINE, LEVELS, MINUTES, QUARTERS
from tests.portal.conftest import Cast, make_node
from wire.reports import GpuReading

NOW = time.time()
START = int((NOW - 7200) // 1800 * 1800)


@pytest.fixture
def node(db: None) -> Node:
    return make_node("n1", gpus=2)


@pytest.fixture
def gpu(node: Node) -> Gpu:
    return node.gpus.get(index=0)


def feed(node: Node, gpu: Gpu, since: float, until: float, **fields: Any) -> None:
    """A sample a second in blocks of ten; a field may be a function of the second."""
    for begin in range(int(since), int(until), 10):
        readings = []
        for at in range(begin, min(begin + 10, int(until))):
            values = {name: value(at) if callable(value) else value for name, value in fields.items()}
            readings.append(GpuReading(uuid=gpu.uuid, at=float(at), **values))
        samples.append(node, readings, now=begin + 10.0)


def track(node: Node, gpu: Gpu, level: rollups.Level) -> rollups.Track:
    whole = rollups.Track()
    for _, start, row in rollups.read(level, [node.pk], 0, 2**40):
        if gpu.uuid in row:
            whole.add(rollups.unpacked(row[gpu.uuid], start, level))
    return whole


def test_samples_become_buckets_of_every_level_and_are_gone(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 3600, utilization_percent=lambda at: float(at % 10), power_mw=300_000)
    assert history.keep_house(now=START + 3600 + 1300) == 360
    assert not SampleBlock.objects.exists()
    for level in LEVELS:
        found = track(node, gpu, level)
        assert sum(found.samples.values()) == 3600
        assert set(found.samples) == set(range(START // level.step_s * level.step_s, START + 3600, level.step_s))
        stats = list(found.stats["utilization_percent"].values())
        assert {(stat.low, stat.mean, stat.high) for stat in stats} == {(0.0, 4.5, 9.0)}
        assert sum(stat.known for stat in stats) == 3600


def test_young_samples_stay_as_they_were_read(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 600, utilization_percent=50.0)
    assert history.keep_house(now=START + 890) == 0
    assert history.keep_house(now=START + 1210) == 30  # the first stretch of five minutes alone
    assert SampleBlock.objects.count() == 30


def test_a_second_run_changes_nothing(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 300, utilization_percent=50.0)
    assert history.keep_house(now=START + 2000) == 30
    rows = Rollup.objects.order_by("step_s", "started_at").values_list("step_s", "started_at", "payload")
    before = list(rows.all())
    assert history.keep_house(now=START + 2000) == 0
    assert len(before) == 3 and list(rows.all()) == before


def test_unknown_values_and_times_without_samples_stay_unknown(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 20, utilization_percent=lambda at: None if at % 2 else 40.0)
    feed(node, gpu, START + 60, START + 70, power_mw=5)
    history.keep_house(now=START + 2000)
    found = track(node, gpu, FINE)
    assert found.samples == {START: 10, START + 10: 10, START + 60: 10}
    assert found.stats["utilization_percent"][START] == (40.0, 40.0, 200.0, 5)
    assert set(found.stats["utilization_percent"]) == {START, START + 10}
    assert "temperature_c" not in found.stats


def test_a_crash_in_the_middle_loses_nothing_and_doubles_nothing(
    node: Node, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(node, gpu, START, START + 300, utilization_percent=50.0)
    rollups.keep_partitions(START + 2000)
    write = rollups.add

    def fails_at_minutes(level: rollups.Level, *rest: Any) -> None:
        if level is MINUTES:
            raise RuntimeError("the power is gone")
        write(level, *rest)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(rollups, "add", fails_at_minutes)
        history.roll_up(now=START + 2000)
    assert (SampleBlock.objects.count(), Rollup.objects.count()) == (30, 0)
    assert history.roll_up(now=START + 2000) == 30
    assert sum(track(node, gpu, FINE).samples.values()) == 300


def test_late_samples_find_their_bucket(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 100, utilization_percent=20.0)
    history.keep_house(now=START + 2000)
    feed(node, gpu, START + 100, START + 105, utilization_percent=80.0)
    feed(node, gpu, START + 95, START + 100, utilization_percent=80.0)
    assert history.keep_house(now=START + 4000) > 0
    for level in LEVELS:
        assert sum(track(node, gpu, level).samples.values()) == 110
    late = track(node, gpu, FINE).stats["utilization_percent"]
    assert (late[START + 90].high, late[START + 90].known) == (80.0, 15)
    assert late[START + 100] == (80.0, 80.0, 400.0, 5)


def test_the_work_of_a_run_is_bounded(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 1200, utilization_percent=20.0)
    rollups.keep_partitions(START + 9000)
    assert history.roll_up(now=START + 9000, budget_s=0.0) == 30
    assert history.roll_up(now=START + 9000) == 90


def test_another_run_on_the_same_node_is_not_joined(node: Node, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(node, gpu, START, START + 300, utilization_percent=20.0)
    rollups.keep_partitions(START + 2000)
    monkeypatch.setattr(history, "alone_with", lambda node_id: False)
    assert history.roll_up(now=START + 2000) == 0
    assert SampleBlock.objects.count() == 30


# --- energy -----------------------------------------------------------------------------------------------------------
def test_energy_is_what_the_counter_grew_by_across_stretches(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 900, energy_mj=lambda at: 7_000_000 + (at - START) * 500_000)
    history.keep_house(now=START + 2500)
    for level in LEVELS:
        assert sum(track(node, gpu, level).energy.values()) == 899 * 500_000
    assert track(node, gpu, FINE).energy[START + 300] == 10 * 500_000


def test_a_counter_that_began_anew_adds_nothing_impossible(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 100, energy_mj=lambda at: (at - START + 1000) * 100_000 if at < START + 50 else
         (at - START - 50) * 100_000)
    history.keep_house(now=START + 2500)
    assert sum(track(node, gpu, FINE).energy.values()) == 98 * 100_000


def test_late_energy_is_not_counted_twice(node: Node, gpu: Gpu) -> None:
    def counter(at: int) -> int:
        return (at - START) * 100_000

    feed(node, gpu, START, START + 40, energy_mj=counter)
    feed(node, gpu, START + 60, START + 100, energy_mj=counter)
    history.keep_house(now=START + 2500)
    feed(node, gpu, START + 40, START + 60, energy_mj=counter)
    history.keep_house(now=START + 2500)
    assert sum(track(node, gpu, FINE).energy.values()) == 99 * 100_000


# --- partitions -------------------------------------------------------------------------------------------------------
def names() -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT relid::text FROM pg_partition_tree('portal_rollup') WHERE isleaf")
        return {name for (name,) in cursor.fetchall()}


def test_partitions_are_made_ahead_and_only_once(db: None) -> None:
    rollups.keep_partitions(NOW)
    made = names()
    assert rollups.keep_partitions(NOW) == []
    assert names() == made
    for level in LEVELS:
        last = max(int(name.rpartition("_")[2]) for name in made if name.startswith(f"portal_rollup_{level.step_s}_"))
        assert last > NOW


def test_what_is_past_its_time_goes_as_a_whole(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 300, utilization_percent=50.0)
    history.keep_house(now=START + 2000)
    history.keep_house(now=START + 3 * 86_400)
    assert not Rollup.objects.filter(step_s=FINE.step_s, started_at__lt=START + 300).exists()
    assert Rollup.objects.filter(step_s=MINUTES.step_s).exists()
    history.keep_house(now=START + 16 * 86_400)
    assert not Rollup.objects.filter(step_s=MINUTES.step_s).exists()
    history.keep_house(now=START + 399 * 86_400)
    assert Rollup.objects.filter(step_s=QUARTERS.step_s).exists()
    history.keep_house(now=START + 431 * 86_400)
    assert not Rollup.objects.exists()


def test_a_node_that_is_deleted_takes_its_history_along(node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 300, utilization_percent=50.0)
    history.keep_house(now=START + 2000)
    Gpu.objects.filter(node=node).delete()
    node.delete()
    assert not Rollup.objects.exists()


# --- charts -----------------------------------------------------------------------------------------------------------
def attempt_on(cast: Cast, gpu: Gpu, since: float, until: float) -> Attempt:
    job = Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="j", spec={}, gpu_count=1)
    attempt = Attempt.objects.create(job=job, number=1, state="running")
    moments = [datetime.fromtimestamp(at, UTC) for at in (since, until)]
    Allocation.objects.create(gpu=gpu, attempt=attempt, rank=0, allocated_at=moments[0], released_at=moments[1])
    return attempt


def test_a_chart_joins_old_buckets_and_raw_samples(cast: Cast, node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 1200, utilization_percent=lambda at: 30.0 if at < START + 600 else 60.0)
    history.keep_house(now=START + 600 + 900)
    assert SampleBlock.objects.count() == 60
    attempt = attempt_on(cast, gpu, START, START + 1200)
    series = samples.for_attempt(attempt)
    assert (series.step_s, series.samples, series.at[0]) == (10, 1200, START)
    assert series.gpus[0].mean["utilization_percent"] == [30.0] * 60 + [60.0] * 60
    assert samples.counts(attempt) == 1200


def test_another_ones_time_does_not_show_in_a_job_s_chart(cast: Cast, node: Node, gpu: Gpu) -> None:
    feed(node, gpu, START, START + 300, utilization_percent=lambda at: 99.0 if at < START + 100 else 10.0)
    history.keep_house(now=START + 2000)
    series = samples.for_attempt(attempt_on(cast, gpu, START + 100, START + 200))
    assert set(series.gpus[0].peak["utilization_percent"]) == {10.0}
    assert series.samples == 100


def test_a_chart_of_days_reads_the_coarse_level(cast: Cast, node: Node, gpu: Gpu) -> None:
    begin = START - 5 * 86_400
    for hour in range(0, 48, 12):
        since = begin + hour * 3600
        feed(node, gpu, since, since + 900, temperature_c=40.0 + hour)
        history.keep_house(now=since + 3600.0)
    series = samples.for_attempt(attempt_on(cast, gpu, begin, begin + 2 * 86_400), points=200)
    assert series.step_s % 60 == 0 and series.samples == 3600
    known = [value for value in series.gpus[0].mean["temperature_c"] if value is not None]
    assert set(known) == {40.0, 52.0, 64.0, 76.0}
    assert None in series.gpus[0].mean["temperature_c"]


def test_a_payload_is_small(node: Node) -> None:
    """A day of eight GPUs in the finest level must fit in some tens of megabytes."""
    columns = raw.columns_of([
        raw.Sample(START + at, 97.0, 70 << 30, 654_321 + at % 7, 61.0, 1980.0, 70.0, 1e9 + at, 2e9, 3e10, 3e10, at * 7e5)  # noqa: E501
        for at in range(300)
    ])
    payload = rollups.encode({"GPU": rollups.packed(rollups.track_of(columns, 10), START, FINE)})
    assert len(payload) * 288 * 8 < 40 * 1024**2
