"""A worker may be killed at any moment: the next one finds what runs, starts nothing twice, and loses no byte."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from yard import Yard, alive, is_running, output, shim_pid, states

from wire.desired import Launch
from wire.states import EndReason
from workers import plan
from workers.plan import PLAN, SHIM

WORKER = """
import sys, time
from pathlib import Path
import msgspec
from wire.desired import Launch
from workers.spool import Spool
from workers.supervisor import Supervisor
class Settings: job_path = ""
root, orders = Path(sys.argv[1]), msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=list[Launch])
supervisor = Supervisor(Spool(root / "spool"), Settings())
supervisor.recover()
for launch in orders: supervisor.launch(launch)
print("launched", flush=True)
while True:
    supervisor.wait(0.1)
    supervisor.poll()
"""

COUNTS = """
import os, sys, time
print("start", os.getpid())
for number in range(100_000):
    print(number)
    if os.path.exists(sys.argv[1]): break
    time.sleep(0.001)
"""


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.clear()


def worker(yard: Yard, orders: list[Launch]) -> subprocess.Popen[bytes]:
    given = yard.root / "orders.json"
    given.write_bytes(msgspec.json.encode(orders))
    return subprocess.Popen([sys.executable, "-c", WORKER, str(yard.root), str(given)], stdout=subprocess.PIPE,
                            cwd=Path(__file__).resolve().parents[2])


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_run_outlives_ten_killed_workers(yard: Yard) -> None:
    (yard.root / "count.py").write_text(COUNTS)
    done = yard.root / "done"
    launch = yard.order(f"{sys.executable} -u {yard.root}/count.py {done}")
    for turn in range(10):
        process = worker(yard, [launch])
        assert process.stdout is not None
        if turn % 2 == 0:
            process.stdout.readline()  # else it is killed somewhere in its start
        else:
            pause_until = time.monotonic() + 0.03 * turn
            while time.monotonic() < pause_until:
                pass
        kill(process)
    yard.restart_worker()
    yard.supervisor.recover()
    yard.supervisor.launch(launch)
    attempt = yard.spool.find(launch.attempt)
    assert attempt is not None
    yard.until_output(attempt, "start")
    pid = int(output(attempt).split()[1])
    assert alive(attempt) == [pid]
    assert attempt.events()[1].pid == pid
    done.touch()
    assert yard.ended(attempt).reason is EndReason.EXITED
    numbers = output(attempt).split("\n")[1:-1]
    assert numbers == [str(number) for number in range(len(numbers))]
    assert output(attempt).count("start") == 1
    assert [event.seq for event in attempt.events()] == [1, 2, 3]


def test_an_end_that_came_while_no_worker_ran_is_told_truly(yard: Yard) -> None:
    attempt = yard.start("/bin/sh -c 'sleep 0.3; exit 7'")
    yard.until(lambda: attempt.shim() is not None)
    shim = shim_pid(attempt)
    yard.supervisor.close()
    deadline = time.monotonic() + 10
    while is_running(shim) and time.monotonic() < deadline:
        time.sleep(0.01)
    yard.restart_worker()
    yard.supervisor.recover()
    found = yard.spool.find(attempt.launch.attempt)
    assert found is not None
    assert (found.events()[-1].reason, found.events()[-1].exit_code) == (EndReason.EXIT_CODE, 7)
    assert states(found) == ["starting", "running", "failed"]


def test_recovering_twice_tells_nothing_twice(yard: Yard) -> None:
    attempt = yard.start("/bin/sleep 600")
    yard.until(lambda: "running" in states(attempt))
    for _ in range(3):
        yard.supervisor.recover()
    yard.supervisor.close()
    yard.restart_worker()
    yard.supervisor.recover()
    found = yard.spool.find(attempt.launch.attempt)
    assert found is not None
    assert states(found) == ["starting", "running"]
    assert yard.supervisor.active() == [attempt.launch.attempt]
    assert yard.supervisor.processes(attempt.launch.attempt) == set(alive(found))


def test_what_never_started_waits_for_its_order(yard: Yard) -> None:
    launch = yard.order("/bin/echo now")
    yard.spool.create(launch)
    yard.supervisor.close()
    yard.restart_worker()
    yard.supervisor.recover()
    attempt = yard.spool.find(launch.attempt)
    assert attempt is not None
    yard.supervisor.poll()
    assert (states(attempt), attempt.shim()) == ([], None)
    yard.supervisor.launch(launch)
    assert yard.ended(attempt).reason is EndReason.EXITED
    assert output(attempt) == "now\n"


def test_a_worker_killed_before_the_shim_is_up_starts_it_once(yard: Yard) -> None:
    """The lock goes to the shim with its start: the next worker waits for it instead of starting another."""
    launch = yard.order("/bin/echo once")
    for _ in range(2):
        yard.supervisor.launch(launch)
        yard.supervisor.close()
        yard.restart_worker()
        yard.supervisor.recover()
    attempt = yard.spool.find(launch.attempt)
    assert attempt is not None
    yard.supervisor.launch(launch)
    yard.ended(attempt)
    assert output(attempt) == "once\n"


def test_a_changed_boot_id_ends_a_run_without_a_hand_on_anything(yard: Yard) -> None:
    attempt = yard.start("/bin/sleep 600")
    yard.until(lambda: "running" in states(attempt))
    shim = attempt.shim()
    assert shim is not None
    main = attempt.events()[1].pid
    assert main is not None
    os.kill(int(shim["pid"]), signal.SIGKILL)
    yard.supervisor.close()
    plan.write_record(str(attempt.path / SHIM), list((shim | {"boot_id": "of-an-earlier-boot"}).items()))
    yard.restart_worker()
    yard.supervisor.recover()
    found = yard.spool.find(attempt.launch.attempt)
    assert found is not None
    untouched = is_running(main)
    os.kill(main, signal.SIGKILL)
    yard.until(lambda: not is_running(main))
    if "cgroup" in shim:
        Path(shim["cgroup"]).rmdir()  # a true restart leaves none
    assert found.events()[-1].reason is EndReason.NODE_REBOOT
    assert untouched, "a pid of an earlier boot is somebody else's"


def test_a_shim_that_cannot_come_up_is_told_as_a_failed_launch(yard: Yard) -> None:
    launch = yard.order("/bin/true")
    attempt = yard.spool.create(launch)
    (attempt.path / plan.WAKE).unlink()
    yard.supervisor.launch(launch)
    end = yard.ended(attempt)
    assert end.reason is EndReason.LAUNCH_FAILED
    assert "did not start" in (end.message or "")
    assert "FileNotFoundError" in (end.message or "")


def test_a_torn_directory_does_not_hide_the_others(yard: Yard) -> None:
    broken = yard.start("/bin/true")
    yard.ended(broken)
    (broken.path / "launch.json").write_bytes(b"{")
    other = yard.start("/bin/sleep 600")
    yard.supervisor.close()
    yard.restart_worker()
    yard.supervisor.recover()
    assert yard.supervisor.active() == [other.launch.attempt]
    assert (broken.path / PLAN).exists()
