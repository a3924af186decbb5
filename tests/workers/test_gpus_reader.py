"""The reading process: watched, killed when it hangs, never left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.reports import GpuReading
from workers.gpus.faults import FAULTS_VARIABLE, FaultFile, Faults
from workers.gpus.frames import Listed, Read, Stuck, frames, pack
from workers.gpus.life import ROOT
from workers.gpus.procfs import stat
from workers.gpus.reading import Call, Patience
from workers.telemetry import Limits, Reader

PATIENCE_S = 20.0
FAST = Limits(deadline_s=1.0, start_deadline_s=20.0, restart_delays_s=(0.05, 0.05, 60.0), retry_silent_s=600.0)
NODE = "reader-test"
Make = Callable[..., Reader]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    return stat(pid) is not None and b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()


@pytest.fixture
def make() -> Iterator[Make]:
    readers: list[Reader] = []

    def start(kind: str = "simulated", limits: Limits = FAST, topology: str | None = "DGX-H100-8") -> Reader:
        reader = Reader(kind, topology, NODE, interval_s=0.1, limits=limits)
        readers.append(reader)
        reader.start()
        return reader

    yield start
    for reader in readers:
        pid = reader.pid
        reader.stop()
        assert reader.pid is None
        assert pid is None or not is_alive(pid)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the faults of readers, also of those that run."""
    path = tmp_path / "faults.json"
    monkeypatch.setenv(FAULTS_VARIABLE, str(path))

    def inject(**kinds: object) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(kinds))
        fresh.rename(path)

    return inject


def seen(reader: Reader) -> dict[str, GpuReading]:
    """The newest reading of each GPU since the last look; waits for some."""
    newest: dict[str, GpuReading] = {}

    def arrived() -> bool:
        newest.update({reading.uuid: reading for reading in reader.latest()})
        return bool(newest)

    wait_for(arrived)
    return newest


def test_it_lists_and_reads(make: Make) -> None:
    reader = make()
    gpus = reader.inventory()
    assert gpus is not None and len(gpus.infos) == 8 and reader.status == "ok"
    readings = seen(reader)
    assert set(readings) == {info.uuid for info in gpus.infos}
    assert all(reading.power_mw and "gpu" not in reading.missing for reading in readings.values())


def test_each_reading_is_given_once(make: Make) -> None:
    reader = make()
    drained: list[tuple[str, float]] = []
    wait_for(lambda: len(drained) >= 40 or bool(drained.extend((one.uuid, one.at) for one in reader.latest())))
    assert len(set(drained)) == len(drained)


def test_a_process_of_an_attempt_is_marked_with_it(make: Make) -> None:
    reader = make()
    gpus = reader.inventory()
    assert gpus is not None
    mine = gpus.infos[5].uuid
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={
        "CUDA_VISIBLE_DEVICES": mine, "GPUYARD_ATTEMPT_ID": "attempt-9"})
    try:
        marked: list[tuple[str, str | None, bool]] = []
        wait_for(lambda: bool(marked) or bool(marked.extend(
            (one.uuid, found.attempt, bool(found.user and found.command))
            for one in reader.latest() for found in one.processes or [] if found.pid == process.pid)))
        assert set(marked) == {(mine, "attempt-9", True)}
    finally:
        process.communicate()


def test_a_hanging_gpu_is_left_out_and_the_others_are_read_on(make: Make, faults: Callable[..., None]) -> None:
    reader = make()
    before = reader.inventory()
    assert before is not None
    first_pid = reader.pid
    hanging = before.infos[3].uuid
    faults(delays=[{"symbol": "nvmlDeviceGetUtilizationRates", "gpu": hanging, "seconds": 3600}])
    wait_for(lambda: reader.status == "hung")
    wait_for(lambda: len((reader.inventory() or before).infos) == 7)
    after = reader.inventory()
    assert after is not None and "GPU 3 does not answer (timeout)" in (after.problem or "")
    assert hanging not in {info.uuid for info in after.infos}
    reader.latest()
    assert set(seen(reader)) == {info.uuid for info in after.infos}
    assert reader.status == "hung" and reader.pid != first_pid
    assert first_pid is not None and not is_alive(first_pid)


def test_a_gpu_that_recovers_is_asked_again(make: Make, faults: Callable[..., None]) -> None:
    faults(delays=[{"symbol": "nvmlDeviceGetPowerUsage", "gpu": 0, "seconds": 3600}])
    reader = make(limits=Limits(deadline_s=1.0, restart_delays_s=(0.05,), retry_silent_s=0.5))
    wait_for(lambda: reader.status == "hung")
    faults()
    wait_for(lambda: reader.status == "ok")
    gpus = reader.inventory()
    assert gpus is not None and len(gpus.infos) == 8 and gpus.problem is None


def test_the_pause_before_a_silent_gpu_is_asked_again_grows_to_a_limit() -> None:
    assert [Limits().retry_after_s(hangs) for hangs in (1, 2, 3, 4, 5, 6, 10_000)] == [60, 120, 240, 480, 900, 900, 900]


