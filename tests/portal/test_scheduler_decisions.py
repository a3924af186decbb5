"""What the pure scheduler decides: scenarios told in a few words, and rules that hold for every cluster."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portal.scheduler.cycle import decide, why_never
from portal.scheduler.decisions import Decision, Hold, Start
from portal.scheduler.families import family, matches
from portal.scheduler.snapshot import GpuView, JobRequest, NodeView, Snapshot
from portal.scheduler.topology import choose, weight

GB = 10**9
NAMES = {"H100": "NVIDIA H100 80GB HBM3", "A100": "NVIDIA A100-SXM4-40GB", "L40S": "NVIDIA L40S"}
MEMORY = {"H100": 80 * GB, "A100": 40 * GB, "L40S": 45 * GB}


def node(
    name: str, gpus: int = 8, model: str = "H100", busy: Iterable[int] = (), kind: str = "NV18", **fields: object
) -> NodeView:
    uuids = [f"{name}-{index}" for index in range(gpus)]
    views = tuple(
        GpuView(uuid, index, NAMES[model], model, MEMORY[model], free=index not in set(busy))
        for index, uuid in enumerate(uuids)
    )
    links = tuple((a, b, kind) for a, b in combinations(uuids, 2))
    return replace(NodeView(name, views, links), **fields)  # type: ignore[arg-type]


def job(number: int, gpus: int = 1, *models: str, nodes: int = 1, **fields: object) -> JobRequest:
    return JobRequest(number, gpus, models, nodes_min=nodes, nodes_max=nodes, **fields)  # type: ignore[arg-type]


def decided(jobs: list[JobRequest], *nodes: NodeView, now: float = 0.0) -> dict[int, Decision]:
    return {one.job: one for one in decide(Snapshot(tuple(jobs), nodes), now)}


def held(decision: Decision) -> tuple[str, str]:
    assert isinstance(decision, Hold)
    return decision.code, decision.message


def gpus_of(decision: Decision) -> list[str]:
    assert isinstance(decision, Start)
    return [uuid for placement in decision.placements for uuid in placement.gpus]


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_a_job_gets_all_its_gpus_on_one_node() -> None:
    assert gpus_of(decided([job(1, 4)], node("a"))[1]) == ["a-0", "a-1", "a-2", "a-3"]


def test_two_whole_node_jobs_on_one_node_run_one_after_the_other() -> None:
    found = decided([job(1, 8), job(2, 8)], node("a"))
    assert len(gpus_of(found[1])) == 8
    assert held(found[2]) == ("wait_gpus", "Waiting for 8 GPUs. None is free.")
    assert len(gpus_of(decided([job(2, 8)], node("a"))[2])) == 8


def test_the_reason_says_how_many_are_free_and_where() -> None:
    found = decided([job(1, 8, "H100")], node("demo-01", busy=range(5)))
    assert held(found[1]) == ("wait_gpus", "Waiting for 8 H100. 3 are free on demo-01.")


def test_a_small_job_does_not_pass_a_large_one_that_waits_for_the_same_gpus() -> None:
    found = decided([job(12, 8, "H100"), job(13, 1)], node("a", busy=[0]))
    assert held(found[13]) == ("wait_behind", "Behind #12, which waits for 8 H100.")


def test_a_job_of_another_pool_passes() -> None:
    found = decided([job(1, 8, "H100"), job(2, 1, "A100")], node("a", busy=[0]), node("b", model="A100"))
    assert gpus_of(found[2]) == ["b-0"]


def test_a_node_too_small_for_the_head_is_not_claimed_by_it() -> None:
    found = decided([job(1, 8), job(2, 1)], node("a", busy=[0]), node("small", gpus=4))
    assert gpus_of(found[2]) == ["small-0"]


def test_a_job_that_fits_no_machine_blocks_nobody() -> None:
    found = decided([job(1, 16, "H100"), job(2, 8)], node("a"))
    assert held(found[1]) == (
        "never_fits",
        "Can never start: asks for 16 H100 on one node; the largest node has 8 H100.",
    )
    assert len(gpus_of(found[2])) == 8


def test_a_job_for_a_machine_that_is_away_blocks_nobody_and_says_so() -> None:
    away = node("a", unavailable="unreachable")
    found = decided([job(1, 8, "H100"), job(2, 8)], away, node("b", model="A100"))
    assert held(found[1]) == ("wait_node", "Waiting for 8 H100. a is unreachable.")
    assert len(gpus_of(found[2])) == 8


def test_a_cordoned_node_gets_nothing() -> None:
    assert held(decided([job(1)], node("a", unavailable="cordoned"))[1]) == (
        "wait_node",
        "Waiting for 1 GPU. a is cordoned.",
    )


def test_a_broken_gpu_is_not_given_and_the_rest_is() -> None:
    sick = node("a", gpus=2)
    sick = replace(sick, gpus=(replace(sick.gpus[0], healthy=False), sick.gpus[1]))
    assert gpus_of(decided([job(1)], sick)[1]) == ["a-1"]
    assert held(decided([job(1, 2)], sick)[1]) == (
        "wait_node",
        "Waiting for 2 GPUs. Some GPUs that it needs are not healthy.",
    )


def test_memory_is_a_minimum_per_gpu() -> None:
    machines = node("a", model="A100"), node("h", busy=range(8))
    assert held(decided([job(1, memory_bytes=60 * GB)], *machines)[1])[0] == "wait_gpus"
    assert gpus_of(decided([job(1, memory_bytes=40 * GB)], *machines)[1]) == ["a-0"]


def test_a_gpu_of_unknown_memory_does_not_count_as_large() -> None:
    blank = replace(node("a", gpus=1).gpus[0], memory_bytes=None)
    found = decided([job(1, memory_bytes=GB)], NodeView("a", (blank,)))
    assert held(found[1])[0] == "never_fits"


def test_the_fullest_node_that_fits_is_taken() -> None:
    found = decided([job(1, 2)], node("a"), node("b", busy=range(5)), node("c", busy=range(7)))
    assert gpus_of(found[1]) == ["b-5", "b-6"]


def test_the_first_wish_is_preferred_and_models_are_never_mixed() -> None:
    machines = node("a", model="A100"), node("h", busy=range(6))
    assert gpus_of(decided([job(1, 2, "H100", "A100")], *machines)[1]) == ["h-6", "h-7"]
    assert gpus_of(decided([job(1, 4, "H100", "A100")], *machines)[1]) == ["a-0", "a-1", "a-2", "a-3"]


def test_a_gang_over_two_nodes_waits_for_both() -> None:
    one_free = node("a"), node("b", busy=[3])
    assert held(decided([job(1, 16, "H100", nodes=2)], *one_free)[1]) == (
        "wait_gpus",
        "Waiting for 16 H100 on 2 nodes. 1 of 2 nodes has 8 free: a.",
    )
    found = decided([job(1, 16, nodes=2)], node("a"), node("b"))
    assert isinstance(found[1], Start) and [one.node for one in found[1].placements] == ["a", "b"]


def test_as_few_nodes_as_the_range_allows() -> None:
    elastic = replace(job(1, 8), nodes_max=2)
    assert isinstance(one := decided([elastic], node("a"), node("b"))[1], Start) and len(one.placements) == 1
    halves = node("a", busy=range(4)), node("b", busy=range(4))
    assert isinstance(two := decided([elastic], *halves)[1], Start) and len(two.placements) == 2


def test_nvlink_pairs_are_kept_together_and_other_pairs_are_left_whole() -> None:
    uuids = ["a-0", "a-1", "a-2", "a-3"]
    links = [(a, b, "NV4" if {a, b} in ({"a-0", "a-2"}, {"a-1", "a-3"}) else "SYS") for a, b in combinations(uuids, 2)]
    paired = replace(node("a", gpus=4, model="L40S"), links=tuple(links))
    assert gpus_of(decided([job(1, 2)], paired)[1]) == ["a-0", "a-2"]
    first_busy = replace(paired, gpus=(replace(paired.gpus[0], free=False), *paired.gpus[1:]))
    assert gpus_of(decided([job(1, 1)], first_busy)[1]) == ["a-2"], "the lone half of a pair goes first"
    assert held(decided([job(1, 4, link="nvlink")], paired)[1]) == (
        "never_fits",
        "Can never start: no node has 4 GPUs joined by NVLink.",
    )


def test_a_link_that_only_busy_gpus_have_is_waited_for() -> None:
    links = (("a-0", "a-1", "NV4"), ("a-2", "a-3", "SYS"))
    machine = replace(node("a", gpus=4, busy=[0]), links=links)
    code, message = held(decided([job(1, 2, link="nvlink")], machine)[1])
    assert code == "wait_gpus" and message == (
        "Waiting for 2 GPUs, joined by NVLink. 3 are free on a, at most 1 of them joined by NVLink."
    )


def test_a_job_without_gpus_goes_where_the_least_runs() -> None:
    found = decided([job(1, 0), job(2, 0)], node("a", busy_shares=1), node("b"))
    assert isinstance(found[1], Start) and found[1].placements[0].node == "b"
    assert isinstance(found[2], Start) and found[2].placements[0].node == "a"
    assert held(decided([job(1, 0)])[1]) == ("wait_node", "Waiting for a node. No node takes work now.")


def test_a_lost_job_waits_a_moment_before_its_next_try() -> None:
    late = job(1, not_before=100.0)
    assert held(decided([late], node("a"), now=99.0)[1]) == ("wait_retry", "The next try starts at 00:01:40 UTC.")
    assert gpus_of(decided([late], node("a"), now=100.0)[1]) == ["a-0"]


@pytest.mark.parametrize(("request_", "field", "words"), [
    (job(1, 1, "XYZ"), "resources.gpu", "no node has GPUs called XYZ; there are: A100, H100."),
    (job(1, 9), "resources.gpus", "the largest node has 8 GPUs."),
    (job(1, 24, "H100", nodes=3), "resources.nodes", "asks for 3 nodes with 8 H100; there is 1."),
    (job(1, 1, memory_bytes=200 * GB), "resources.memory", "the largest GPU has 80.0 GB."),
])  # fmt: skip
def test_what_can_never_start_names_the_field(request_: JobRequest, field: str, words: str) -> None:
    found = why_never(request_.needs, (node("a", model="A100"), node("h")))
    assert found is not None and found[0] == field and words in found[1]


@pytest.mark.parametrize(("driver", "people"), [
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100 80GB PCIe", "A100"), ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H100 NVL", "H100"), ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("Tesla V100-SXM2-32GB", "V100"), ("AMD Instinct MI300X", "MI300X"),
])  # fmt: skip
def test_models_go_by_the_name_that_people_use(driver: str, people: str) -> None:
    assert family(driver) == people and matches(people, driver) and matches(people.lower(), driver)


def test_a_wish_may_name_the_memory_and_does_not_match_a_longer_name() -> None:
    assert matches("A100-80GB", "NVIDIA A100-SXM4-80GB") and not matches("A100-80GB", "NVIDIA A100-SXM4-40GB")
    assert (
        not matches("H100", "NVIDIA GH200 480GB")
        and not matches("L40", "NVIDIA L40S")
        and not matches("", "NVIDIA L40S")
    )


# --- rules that hold for every cluster --------------------------------------------------------------------------------

clusters = st.lists(
    st.tuples(
        st.integers(1, 8),
        st.sampled_from(sorted(NAMES)),
        st.sets(st.integers(0, 7)),
        st.sampled_from(["", "", "", "cordoned", "unreachable"]),
    ),
    min_size=1,
    max_size=5,
).map(
    lambda rows: tuple(
        node(f"n{i}", gpus, model, busy, unavailable=away) for i, (gpus, model, busy, away) in enumerate(rows)
    )
)


@st.composite
def requests(draw: st.DrawFn, number: int) -> JobRequest:
    nodes = draw(st.sampled_from([1, 1, 1, 2]))
    per_node = draw(st.integers(0 if nodes == 1 else 1, 8))
    return JobRequest(
        number,
        per_node * nodes,
        tuple(draw(st.lists(st.sampled_from(sorted(NAMES)), max_size=2, unique=True))),
        draw(st.sampled_from([None, None, 44 * GB, 60 * GB])),
        draw(st.sampled_from(["any", "nvlink"])),
        nodes,
        nodes,
    )


queues = st.integers(0, 12).flatmap(lambda size: st.tuples(*(requests(number) for number in range(1, size + 1))))
snapshots = st.builds(Snapshot, queues, clusters)


@given(snapshots)
@settings(max_examples=300, deadline=None)
def test_every_start_is_whole_fitting_and_nobody_elses(snapshot: Snapshot) -> None:
    jobs = {one.id: one for one in snapshot.jobs}
    where = {gpu.uuid: (node, gpu) for node in snapshot.nodes for gpu in node.gpus}
    given_away: list[str] = []
    decisions = decide(snapshot, 0.0)
    assert [one.job for one in decisions] == [one.id for one in snapshot.jobs]
    for start in (one for one in decisions if isinstance(one, Start)):
        request, uuids = jobs[start.job], gpus_of(start)
        given_away += uuids
        assert len(uuids) == request.gpus and len(start.placements) == request.nodes_min
        assert len({place.node for place in start.placements}) == request.nodes_min
        assert len({where[uuid][1].name for uuid in uuids}) <= 1
        for place in start.placements:
            assert len(place.gpus) == request.gpus // request.nodes_min
            for uuid in place.gpus:
                machine, gpu = where[uuid]
                assert machine.name == place.node and not machine.unavailable and gpu.free and gpu.healthy
                assert request.memory_bytes is None or (gpu.memory_bytes or 0) >= request.memory_bytes
                assert not request.models or gpu.model in request.models
    assert len(given_away) == len(set(given_away))


@given(snapshots)
@settings(max_examples=200, deadline=None)
def test_equal_requests_start_in_the_order_of_the_queue(snapshot: Snapshot) -> None:
    started = {one.job: isinstance(one, Start) for one in decide(snapshot, 0.0)}
    for early, late in combinations(snapshot.jobs, 2):
        if early.needs == late.needs and early.gpus:
            assert started[early.id] or not started[late.id]


@given(snapshots, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_the_order_in_which_nodes_are_listed_does_not_matter(snapshot: Snapshot, dice: random.Random) -> None:
    shuffled = list(snapshot.nodes)
    dice.shuffle(shuffled)
    assert decide(replace(snapshot, nodes=tuple(shuffled)), 0.0) == decide(snapshot, 0.0)


@given(snapshots)
@settings(max_examples=150, deadline=None)
def test_deciding_again_after_the_starts_starts_nothing_more(snapshot: Snapshot) -> None:
    decisions = decide(snapshot, 0.0)
    taken = {uuid for one in decisions if isinstance(one, Start) for uuid in gpus_of(one)}
    nodes = tuple(
        replace(node, gpus=tuple(replace(gpu, free=gpu.free and gpu.uuid not in taken) for gpu in node.gpus))
        for node in snapshot.nodes
    )
    started = {one.job for one in decisions if isinstance(one, Start)}
    rest = tuple(one for one in snapshot.jobs if one.id not in started)
    assert not any(isinstance(one, Start) for one in decide(Snapshot(rest, nodes), 0.0))


@given(snapshots)
@settings(max_examples=150, deadline=None)
def test_an_empty_cluster_starts_whoever_is_first_and_fits(snapshot: Snapshot) -> None:
    emptied = tuple(
        replace(node, unavailable="", gpus=tuple(replace(gpu, free=True) for gpu in node.gpus))
        for node in snapshot.nodes
    )
    bare_needs = [one for one in snapshot.jobs if one.gpus == 0 and one.nodes_min <= len(emptied)]
    possible = [one for one in snapshot.jobs if one.gpus and why_never(one.needs, emptied) is None] + bare_needs
    if possible:
        head = min(possible, key=lambda one: one.id)
        found = {one.job: one for one in decide(Snapshot(snapshot.jobs, emptied), 0.0)}
        assert isinstance(found[head.id], Start)


@given(
    st.integers(2, 8).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.integers(1, size),
            st.lists(
                st.sampled_from(["NV12", "NV4", "PIX", "PHB", "SYS"]),
                min_size=size * (size - 1) // 2,
                max_size=size * (size - 1) // 2,
            ),
        )
    )
)
@settings(max_examples=150, deadline=None)
def test_no_better_linked_set_exists(drawn: tuple[int, int, list[str]]) -> None:
    size, count, kinds = drawn
    uuids = [f"a-{index}" for index in range(size)]
    pairs = dict(zip(combinations(uuids, 2), kinds, strict=True))
    machine = replace(node("a", gpus=size), links=tuple((a, b, kind) for (a, b), kind in pairs.items()))

    def inside(chosen: Iterable[str]) -> int:
        return sum(weight(pairs[pair]) for pair in combinations(sorted(chosen), 2))

    chosen = choose(machine, machine.gpus, count)
    assert chosen is not None and len(chosen) == count
    assert inside(gpu.uuid for gpu in chosen) == max(inside(some) for some in combinations(uuids, count))
