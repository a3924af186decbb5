"""Telemetry in blocks, and series in which what was not measured stays unknown."""

from datetime import UTC, datetime
from typing import Any

import pytest

from portal.models import Allocation, Attempt, Gpu, Job, Node, SampleBlock
from portal.services import raw, samples
from portal.services.gauges import Board, Gauges
from tests.portal.conftest import Cast, make_node
from wire.reports import GpuProcess, GpuReading

NOW = 1_700_000_100.0  # a multiple of a stretch


@pytest.fixture
def node(db: None) -> Node:
    return make_node("n1", gpus=2)


@pytest.fixture
def gpu(node: Node) -> Gpu:
    return node.gpus.get(index=0)


def reading(gpu: Gpu, at: float, use: float | None = 50.0, **fields: Any) -> GpuReading:
    return GpuReading(uuid=gpu.uuid, at=at, utilization_percent=use, **fields)


def attempt_on(cast: Cast, gpus: list[Gpu], since: float, until: float | None) -> Attempt:
    job = Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="j", spec={}, gpu_count=len(gpus))
    attempt = Attempt.objects.create(job=job, number=1, state="running")
    held = {"allocated_at": moment(since), "released_at": moment(until) if until else None}
    for rank, gpu in enumerate(gpus):
        Allocation.objects.create(gpu=gpu, attempt=attempt, rank=rank, **held)
    return attempt


def moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def test_a_gap_stays_unknown_and_is_never_zero(cast: Cast, node: Node, gpu: Gpu) -> None:
    times = [0, 1, 2, 10, 11]
    samples.append(node, [reading(gpu, NOW + at) for at in times], now=NOW)
    series = samples.for_attempt(attempt_on(cast, [gpu], NOW, NOW + 20))
    use = series.gpus[0].mean["utilization_percent"]
    assert len(series.at) == len(use) == 12
    assert use[:3] == [50, 50, 50]
    assert use[6:10] == [None] * 4
    assert use[10:] == [50, 50]


def test_an_unknown_value_stays_unknown_beside_known_ones(cast: Cast, node: Node, gpu: Gpu) -> None:
    samples.append(node, [reading(gpu, NOW, None, power_mw=70_000), reading(gpu, NOW + 1, 30.0)], now=NOW)
    drawn = samples.for_attempt(attempt_on(cast, [gpu], NOW, NOW + 5)).gpus[0]
    assert drawn.mean["utilization_percent"] == [None, 30.0]
    assert drawn.mean["power_mw"] == [70_000, None]


def test_readings_that_straddle_a_second_make_no_gaps(cast: Cast, node: Node, gpu: Gpu) -> None:
    samples.append(node, [reading(gpu, NOW + step + (0.99 if step % 2 else 0.01)) for step in range(0, 20)], now=NOW)
    use = samples.for_attempt(attempt_on(cast, [gpu], NOW, NOW + 30)).gpus[0].mean["utilization_percent"]
    assert None not in use


def test_only_the_time_in_which_the_gpu_was_held_counts(cast: Cast, node: Node, gpu: Gpu) -> None:
    samples.append(node, [reading(gpu, NOW + at) for at in range(20)], now=NOW)
    attempt = attempt_on(cast, [gpu], NOW + 5, NOW + 9)
    assert samples.counts(attempt) == 5
    assert samples.for_attempt(attempt).samples == 5


def test_other_gpus_of_the_node_are_not_counted(cast: Cast, node: Node, gpu: Gpu) -> None:
    other = node.gpus.get(index=1)
    samples.append(node, [reading(each, NOW + at) for at in range(5) for each in (gpu, other)], now=NOW)
    assert samples.counts(attempt_on(cast, [gpu], NOW, NOW + 10)) == 5


def test_a_long_run_is_drawn_with_mean_and_peak(cast: Cast, node: Node, gpu: Gpu) -> None:
    for begin in range(0, 1000, 100):
        values = [reading(gpu, NOW + begin + at, 100.0 if at % 10 == 0 else 0.0) for at in range(100)]
        samples.append(node, values, now=NOW + begin)
    series = samples.for_attempt(attempt_on(cast, [gpu], NOW, NOW + 1000), points=100)
    assert (series.step_s, len(series.at)) == (10, 100)
    assert set(series.gpus[0].mean["utilization_percent"]) == {10.0}
    assert set(series.gpus[0].peak["utilization_percent"]) == {100.0}