def test_nobody_waits_for_a_hanging_driver(make: Make, faults: Callable[..., None]) -> None:
    faults(delays=[{"symbol": "nvmlInitWithFlags", "seconds": 3600}])
    reader = make()
    began = time.monotonic()
    assert reader.inventory() is None
    assert time.monotonic() - began < FAST.deadline_s + 0.5
    assert reader.status.startswith("failed: the GPU reader is starting")
    began = time.monotonic()
    assert reader.latest() == []
    reader.stop()
    assert time.monotonic() - began < 2.0


def test_a_lost_gpu_is_told_from_the_others(make: Make, faults: Callable[..., None]) -> None:
    reader = make()
    before = reader.inventory()
    assert before is not None
    lost = before.infos[6].uuid
    faults(lost=[6])
    wait_for(lambda: len((reader.inventory() or before).infos) == 7)
    gpus = reader.inventory()
    assert gpus is not None and f"GPU 6 ({lost})" in (gpus.problem or "")
    reader.latest()
    readings = seen(reader)
    assert readings[lost].missing == {"gpu": "gpu_lost"}
    assert [uuid for uuid, reading in readings.items() if "gpu" in reading.missing] == [lost]
    assert reader.status == "ok"


def test_a_killed_reader_is_started_again(make: Make) -> None:
    reader = make()
    assert reader.inventory() is not None
    killed = reader.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: reader.pid not in (killed, None) and reader.status == "ok")
    reader.latest()
    assert len(seen(reader)) == 8


def test_repeated_failures_are_not_retried_in_haste(make: Make) -> None:
    reader = make(topology="no-such-node")
    wait_for(lambda: "exit status 1" in reader.status)
    # Three tries follow each other quickly, then there is a minute of rest, which a stop cuts short.
    wait_for(lambda: reader.failures == 3 and reader.pid is None)
    assert reader.inventory() is None
    began = time.monotonic()
    reader.stop()
    assert time.monotonic() - began < 2.0
    assert reader.failures == 3


def test_a_driver_mismatch_is_a_problem_and_not_an_empty_machine(make: Make, faults: Callable[..., None]) -> None:
    faults(returns=[{"symbol": "nvmlInitWithFlags", "code": 18}])
    reader = make()
    gpus = reader.inventory()
    assert gpus is not None and gpus.infos == []
    assert "driver and library versions differ" in (gpus.problem or "")
    assert reader.status == f"failed: {gpus.problem}"


def test_a_call_that_lasts_is_told_from_a_process_that_stood_still() -> None:
    patience, call = Patience(), Call(7, deadline_s=3.0)
    assert not patience.is_over(call, 100.0)
    assert not patience.is_over(call, 500.0)  # the machine slept
    looks = [500.0 + 0.1 * look for look in range(1, 40)]
    over = [now for now in looks if patience.is_over(call, now)]
    assert 502.5 < over[0] < 503.5
    assert not patience.is_over(Call(8, deadline_s=3.0), looks[-1])
    assert not patience.is_over(Call(8, deadline_s=None), looks[-1] + 99)


@pytest.mark.parametrize("hangs", [False, True])
def test_it_dies_with_its_parent(hangs: bool, faults: Callable[..., None]) -> None:
    faults(delays=[{"symbol": "nvmlDeviceGetPowerUsage", "seconds": 3600}] if hangs else [])
    code = (
        "import os, sys\nfrom workers.telemetry import Reader\n"
        f"reader = Reader('simulated', 'HGX-H100-4', {NODE!r}, 0.1)\nreader.start()\nassert reader.inventory()\n"
        "print(reader.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                              cwd=ROOT)
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    wait_for(lambda: not is_alive(pid))


def test_the_workers_secrets_stay_out_of_its_environment(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_BROKER_URL", "redis://node:secret@broker")
    reader = make()
    assert reader.inventory() is not None
    assert b"secret" not in Path(f"/proc/{reader.pid}/environ").read_bytes()


def test_a_fault_file_is_followed_and_half_written_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    source = FaultFile(path)
    assert source() == Faults()
    path.write_text('{"lost": [1]}')
    assert source() == Faults(lost=[1])
    path.write_text('{"lost": [1, 2')
    assert source() == Faults(lost=[1])
    path.write_text('{"lost": ["GPU-a"]}')
    assert source() == Faults(lost=["GPU-a"])
    path.unlink()
    assert source() == Faults()


any_frame = st.one_of(
    st.builds(Stuck, gpu=st.none() | st.integers(0, 15)),
    st.builds(Read, readings=st.lists(st.builds(
        GpuReading, uuid=st.text(max_size=40), at=st.floats(0, 2e9), power_mw=st.none() | st.integers(0, 10**6),
        missing=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)), max_size=3)),
)


@given(st.lists(any_frame, max_size=5), st.data())
def test_frames_survive_any_cutting(sent: list[Read | Stuck | Listed], data: st.DataObject) -> None:
    raw = b"".join(pack(frame) for frame in sent)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)) | {0, len(raw)})
    stream = frames()
    pieces = [raw[a:b] for a, b in pairwise(cuts)]
    assert [frame for piece in pieces for frame in stream.feed(piece)] == sent
