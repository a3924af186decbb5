"""Ending a run means its whole tree, however its processes detach, with and without control groups."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from yard import Yard, alive, is_running, output, shim_pid, states

from wire.states import EndReason
from workers import plan
from workers.launchers import base
from workers.runtimes import cgroups, tree

MEANS = ["v2", "v1", "none"]

RANKS_IN_SESSIONS = """
import subprocess, sys, time
ranks = [subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
         for _ in range(4)]
print("ranks", *(rank.pid for rank in ranks))
for rank in ranks: rank.wait()
"""

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("daemon", os.getpid(), "is out")
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
"""

FORKS_ON = """
import os, time
print("forking")
for _ in range(30):
    if os.fork() == 0:
        os.setsid()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if os.fork() == 0: time.sleep(0.02); os._exit(0)
            try: os.wait()
            except ChildProcessError: pass
        os._exit(0)
while True: time.sleep(1)
"""


@pytest.fixture(params=MEANS)
def yard(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Yard]:
    means = request.param
    group = cgroups.create(f"probe-{os.getpid()}", means)
    if means != "none" and group is None:
        pytest.skip(f"no control groups {means} for this account")
    if group is not None:
        group.remove()
    yard = Yard(tmp_path, means)
    yield yard
    yard.clear()


def ranks_of(yard: Yard, **fields: object) -> tuple[list[int], object]:
    attempt = yard.python(RANKS_IN_SESSIONS, **fields)
    yard.until_output(attempt, "ranks")
    yard.until(lambda: output(attempt).endswith("\n"))
    return [int(word) for word in output(attempt).split()[1:]], attempt


def test_the_run_is_held_by_what_was_asked_for(yard: Yard) -> None:
    attempt = yard.start("/bin/sleep 600")
    yard.until(lambda: "running" in states(attempt))
    shim = attempt.shim()
    assert shim is not None
    assert shim.get("cgroup_version", "none") == yard.cgroups
    main = attempt.events()[1].pid
    assert main in yard.supervisor.processes(attempt.launch.attempt)
    assert shim_pid(attempt) not in yard.supervisor.processes(attempt.launch.attempt)


def test_ranks_in_sessions_of_their_own_all_end_with_a_stop(yard: Yard) -> None:
    ranks, attempt = ranks_of(yard)
    assert all(is_running(rank) for rank in ranks)
    yard.stop(attempt, grace_s=0.3)
    assert yard.ended(attempt).reason is EndReason.STOP_REQUESTED
    assert not any(is_running(rank) for rank in ranks)


def test_ranks_end_when_their_launcher_is_killed(yard: Yard) -> None:
    ranks, attempt = ranks_of(yard)
    os.kill(attempt.events()[1].pid, signal.SIGKILL)
    since = time.monotonic()
    end = yard.ended(attempt)
    assert (end.reason, end.signal) == (EndReason.SIGNAL, signal.SIGKILL)
    assert not any(is_running(rank) for rank in ranks)
    assert time.monotonic() - since < 10.0


def test_a_daemon_that_hides_its_origin_does_not_outlive_the_run(yard: Yard) -> None:
    attempt = yard.python(DAEMON)
    yard.until_output(attempt, "is out")
    end = yard.ended(attempt)
    assert (end.reason, end.exit_code) == (EndReason.EXITED, 0)
    assert not is_running(int(output(attempt).split()[1]))


def test_a_tree_that_keeps_forking_is_ended(yard: Yard) -> None:
    attempt = yard.python(FORKS_ON)
    yard.until_output(attempt, "forking")
    yard.until(lambda: len(alive(attempt)) >= 30)
    yard.stop(attempt, grace_s=0.0)
    yard.ended(attempt)
    assert not alive(attempt)


def test_a_stopped_tree_is_ended_too(yard: Yard) -> None:
    ranks, attempt = ranks_of(yard)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    yard.stop(attempt, grace_s=0.1)
    yard.ended(attempt)
    assert not any(is_running(rank) for rank in ranks)


def test_when_the_shim_is_killed_its_tree_is_ended_and_told_as_lost(yard: Yard) -> None:
    ranks, attempt = ranks_of(yard)
    os.kill(shim_pid(attempt), signal.SIGKILL)
    since = time.monotonic()
    end = yard.ended(attempt)
    assert end.reason is EndReason.SUPERVISOR_LOST
    assert time.monotonic() - since < 10.0
    assert not any(is_running(rank) for rank in ranks)
    assert not alive(attempt)
    assert end.log_sizes["rank-0"] == attempt.log_path("rank-0").stat().st_size


def test_a_hidden_daemon_of_a_killed_shim_is_held_by_its_control_group(yard: Yard) -> None:
    if yard.cgroups == "none":
        pytest.skip("without a control group nothing ties a process to a run whose shim and environment are gone")
    attempt = yard.python(DAEMON + "time.sleep(600)\n")
    yard.until_output(attempt, "is out")
    os.kill(shim_pid(attempt), signal.SIGKILL)
    assert yard.ended(attempt).reason is EndReason.SUPERVISOR_LOST
    assert not is_running(int(output(attempt).split()[1]))


def test_what_the_kernel_does_not_end_is_told_and_not_given_up(
        yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process stands for one in an uninterruptible wait: neither takes note of SIGKILL."""
    frozen = cgroups.create(f"frozen-{os.getpid()}", "v1")
    if frozen is None:
        pytest.skip("no freezer on this machine")
    monkeypatch.setattr(base, "UNKILLABLE_S", 0.3)
    attempt = yard.start("/bin/sleep 600")
    yard.until(lambda: "running" in states(attempt))
    main = attempt.events()[1].pid
    frozen.enter(main)
    (Path(frozen.path) / "freezer.state").write_text("FROZEN")
    yard.stop(attempt, grace_s=0.0)
    yard.until(lambda: "stopping" in states(attempt))
    assert f"the kernel does not end process {main}" in attempt.events()[-1].message
    assert is_running(main)
    (Path(frozen.path) / "freezer.state").write_text("THAWED")
    assert yard.ended(attempt).reason is EndReason.STOP_REQUESTED
    assert states(attempt) == ["starting", "running", "stopping", "stopped"]
    frozen.remove()


def test_a_killed_shim_is_noticed_by_a_new_worker(yard: Yard) -> None:
    ranks, attempt = ranks_of(yard)
    yard.supervisor.close()
    yard.restart_worker()
    os.kill(shim_pid(attempt), signal.SIGKILL)
    yard.supervisor.recover()
    found = yard.spool.find(attempt.launch.attempt)
    assert yard.ended(found).reason is EndReason.SUPERVISOR_LOST
    assert not any(is_running(rank) for rank in ranks)


def test_the_control_group_is_given_back(yard: Yard) -> None:
    attempt = yard.start("/bin/true")
    yard.ended(attempt)
    path = attempt.shim().get("cgroup")
    assert path is None or not Path(path).exists()


def test_a_reused_pid_is_not_taken_for_the_run(yard: Yard) -> None:
    stranger_s = plan.start_time(os.getpid())
    assert os.getpid() not in tree.in_session(os.getsid(0), stranger_s + 1_000_000)
    assert os.getpid() in tree.in_session(os.getsid(0), 0)
