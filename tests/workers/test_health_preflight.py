"""What is checked before ranks start, and what happens to an attempt that is refused."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from yard import Settings, Yard, slots, states

from wire.desired import Launch
from wire.hardware import HealthEvent
from wire.reports import GpuInfo, GpuProcess, GpuReading, Refusal
from wire.states import EndReason
from workers.preflight import Preflight, Situation, check
from workers.supervisor import Supervisor

GIB = 1024**3
NOW = 1000.0
GPUS = slots(2)
KNOWN = {slot.uuid: GpuInfo(uuid=slot.uuid, index=slot.index, vendor="nvidia", name="H100") for slot in GPUS}


def launch(gpus: int = 2) -> Launch:
    return Launch(attempt="mine", job=1, epoch=1, name="t", user="bob", launcher="script", command="x",
                  gpus=GPUS[:gpus])  # fmt: skip


def reading(index: int = 0, **fields: Any) -> GpuReading:
    return GpuReading(uuid=GPUS[index].uuid, **({"at": NOW - 1, "processes": [], "memory_used_bytes": 0} | fields))


def situation(*readings: GpuReading, **fields: Any) -> Situation:
    found = {one.uuid: one for one in (reading(0), reading(1), *readings)}
    return Situation(**({"now": NOW, "readings": found, "known": KNOWN, "spool_free_bytes": GIB} | fields))


def process(pid: int = 77, **fields: Any) -> GpuProcess:
    return GpuProcess(pid=pid, user="eve", command="miner", **fields)


def refused(now: Situation) -> list[tuple[str, str]]:
    return [(one.code, one.message) for one in check(launch(), now)]


def test_nothing_speaks_against_a_start_on_gpus_that_are_well() -> None:
    assert refused(situation()) == []


@pytest.mark.parametrize(("now", "code", "message"), [
    (situation(known={GPUS[0].uuid: KNOWN[GPUS[0].uuid]}, problem="GPU 1 does not answer."), "broken",
     "GPU 1 is not among those that the driver lists: GPU 1 does not answer."),
    (situation(fatal={GPUS[1].uuid: (990.0, "Xid 79")}), "broken", "GPU 1 just reported Xid 79."),
    (situation(reading(1, at=NOW - 60)), "broken", "GPU 1 has not been read for 60 s."),
    (situation(reading(1, missing={"gpu": "gpu_lost"})), "broken", "GPU 1 does not answer: gpu_lost."),
    (situation(reading(1, missing={"gpu": "released"})), "busy",
     "GPU 1 is not read now, so that its driver can be worked on."),
    (situation(reading(1, processes=[process()])), "busy", "GPU 1 is used by process 77 of eve (miner)."),
    (situation(reading(1, processes=[process(attempt="other")])), "busy",
     "GPU 1 is used by process 77 of eve (miner) of attempt other, which has ended."),
    (situation(reading(1, memory_used_bytes=3 * GIB), stuck_since={GPUS[1].uuid: NOW - 4}), "busy",
     "GPU 1 has 3.2 GB in use and no process that explains them."),
    (situation(spool_free_bytes=10 * 1024**2), "disk", "The node's disk has 10 MiB left, a start needs 256 MiB."),
])  # fmt: skip
def test_what_speaks_against_a_start_is_said_in_a_sentence(now: Situation, code: str, message: str) -> None:
    assert refused(now) == [(code, message)]


def test_a_driver_that_lists_nothing_is_at_fault_itself() -> None:
    now = situation(known={}, problem="The driver is not loaded.")
    assert refused(now) == [
        ("busy", f"GPU {n} is not among those that the driver lists: The driver is not loaded.") for n in (0, 1)]


@pytest.mark.parametrize("now", [
    situation(known=None, readings={}, reader="failed: starting"),
    situation(readings={}),
    situation(reading(1, at=NOW - 60), reader="hung"),
    situation(reading(1, processes=None, missing={"processes": "no_permission"})),
    situation(reading(1, processes=[process()]), is_gone=lambda _: True),
    situation(reading(1, processes=[process(attempt="mine")])),
    situation(reading(1, memory_used_bytes=3 * GIB), stuck_since={GPUS[1].uuid: NOW - 1}),
    situation(spool_free_bytes=None),
])  # fmt: skip
def test_what_is_not_known_or_just_passing_holds_nobody_up(now: Situation) -> None:
    assert refused(now) == []


def test_gpus_that_the_attempt_does_not_get_do_not_matter() -> None:
    now = situation(reading(1, processes=[process()]))
    assert check(launch(gpus=1), now) == [] and check(launch(gpus=0), now) == []


def node(tmp_path: Path) -> Preflight:
    return Preflight(tmp_path, lambda: (list(KNOWN.values()), None), lambda: "ok")


def test_it_keeps_what_it_needs_and_costs_no_time(tmp_path: Path) -> None:
    preflight = node(tmp_path)
    at = time.time()
    preflight.note([reading(0, at=at), reading(1, at=at, processes=[process(os.getpid())])])
    assert [one.gpu_uuid for one in preflight(launch())] == [GPUS[1].uuid]
    preflight.note([reading(1, at=at, processes=[process(2**22 + 5)])])
    assert preflight(launch()) == [], "a process that ended since the reading is in nobody's way"
    spent = []
    for _ in range(100):
        began = time.perf_counter()
        preflight(launch())
        spent.append(time.perf_counter() - began)
    assert sorted(spent)[50] < 0.001


def test_memory_counts_as_stuck_only_when_it_stays(tmp_path: Path) -> None:
    preflight = node(tmp_path)
    now = time.time()
    preflight.note([reading(0, at=now - 6, memory_used_bytes=4 * GIB), reading(0, at=now, memory_used_bytes=4 * GIB)])
    assert [one.code for one in preflight(launch(1))] == ["busy"]
    preflight.note([reading(0, at=now), reading(0, at=now, memory_used_bytes=4 * GIB)])
    assert preflight(launch(1)) == []


def test_an_event_of_the_last_seconds_counts_until_the_gpu_is_back(tmp_path: Path) -> None:
    preflight = node(tmp_path)

    def event(kind: str, code: int | None = None, age_s: float = 0.0) -> None:
        at = time.time() - age_s
        preflight.note_event(HealthEvent(at=at, key="k", kind=kind, code=code, gpu_uuid=GPUS[0].uuid))

    event("xid", 31)
    event("throttle")
    event("xid", 79, age_s=60)
    assert preflight(launch()) == []
    event("xid", 79)
    assert [one.message for one in preflight(launch())] == ["GPU 0 just reported Xid 79."]
    event("back")
    assert preflight(launch()) == []


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.clear()


def test_a_refused_attempt_ends_before_anything_of_it_started(yard: Yard) -> None:
    refusal = Refusal(code="busy", message="GPU 0 is used by process 7.", gpu_uuid="GPU-1")
    asked: list[str] = []

    def preflight(launch: Launch) -> list[Refusal]:
        asked.append(launch.attempt)
        return [refusal]

    yard.supervisor.close()
    yard.supervisor = Supervisor(yard.spool, Settings(), preflight=preflight)
    attempt = yard.start("/bin/echo never")
    (event,) = attempt.events()
    assert (event.state.value, event.reason, event.message) == ("failed", EndReason.PREFLIGHT, refusal.message)
    assert event.refusals == [refusal] and event.log_sizes.get("rank-0", 0) == 0
    assert attempt.shim() is None and not yard.supervisor.active()
    yard.supervisor.launch(attempt.launch)
    yard.restart_worker()
    yard.supervisor.recover()
    yard.supervisor.launch(attempt.launch)
    assert states(attempt) == ["failed"] and len(asked) == 1, "refused once is refused for good"


def test_an_attempt_that_runs_is_not_checked_again(yard: Yard) -> None:
    attempt = yard.start("/bin/sleep 60")
    yard.until(lambda: "running" in states(attempt))
    yard.supervisor.close()
    yard.supervisor = Supervisor(yard.spool, Settings(), preflight=lambda _: [Refusal(code="busy", message="no")])
    yard.supervisor.recover()
    yard.supervisor.launch(attempt.launch)
    assert states(attempt) == ["starting", "running"]


def test_what_the_portal_knew_of_when_it_gave_the_gpu_does_not_count() -> None:
    """An administrator released it after the Xid: the next job must not be held up by it."""
    now = situation(fatal={GPUS[1].uuid: (990.0, "Xid 79")})
    order = msgspec.structs.replace(launch(), gpus=[GPUS[0], msgspec.structs.replace(GPUS[1], trusted_since=991.0)])
    assert check(order, now) == []
