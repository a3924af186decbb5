"""Services that die are started again; nothing outlives the stop, however it was detached."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allinone import leftovers
from allinone.children import Child, wait_until
from allinone.faults import Fault
from allinone.options import CHECKOUT
from allinone.supervision import Supervision, pause_before_restart_s

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def supervision(said: list[str], clock: Clock) -> Iterator[Supervision]:
    made = Supervision(said.append, clock)
    yield made
    made.stop()


def python(name: str, code: str, log: Path) -> Child:
    return Child(name, [sys.executable, "-c", code], log, dict(os.environ))


def gone(pid: int | None) -> bool:
    return pid is not None and leftovers.parent_of(pid) is None


def test_a_killed_service_is_started_again_at_once_and_that_is_said(
    supervision: Supervision, said: list[str], tmp_path: Path
) -> None:
    web = python("web", SLEEPER, tmp_path / "web.log")
    supervision.start(web)
    first = web.pid
    web.signal(signal.SIGKILL)
    assert wait_until(lambda: web.exit_code() is not None, 10)
    supervision.tend()
    assert web.running() and web.pid != first
    assert said == ["web ended (signal 9); starting it again now."]


def test_a_service_that_keeps_falling_is_tried_ever_more_rarely(
    supervision: Supervision, said: list[str], clock: Clock, tmp_path: Path
) -> None:
    control = python("control", "raise SystemExit(3)", tmp_path / "control.log")
    supervision.start(control)
    pids = [control.pid]
    for pause_s in (0.0, 0.5, 1.0):
        assert wait_until(lambda: control.exit_code() is not None, 10)
        supervision.tend()
        if pause_s:
            clock.now += pause_s * 0.9
            supervision.tend()
            assert control.pid == pids[-1], "it was started before its pause was over"
            clock.now += pause_s * 0.2
            supervision.tend()
        assert control.pid != pids[-1]
        pids.append(control.pid)
    assert said[-1] == "control ended (exit status 3); starting it again in 1 s."


def test_pauses_grow_to_a_limit() -> None:
    assert [pause_before_restart_s(falls) for falls in (1, 2, 3, 4, 20)] == [0, 0.5, 1, 2, 15]


def test_a_service_that_cannot_start_again_is_said_and_tried_later(
    supervision: Supervision, said: list[str], clock: Clock, tmp_path: Path
) -> None:
    class Stubborn(Child):
        starts = 0

        def start(self) -> None:
            Stubborn.starts += 1
            if Stubborn.starts == 2:
                raise Fault("The disk is full.")
            super().start()

    service = Stubborn("node", [sys.executable, "-c", SLEEPER], tmp_path / "node.log", dict(os.environ))
    supervision.start(service)
    service.signal(signal.SIGKILL)
    assert wait_until(lambda: service.exit_code() is not None, 10)
    supervision.tend()
    assert "node could not be started: The disk is full." in said and not service.running()
    clock.now += 1
    supervision.tend()
    assert service.running()


def test_services_stop_in_reverse_order(tmp_path: Path, said: list[str]) -> None:
    supervision, order = Supervision(said.append), []

    class Noted(Child):
        def stop(self, timeout_s: float = 8.0) -> None:
            order.append(self.name)
            super().stop(timeout_s)

    for name in ("first", "second"):
        supervision.start(Noted(name, [sys.executable, "-c", SLEEPER], tmp_path / "log", dict(os.environ)))
    supervision.stop()
    assert order == ["second", "first"]


def test_a_service_deaf_to_the_polite_signal_is_killed(tmp_path: Path) -> None:
    deaf = python("deaf", f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEPER}", tmp_path / "deaf.log")
    deaf.start()
    assert wait_until(lambda: "up" in deaf.last_words(), 10)
    deaf.stop(timeout_s=0.2)
    assert deaf.exit_code() == -signal.SIGKILL


def test_services_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from allinone.children import Child, wait_until\n"
        f"child = Child('c', [sys.executable, '-c', {SLEEPER!r}], Path(sys.argv[1]), dict(os.environ)); child.start()\n"
        "assert wait_until(lambda: 'up' in child.last_words(), 10)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    pid = int(answer.stdout)
    assert wait_until(lambda: gone(pid), 10)


DETACHED = (
    "import os, sys, time\n"
    "if os.fork(): os._exit(0)\n"
    "os.setsid()\n"
    "if os.fork(): os._exit(0)\n"
    "import signal; signal.signal(15, signal.SIG_IGN)\n"
    "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
)


def start_detached(pid_file: Path, env: dict[str, str]) -> int:
    subprocess.run([sys.executable, "-c", DETACHED, str(pid_file)], env=env, check=True, timeout=30)
    assert wait_until(lambda: pid_file.exists() and pid_file.read_text().isdigit(), 10)
    return int(pid_file.read_text())


def test_a_detached_rank_that_ignores_signals_is_found_by_its_mark_and_ended(tmp_path: Path) -> None:
    spool = tmp_path / "node" / "spool" / "a1"
    mine = start_detached(
        tmp_path / "mine", os.environ | {"GPUYARD_ATTEMPT_ID": "a1", "GPUYARD_ERROR_FILE": f"{spool}/e"}
    )
    other = start_detached(
        tmp_path / "other", os.environ | {"GPUYARD_ATTEMPT_ID": "b2", "GPUYARD_ERROR_FILE": "/srv/x/e"}
    )
    try:
        assert leftovers.of_jobs(tmp_path) == {mine}
        assert leftovers.end(lambda: leftovers.of_jobs(tmp_path), grace_s=0.1) == set()
        assert gone(mine)
        assert not gone(other), "a job of another portal on this machine must not be touched"
    finally:
        os.kill(other, signal.SIGKILL)


def test_what_a_child_detached_becomes_ours_and_is_found(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; from pathlib import Path; from allinone import leftovers\n"
        "from allinone.children import adopt_orphans, wait_until\n"
        "adopt_orphans()\n"
        f"subprocess.run([sys.executable, '-c', {DETACHED!r}, sys.argv[1]], check=True)\n"
        "wait_until(lambda: Path(sys.argv[1]).exists() and Path(sys.argv[1]).read_text().isdigit(), 10)\n"
        "pid = int(Path(sys.argv[1]).read_text())\n"
        "assert leftovers.descendants(os.getpid()) == {pid}\n"
        "left = leftovers.end(lambda: leftovers.descendants(os.getpid()), grace_s=0.1)\n"
        "assert left == set(), left\n"
        "print(pid)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pid")],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert gone(int(answer.stdout))
