"""How the simulation finds real processes: slices by their names, teams of a job, and cheaply again and again."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wire.reports import GpuReading
from workers.gpus import holders, nvml, procfs, simulated
from workers.gpus.boards import CATALOGUE
from workers.gpus.machine import Machine

PATIENCE_S = 20.0
NODE = f"test-{os.getpid()}-slices"
REST = r"import os, sys; os.write(1, b'up\n'); sys.stdin.read()"
BURN = r"import os; os.write(1, b'up\n')" + "\nwhile True: pass"
BECOME = f"""
import os, sys
os.write(1, b'up\\n')
sys.stdin.buffer.raw.read(1)
os.execve(sys.executable, [sys.executable, '-c', {REST!r}], dict(os.environ, CUDA_VISIBLE_DEVICES=os.environ['LATER']))
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def begin(code: str, **environment: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | environment, bufsize=0,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process

    yield begin
    for process in running:
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        process.kill()
        process.wait()


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(CATALOGUE.topologies["A100-2-MIG"], NODE)
    simulated.install("A100-2-MIG", NODE, machine=machine, script="")
    yield machine
    simulated.uninstall()


@pytest.fixture
def read(machine: Machine) -> Callable[[], dict[str, GpuReading]]:
    driver = nvml.NvmlDriver()
    driver.start()
    driver.enumerate()
    return lambda: {reading.uuid: reading for reading in driver.read()}


def pids(reading: GpuReading) -> list[int]:
    return [process.pid for process in reading.processes or []]


@pytest.mark.parametrize("form", ["MIG-uuid", "MIG-GPU-uuid/instance/compute", "GPU-uuid"])
def test_a_process_is_on_the_slice_that_it_was_given(
    machine: Machine, read: Callable[[], dict[str, GpuReading]], start: Start, form: str
) -> None:
    gpu = machine.gpus[1]
    half, quarter, _ = gpu.slices
    given, expected = {
        "MIG-uuid": (quarter.uuid, quarter),
        "MIG-GPU-uuid/instance/compute": (f"MIG-{gpu.uuid}/{quarter.instance}/{quarter.compute}", quarter),
        "GPU-uuid": (gpu.uuid, half),  # CUDA takes the first slice
    }[form]
    process = start(BURN, CUDA_VISIBLE_DEVICES=given)
    wait_for(lambda: pids(read()[expected.uuid]) == [process.pid])
    found = read()
    assert pids(found[gpu.uuid]) == [process.pid]
    (listed,) = found[gpu.uuid].processes or []
    assert (listed.gpu_instance, listed.compute_instance) == (expected.instance, expected.compute)
    others = [piece for piece in gpu.slices if piece is not expected]
    assert [pids(found[piece.uuid]) for piece in others] == [[], []]
    assert found[expected.uuid].memory_used_bytes == found[gpu.uuid].memory_used_bytes
    wait_for(lambda: (read()[gpu.uuid].power_mw or 0) > gpu.board.idle_power_w * 1000)


def test_a_slice_is_held_until_its_process_ends(machine: Machine, start: Start) -> None:
    quarter = machine.gpus[1].slices[1]
    process = start(REST, CUDA_VISIBLE_DEVICES=quarter.uuid)
    assert machine.is_held(quarter) and machine.is_held(machine.gpus[1]) and not machine.is_held(machine.gpus[0])
    process.kill()
    process.wait()
    assert not machine.is_held(quarter)


def test_ranks_of_an_attempt_and_of_a_launcher_are_teams(start: Start) -> None:
    uuids = [gpu.uuid for gpu in Machine(CATALOGUE.topologies["HGX-H100-4"], NODE).gpus]
    visible = ",".join(uuids)
    first = start(REST, CUDA_VISIBLE_DEVICES=visible, LOCAL_RANK="0", GPUYARD_ATTEMPT_ID="a")
    second = start(REST, CUDA_VISIBLE_DEVICES=visible, LOCAL_RANK="1", GPUYARD_ATTEMPT_ID="a")
    third = start(REST, CUDA_VISIBLE_DEVICES=visible, LOCAL_RANK="2")
    alone = start(REST, CUDA_VISIBLE_DEVICES=uuids[3])
    teams = {one.pid: one.team for one in holders.scan(frozenset(uuids))}
    assert teams == {first.pid: "a", second.pid: "a", third.pid: str(os.getpid()), alone.pid: str(-alone.pid)}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids whose environment was read."""
    found: list[int] = []
    environment = procfs.environment

    def noted(pid: int) -> bytes | None:
        found.append(pid)
        return environment(pid)

    monkeypatch.setattr(procfs, "environment", noted)
    return found


def test_strangers_that_are_known_are_seldom_read(start: Start, reads: list[int]) -> None:
    stranger, scanner = start(REST), holders.Scanner()
    nobody = frozenset({"GPU-nobody"})
    for _ in range(holders.YOUNG_LOOKS):
        scanner(nobody)
    assert reads.count(stranger.pid) == holders.YOUNG_LOOKS
    reads.clear()
    for _ in range(3 * holders.STRANGERS_EVERY):
        scanner(nobody)
    assert reads.count(stranger.pid) == 3
    reads.clear()
    scanner(frozenset({"GPU-another"}))  # every process may hold what is new
    assert reads.count(stranger.pid) == 1


def test_a_stranger_that_becomes_a_holder_by_exec_is_found(start: Start) -> None:
    process, scanner = start(BECOME, LATER="GPU-later"), holders.Scanner()
    uuids = frozenset({"GPU-later"})
    for _ in range(holders.YOUNG_LOOKS + 1):
        assert scanner(uuids) == []
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"x")
    assert process.stdout.readline() == b"up\n"
    looks = [scanner(uuids) for _ in range(holders.STRANGERS_EVERY)]
    assert [one.pid for one in looks[-1]] == [process.pid]


def test_a_process_has_a_number_that_its_pid_does_not_inherit(start: Start) -> None:
    process = start(REST)
    number = dict(procfs.entries())[process.pid]
    assert number == dict(procfs.entries())[process.pid] == Path(f"/proc/{process.pid}").stat().st_ino
    process.kill()
    process.wait()
    assert process.pid not in dict(procfs.entries())
