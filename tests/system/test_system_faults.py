"""Whatever is killed, flushed or lost: no job is lost or doubled, every log byte is there once, no rank survives."""

import os
import signal

import httpx
import psutil
import pytest

from tests.system.yard import Yard, checked_lines

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
LINES = 120


def pid_of(yard: Yard, number: int) -> int:
    return yard.wait(
        "its process runs", lambda: [p.pid for p in yard.processes(number) if "counting" in " ".join(p.cmdline())]
    )[0]


def assert_ran_once_with_every_byte(yard: Yard, number: int) -> None:
    job = yard.ended(number, timeout_s=60)
    assert (job["state"], len(job["attempts"])) == ("succeeded", 1), job["reason"]
    assert checked_lines(yard.log(number)) == list(range(LINES))
    states = [event["to_state"] for event in yard.bob.events(number) if event["kind"] == "job.state"]
    assert states == ["starting", "running", "succeeded"]


def test_the_node_worker_is_killed_in_mid_run(yard: Yard) -> None:
    number = yard.count_job(LINES, 0.05)
    pid = pid_of(yard, number)
    for _ in range(2):
        yard.kill("node")
        assert pid_of(yard, number) == pid
    assert_ran_once_with_every_byte(yard, number)


def test_the_node_worker_is_dead_when_the_job_ends(yard: Yard) -> None:
    """The exit record waits on disk for whoever comes back."""
    number = yard.submit("sh -c 'sleep 2; exit 5'")
    yard.reaches(number, "running")
    yard.kill("node")
    job = yard.ended(number)
    assert (job["state"], job["exit_code"], len(job["attempts"])) == ("failed", 5, 1)


def test_ingest_is_killed_again_and_again(yard: Yard) -> None:
    number = yard.count_job(LINES, 0.05)
    pid_of(yard, number)
    for _ in range(3):
        yard.kill("ingest")
    assert_ran_once_with_every_byte(yard, number)


def test_the_control_worker_and_the_web_server_are_killed(yard: Yard) -> None:
    number = yard.count_job(LINES, 0.05)
    pid = pid_of(yard, number)
    yard.kill("control")
    yard.kill("web")
    assert pid_of(yard, number) == pid
    assert_ran_once_with_every_byte(yard, number)


def test_the_hint_is_lost(yard: Yard) -> None:
    """The portal may not push on the node's queue at all: the desired state alone starts the job."""
    with yard.broker() as broker:
        broker.acl_setuser(
            "default",
            enabled=True,
            nopass=False,
            reset_keys=True,
            keys=["control*", "desired*", "up*", "live*", "cache*", "_kombu*", "unacked*", "celery*", "ingest*"],
            reset_channels=False,
        )
    try:
        number = yard.submit("echo started all the same")
        job = yard.ended(number, timeout_s=15)
    finally:
        with yard.broker() as broker:
            broker.acl_setuser("default", enabled=True, nopass=False, keys=["*"])
    assert job["state"] == "succeeded" and yard.log(number) == b"started all the same\n"


def test_the_broker_is_flushed_in_mid_run(yard: Yard) -> None:
    number = yard.count_job(LINES, 0.05)
    pid_of(yard, number)
    with yard.broker() as broker:
        for seen in (20, 60):
            yard.wait("the log grows", lambda seen=seen: yard.bob.logs(number).data.count(b"\n") > seen)
            broker.flushall()
    assert_ran_once_with_every_byte(yard, number)


def test_the_broker_is_killed_and_comes_back(yard: Yard) -> None:
    number = yard.count_job(LINES, 0.05)
    pid = pid_of(yard, number)
    yard.kill("valkey")
    assert pid_of(yard, number) == pid
    assert_ran_once_with_every_byte(yard, number)
    after = yard.submit("echo next")
    assert yard.ended(after, timeout_s=60)["state"] == "succeeded"


def test_the_database_is_killed_and_comes_back(yard: Yard) -> None:
    number = yard.count_job(LINES, 0.05)
    pid = pid_of(yard, number)
    killed = yard.service("postgres").pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    yard.wait("the database runs again", lambda: yard.service("postgres").pid not in {None, killed})
    yard.wait("the portal is ready", lambda: httpx.get(f"{yard.stack.options.url}/readyz").status_code == 200)
    assert pid_of(yard, number) == pid
    assert_ran_once_with_every_byte(yard, number)


def test_a_submit_while_the_broker_is_down_is_kept(yard: Yard) -> None:
    pid = yard.service("valkey").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    number = yard.submit("echo kept")
    job = yard.ended(number, timeout_s=60)
    assert job["state"] == "succeeded" and yard.log(number) == b"kept\n"


def test_garbage_on_the_nodes_queue_harms_no_job(yard: Yard) -> None:
    number = yard.count_job(LINES, 0.05)
    pid = pid_of(yard, number)
    node = yard.stack.options.node
    with yard.broker() as broker:
        for garbage in (b"\x00\xff not json", b"{}", b"[]", b'{"body": "x", "headers": {"task": "os.system"}}'):
            broker.lpush(f"q.{{{node}}}", garbage)
            broker.xadd(f"up.{{{node}}}", {b"m": garbage})
    assert pid_of(yard, number) == pid
    assert_ran_once_with_every_byte(yard, number)


def test_the_shim_is_killed(yard: Yard) -> None:
    """Nothing is left to tell how the job ends: it is ended, said to be lost, and not blamed on its owner."""
    number = yard.count_job(2000, 0.05)
    pid_of(yard, number)
    shim = next(p for p in psutil.process_iter() if is_shim(p, yard.job(number)["attempts"][0]["id"]))
    shim.kill()
    job = yard.ended(number)
    assert job["state"] == "failed" and job["attempts"][0]["state"] == "lost"
    assert not yard.processes(number)


def is_shim(process: object, attempt: str) -> bool:
    try:
        words = " ".join(process.cmdline())  # type: ignore[attr-defined]
    except Exception:
        return False
    return "shim" in words and attempt in words
