"""A simulated GPU follows the processes that really were given it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from wire.reports import GpuReading
from workers.gpus import holders, nvml, procfs, simulated
from workers.gpus.boards import CATALOGUE
from workers.gpus.machine import Machine

PATIENCE_S = 20.0
# One write each: several processes may share the pipe.
BURN = r"import os; os.write(1, b'up\n')" + "\nwhile True: pass"
REST = r"import os, sys; os.write(1, b'up\n'); sys.stdin.read()"
LAUNCH = f"""
import os, subprocess, sys
children = [subprocess.Popen([sys.executable, '-c', {REST!r}], stdin=0, env=dict(os.environ, LOCAL_RANK=str(rank)))
            for rank in (0, 1)]
for child in children: child.wait()
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def uuids() -> list[str]:
    return [gpu.uuid for gpu in Machine(CATALOGUE.topologies["HGX-H100-4"], f"test-{os.getpid()}").gpus]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def begin(code: str, lines: int = 1, **environment: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )
        running.append(process)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(lines)] == [b"up\n"] * lines
        return process

    yield begin
    for process in running:
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        process.kill()
        process.wait()


@pytest.fixture
def read() -> Iterator[Callable[[], dict[int, GpuReading]]]:
    """Readings of the node by GPU index."""
    simulated.install("HGX-H100-4", f"test-{os.getpid()}")
    driver = nvml.NvmlDriver()
    driver.start()
    order = [info.uuid for info in driver.enumerate().infos]

    yield lambda: {order.index(reading.uuid): reading for reading in driver.read()}
    simulated.uninstall()


def pids(reading: GpuReading) -> list[int]:
    return [process.pid for process in reading.processes or []]


def test_a_process_that_burns_time_shows_on_its_gpu_alone_and_leaves_it(
    read: Callable[[], dict[int, GpuReading]], start: Start, uuids: list[str]
) -> None:
    assert {reading.utilization_percent for reading in read().values()} == {0.0}
    process = start(BURN, CUDA_VISIBLE_DEVICES=uuids[1])
    wait_for(lambda: pids(read()[1]) == [process.pid] and (read()[1].utilization_percent or 0) > 20)
    readings = read()
    assert [pids(readings[index]) for index in range(4)] == [[], [process.pid], [], []]
    assert [readings[index].utilization_percent for index in (0, 2, 3)] == [0.0, 0.0, 0.0]
    assert (readings[1].memory_used_bytes or 0) > 512 << 20
    assert (readings[1].power_mw or 0) > (readings[0].power_mw or 0)
    process.kill()
    process.wait()
    wait_for(lambda: pids(read()[1]) == [] and read()[1].memory_used_bytes == 0)
    assert read()[1].utilization_percent == 0.0


def test_a_process_that_rests_holds_memory_and_no_load(
    read: Callable[[], dict[int, GpuReading]], start: Start, uuids: list[str]
) -> None:
    process = start(REST, CUDA_VISIBLE_DEVICES=",".join(uuids[2:]))
    wait_for(lambda: pids(read()[2]) == [process.pid])
    # The first look counts the work of its start; the next ones see it rest.
    wait_for(lambda: read()[2].utilization_percent == 0.0)
    assert pids(read()[3]) == [process.pid]


def held(uuids: list[str]) -> dict[int, tuple[str, ...]]:
    return {one.pid: one.uuids for one in holders.scan(frozenset(uuids))}


def test_a_rank_holds_the_gpu_of_its_local_rank(start: Start, uuids: list[str]) -> None:
    process = start(REST, CUDA_VISIBLE_DEVICES=",".join(reversed(uuids)), LOCAL_RANK="1")
    assert held(uuids) == {process.pid: (uuids[2],)}


def test_a_rank_that_sees_one_gpu_holds_it_whatever_its_number(start: Start, uuids: list[str]) -> None:
    process = start(REST, CUDA_VISIBLE_DEVICES=uuids[0], LOCAL_RANK="3")
    assert held(uuids) == {process.pid: (uuids[0],)}


def test_a_launcher_above_ranks_holds_nothing(start: Start, uuids: list[str]) -> None:
    launcher = start(LAUNCH, lines=2, CUDA_VISIBLE_DEVICES=",".join(uuids[:2]))
    found = held(uuids)
    assert launcher.pid not in found
    assert sorted(found.values()) == sorted([(uuids[0],), (uuids[1],)])
    stats = [procfs.stat(pid) for pid in found]
    assert {stat.parent for stat in stats if stat} == {launcher.pid}


@pytest.mark.parametrize("visible", ["", "0,1", "all", "GPU-00000000-0000-0000-0000-000000000000", ",,,"])
def test_other_values_hold_none_of_ours(start: Start, uuids: list[str], visible: str) -> None:
    start(REST, CUDA_VISIBLE_DEVICES=visible)
    assert held(uuids) == {}


@pytest.mark.parametrize("rank", ["-1", "one", ""])
def test_an_odd_local_rank_is_none(start: Start, uuids: list[str], rank: str) -> None:
    process = start(REST, CUDA_VISIBLE_DEVICES=",".join(uuids[:2]), LOCAL_RANK=rank)
    assert held(uuids) == {process.pid: tuple(uuids[:2])}


def test_a_local_rank_beyond_the_gpus_holds_none(start: Start, uuids: list[str]) -> None:
    start(REST, CUDA_VISIBLE_DEVICES=",".join(uuids[:2]), LOCAL_RANK="99999999999999999999")
    assert held(uuids) == {}


def test_what_is_known_of_a_process(start: Start) -> None:
    process = start(REST, GPUYARD_ATTEMPT_ID="7d0c")
    environment = procfs.environment(process.pid)
    assert environment is not None
    assert procfs.variable(environment, "GPUYARD_ATTEMPT_ID") == "7d0c"
    assert procfs.variable(environment, "GPUYARD_ATTEMPT") is None
    assert (procfs.command(process.pid) or "").startswith(sys.executable)
    assert procfs.user(process.pid) == procfs.user(os.getpid())
    stat = procfs.stat(process.pid)
    assert stat is not None and stat.parent == os.getpid() and stat.resident_bytes > 1 << 20


def test_a_process_that_is_gone_is_unknown() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    gone = process.pid
    known = (procfs.environment(gone), procfs.stat(gone), procfs.command(gone), procfs.user(gone))
    assert known == (None, None, None, None)
