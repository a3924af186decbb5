"""The reading process over simulated AMD GPUs, and the processes that are given them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wire.reports import GpuReading
from workers.gpus import holders
from workers.gpus.faults import FAULTS_VARIABLE
from workers.gpus.reading import Call, Patience
from workers.telemetry import Limits, Reader

PATIENCE_S = 20.0
FAST = Limits(deadline_s=1.0, start_deadline_s=20.0, restart_delays_s=(0.05, 0.05, 60.0), retry_silent_s=600.0)
WAIT = "import os, sys; os.write(1, b'up\\n'); sys.stdin.read()"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader("simulated", "MI300X-8", f"amd-{os.getpid()}", interval_s=0.1, limits=FAST)
    reader.start()
    yield reader
    reader.stop()
    assert reader.pid is None


@pytest.fixture
def rank() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", WAIT], env=os.environ | environment,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def seen(reader: Reader) -> dict[str, GpuReading]:
    newest: dict[str, GpuReading] = {}
    wait_for(lambda: bool(newest) or bool(newest.update({one.uuid: one for one in reader.latest()})))
    return newest


def test_it_lists_and_reads(reader: Reader) -> None:
    gpus = reader.inventory()
    assert gpus is not None and len(gpus.infos) == 8 and reader.status == "ok"
    assert {info.vendor for info in gpus.infos} == {"amd"} and len(gpus.links) == 28
    readings = seen(reader)
    assert set(readings) == {info.uuid for info in gpus.infos}
    assert all(one.power_mw and "gpu" not in one.missing for one in readings.values())


def test_a_process_of_an_attempt_is_found_by_what_it_was_given(
    reader: Reader, rank: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    gpus = reader.inventory()
    assert gpus is not None
    pair = [gpus.infos[5].uuid, gpus.infos[6].uuid]
    given = {"ROCR_VISIBLE_DEVICES": ",".join(pair), "GPUYARD_ATTEMPT_ID": "attempt-9"}
    first, second = rank(**given, LOCAL_RANK="0"), rank(**given, LOCAL_RANK="1")
    found: dict[int, tuple[str, str | None]] = {}

    def both_are_seen() -> bool:
        for one in reader.latest():
            found.update({process.pid: (one.uuid, process.attempt) for process in one.processes or []})
        return {first.pid, second.pid} <= set(found)

    wait_for(both_are_seen)
    assert found == {first.pid: (pair[0], "attempt-9"), second.pid: (pair[1], "attempt-9")}


def test_what_is_meant_for_the_other_maker_holds_nothing_here(
    rank: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    uuid = "GPU-00000000000000ab"
    process = rank(CUDA_VISIBLE_DEVICES=uuid, ROCR_VISIBLE_DEVICES="")
    assert holders.scan(frozenset({uuid}), holders.ROCR_VISIBLE) == []
    assert [one.pid for one in holders.scan(frozenset({uuid}))] == [process.pid]


def test_many_slow_gpus_are_not_one_that_hangs() -> None:
    patience, call = Patience(), Call(7, deadline_s=3.0)
    looks = [(100.0 + 0.1 * look, look // 20) for look in range(320)]  # 16 dies of 2 s each
    assert not any(patience.is_over(call, now, gpu) for now, gpu in looks)
    assert any(patience.is_over(call, 132.0 + 0.1 * look, 16) for look in range(40))


def test_a_hanging_gpu_is_left_out_and_the_others_are_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "faults.json"
    monkeypatch.setenv(FAULTS_VARIABLE, str(path))
    reader = Reader("simulated", "MI300X-8", "amd-hang", interval_s=0.1, limits=FAST)
    reader.start()
    try:
        assert reader.inventory() is not None
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps({"delays": [
            {"symbol": "amdsmi_get_gpu_process_list", "gpu": 3, "seconds": 3600}]}))
        draft.rename(path)
        wait_for(lambda: reader.status == "hung" and (gpus := reader.inventory()) is not None and len(gpus.infos) == 7)
        gpus = reader.inventory()
        assert gpus is not None and "GPU 3 does not answer (timeout)" in (gpus.problem or "")
        reader.latest()
        assert set(seen(reader)) == {info.uuid for info in gpus.infos}
    finally:
        reader.stop()
