"""Slices in the pure scheduler: what asks for one gets one of that kind, what does not never gets one."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from portal.scheduler.cycle import decide, why_never
from portal.scheduler.decisions import Hold, Start
from portal.scheduler.snapshot import GpuView, JobRequest, NodeView, Snapshot

GIB = 1024**3
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb")
NAME = "NVIDIA H100 80GB HBM3"


def whole(uuid: str, **fields: object) -> GpuView:
    return replace(GpuView(uuid, 0, NAME, "H100", 80 * GIB), **fields)  # type: ignore[arg-type]


def piece(uuid: str, profile: str, **fields: object) -> GpuView:
    view = GpuView(uuid, 0, f"{NAME} MIG {profile}", "H100", int(profile[3:-2]) * GIB, mig=profile)
    return replace(view, **fields)  # type: ignore[arg-type]


def told(jobs: list[JobRequest], *gpus: GpuView) -> list[str]:
    """Per job the GPU that it gets, or why it waits."""
    decisions = decide(Snapshot(tuple(jobs), (NodeView("n1", gpus),)), 0.0)
    return [one.placements[0].gpus[0] if isinstance(one, Start) else one.message for one in decisions]


def test_each_gets_its_kind_and_the_card_of_its_wish() -> None:
    gpus = [piece("s", "1g.10gb"), piece("m", "2g.20gb"), whole("w")]
    jobs = [JobRequest(1, 1), JobRequest(2, 1, mig="2g.20gb"), JobRequest(3, 1, ("H100",), mig="1g.10gb")]
    assert told(jobs, *gpus) == ["w", "m", "s"]


def test_a_slice_with_enough_memory_only() -> None:
    needs = JobRequest(1, 1, memory_bytes=30 * GIB, mig="2g.20gb").needs
    field, sentence = why_never(needs, (NodeView("n1", (piece("m", "2g.20gb"),)),)) or ("", "")
    assert field == "resources.memory" and "the largest slice 2g.20gb has 21.5 GB" in sentence


def test_why_a_slice_cannot_be_had_is_said() -> None:
    node = NodeView("n1", (piece("s", "1g.10gb"), whole("w")))
    assert why_never(JobRequest(1, 1, mig="3g.40gb").needs, (node,)) == (
        "resources.mig", "no GPU has a slice 3g.40gb; there are: 1g.10gb.")  # fmt: skip
    assert why_never(JobRequest(1, 1, mig="1g.10gb").needs, (NodeView("n1", (whole("w"),)),)) == (
        "resources.mig", "no GPU has a slice 1g.10gb; no GPU is cut into slices.")  # fmt: skip
    assert why_never(JobRequest(1, 1, ("A100",), mig="1g.10gb").needs, (node,)) == (
        "resources.gpu", "no node has a slice 1g.10gb of GPUs called A100; there are: H100.")  # fmt: skip
    cut_only = NodeView("n1", (piece("s", "1g.10gb"),))
    assert why_never(JobRequest(1, 1).needs, (cut_only,)) == (
        "resources.gpus", "asks for 1 GPU; every GPU is cut into MIG slices, which mig asks for.")  # fmt: skip


def test_who_waits_for_a_slice_holds_up_nobody_who_wants_another() -> None:
    gpus = [piece("s", "1g.10gb", free=False), piece("m", "2g.20gb"), whole("w")]
    jobs = [JobRequest(1, 1, mig="1g.10gb"), JobRequest(2, 1, mig="1g.10gb"), JobRequest(3, 1, mig="2g.20gb"),
            JobRequest(4, 1)]  # fmt: skip
    first, second, *started = told(jobs, *gpus)
    assert first == "Waiting for 1 slice 1g.10gb. None is free." and started == ["m", "w"]
    assert second == "Behind #1, which waits for 1 slice 1g.10gb."


kinds = st.sampled_from(["", *PROFILES])
flags = st.booleans()


@given(st.lists(st.tuples(kinds, flags, flags), max_size=12), st.lists(kinds, max_size=10))
def test_nobody_gets_another_kind_or_one_that_is_held(cards: list[tuple[str, bool, bool]], asked: list[str]) -> None:
    gpus = tuple(
        (piece(f"g{place}", kind, free=free, healthy=healthy) if kind else
         whole(f"g{place}", free=free, healthy=healthy))
        for place, (kind, free, healthy) in enumerate(cards)
    )  # fmt: skip
    known = {gpu.uuid: gpu for gpu in gpus}
    jobs = [JobRequest(number, 1, mig=kind) for number, kind in enumerate(asked)]
    given_out: list[str] = []
    for job, one in zip(jobs, decide(Snapshot(tuple(jobs), (NodeView("n1", gpus),)), 0.0), strict=True):
        if isinstance(one, Start):
            (uuid,) = one.placements[0].gpus
            given_out.append(uuid)
            assert known[uuid].mig == job.mig and known[uuid].free and known[uuid].healthy
        else:
            assert isinstance(one, Hold) and one.message.endswith(".")
    assert len(given_out) == len(set(given_out))
    usable = [gpu.mig for gpu in gpus if gpu.free and gpu.healthy]
    for kind in {"", *PROFILES}:
        assert sum(known[uuid].mig == kind for uuid in given_out) == min(usable.count(kind), asked.count(kind))