def test_a_report_that_came_twice_counts_once(cast: Cast, node: Node, gpu: Gpu) -> None:
    for _ in range(2):
        samples.append(node, [reading(gpu, NOW + at) for at in range(4)], now=NOW)
    assert samples.counts(attempt_on(cast, [gpu], NOW, NOW + 10)) == 4


@pytest.mark.parametrize("at", [float("nan"), float("inf"), NOW + 10_000, NOW - 1e6, -1.0])
def test_an_impossible_time_is_not_stored(node: Node, gpu: Gpu, at: float) -> None:
    assert samples.append(node, [reading(gpu, at)], now=NOW) == 0
    assert not SampleBlock.objects.exists()


@pytest.mark.parametrize("use", [float("nan"), -1.0, 1e308, 101.0])
def test_an_impossible_value_is_unknown(cast: Cast, node: Node, gpu: Gpu, use: float) -> None:
    samples.append(node, [reading(gpu, NOW, use, memory_used_bytes=5)], now=NOW)
    drawn = samples.for_attempt(attempt_on(cast, [gpu], NOW, NOW + 5)).gpus[0]
    assert (drawn.mean["utilization_percent"], drawn.mean["memory_used_bytes"]) == ([None], [5])


def test_a_series_of_nothing_is_empty_not_zero(cast: Cast, gpu: Gpu) -> None:
    series = samples.for_attempt(attempt_on(cast, [gpu], NOW, None))
    assert (series.at, series.samples, series.gpus[0].mean["power_mw"]) == ([], 0, [])


# --- the newest reading -----------------------------------------------------------------------------------------------
class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def test_the_newest_reading_is_shown_once_a_second_and_stored_every_other(node: Node, gpu: Gpu) -> None:
    clock = Clock()
    gauges, board = Gauges(node, clock), Board(clock)
    for step in range(8):
        clock.now = NOW + step * 0.5
        gauges.add([reading(gpu, clock.now, float(step))])
        board.flush([gauges])
    board.flush([gauges], force=True)
    gpu.refresh_from_db()
    assert gpu.latest["utilization_percent"] == 7.0
    assert SampleBlock.objects.count() == 3


def test_a_node_cannot_speak_for_the_gpu_of_another(node: Node, gpu: Gpu) -> None:
    other = make_node("n2", gpus=1)
    gauges = Gauges(other, Clock())
    gauges.add([reading(gpu, NOW, 99.0)])
    Board(Clock()).flush([gauges], force=True)
    gpu.refresh_from_db()
    assert gpu.latest == {}
    assert not SampleBlock.objects.exists()


def test_a_hostile_reading_becomes_an_honest_one(node: Node, gpu: Gpu) -> None:
    gauges = Gauges(node, Clock())
    crowd = [GpuProcess(pid=number, command="evil\x00\ud800name", memory_used_bytes=-1) for number in range(500)]
    gauges.add([reading(gpu, NOW, float("nan"), power_mw=-5, energy_mj=1 << 60, temperature_c=-10.0, processes=crowd)])
    Board(Clock()).flush([gauges], force=True)
    gpu.refresh_from_db()
    shown = gpu.latest
    assert (shown["utilization_percent"], shown["power_mw"], shown["energy_mj"]) == (None, None, None)
    assert shown["temperature_c"] == -10
    assert len(shown["processes"]) == 64
    assert "\x00" not in shown["processes"][0]["command"]


def test_a_raw_row_is_small_enough_to_keep_a_quarter_of_an_hour(node: Node, gpu: Gpu) -> None:
    samples.append(node, [reading(gpu, NOW + at, 97.0, memory_used_bytes=70 << 30, power_mw=654_321, temperature_c=61.0,
                                  sm_clock_mhz=1980) for at in range(300)], now=NOW + 300)
    payload = SampleBlock.objects.get().payload
    assert len(payload) / 300 < 60
    assert raw.decode_samples(raw.decode_payload(payload)[gpu.uuid])[0].power_mw == 654_321
