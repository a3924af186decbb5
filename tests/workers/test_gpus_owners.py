"""Whose a process on a GPU is, as far as this machine can tell."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from wire.reports import GpuProcess, GpuReading
from workers.gpus import owners, procfs
from workers.gpus.owners import LOOK_AGAIN_AFTER_S, Owners

Start = Callable[..., "subprocess.Popen[bytes]"]
DOCKER = "1b" * 32
POD = "2c" * 32


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def begin(**environment: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", "import os, sys; os.write(1, b'.'); sys.stdin.read()"],
                                   env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None and process.stdout.read(1) == b"."
        return process

    yield begin
    for process in running:
        process.communicate()


def named(known: Owners, pid: int) -> GpuProcess:
    reading = known.named(GpuReading(uuid="GPU-1", at=0.0, processes=[GpuProcess(pid=pid)]))
    assert reading.processes is not None
    return reading.processes[0]


def test_a_process_of_an_attempt_is_known_by_user_command_start_and_attempt(start: Start) -> None:
    process = start(GPUYARD_ATTEMPT_ID="7d0c")
    found = named(Owners(), process.pid)
    assert (found.user, found.attempt) == (psutil.Process(process.pid).username(), "7d0c")
    assert (found.command or "").startswith(sys.executable)
    assert found.start_time == pytest.approx(psutil.Process(process.pid).create_time(), abs=2.0)
    assert abs(time.time() - (found.start_time or 0)) < 60


def test_the_start_of_a_process_is_the_same_at_every_look(start: Start) -> None:
    process = start()
    assert len({named(Owners(), process.pid).start_time for _ in range(3)}) == 1


def test_a_process_that_is_gone_or_of_another_machine_stays_unnamed(start: Start) -> None:
    process = start()
    process.communicate()
    assert named(Owners(), process.pid) == GpuProcess(pid=process.pid)


def test_the_files_of_a_process_are_read_again_only_after_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, known, now, reads = start(), Owners(), [100.0], list[int]()
    command = procfs.command
    monkeypatch.setattr(procfs, "command", lambda pid: (reads.append(pid), command(pid))[1])
    monkeypatch.setattr(owners, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    for _ in range(5):
        assert named(known, process.pid).command
    now[0] += LOOK_AGAIN_AFTER_S
    named(known, process.pid)
    assert reads == [process.pid] * 2


def test_a_pid_that_was_given_away_again_is_another_owner(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, known = start(GPUYARD_ATTEMPT_ID="one"), start(GPUYARD_ATTEMPT_ID="two"), Owners()
    assert named(known, first.pid).attempt == "one"
    for name in ("stat", "environment"):
        real = getattr(procfs, name)
        monkeypatch.setattr(procfs, name, lambda pid, real=real: real(second.pid))
    later = procfs.Stat(1, start_ticks=10**9, cpu_ticks=0, resident_bytes=0)
    monkeypatch.setattr(procfs, "stat", lambda pid: later)
    assert named(known, first.pid).attempt == "two"


@pytest.mark.parametrize(("lines", "container"), [
    (f"0::/system.slice/docker-{DOCKER}.scope\n", DOCKER),
    (f"12:devices:/docker/{DOCKER}\n11:cpu:/docker/{DOCKER}\n", DOCKER),
    (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{POD}.scope\n", POD),
    (f"0::/machine.slice/libpod-{POD}.scope/container\n", POD),
    (f"0::/user.slice/docker-{DOCKER}.scope/inner/cri-containerd-{POD}.scope\n", POD),
    ("0::/user.slice/user-1000.slice/session-2.scope\n", None),
    ("0::/" + "ab" * 33 + "\n", None),
    ("", None),
])
def test_a_container_is_known_by_its_control_group(
    monkeypatch: pytest.MonkeyPatch, lines: str, container: str | None
) -> None:
    monkeypatch.setattr(procfs, "_content", lambda pid, name: lines.encode() if name == "cgroup" else None)
    assert procfs.container(1) == container
