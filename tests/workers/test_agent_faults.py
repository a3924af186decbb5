"""What may fail while jobs run: the hint, the broker, the worker itself. No byte is lost, nothing starts twice."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import MiniPortal, NodeProcess, wait_until

from allinone.valkey import Valkey
from wire.desired import Launch

COUNTER = """
import sys, time
for number in range(int(sys.argv[1])):
    print(f"line {number:06d}")
    time.sleep(0.01)
"""


def counting(tmp_path: Path, lines: int) -> str:
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    return f"{sys.executable} -u {path} {lines}"


def lines(count: int) -> bytes:
    return b"".join(b"line %06d\n" % number for number in range(count))


def started(portal: MiniPortal, node: NodeProcess, command: str) -> Launch:
    node.start()
    portal.wait_heartbeat()
    launch = portal.launch(command)
    portal.wait_state(launch, "running")
    return launch


def log_reaches(portal: MiniPortal, launch: Launch, size: int) -> None:
    record = portal.record(launch)
    portal.wait(lambda: len(record.logs.get("rank-0", b"")) >= size)


def pid_of(portal: MiniPortal, launch: Launch) -> int:
    pids = {event.pid for event in portal.record(launch).events if event.pid}
    assert len(pids) == 1
    return pids.pop()


def states(portal: MiniPortal, launch: Launch) -> list[str]:
    return [event.state.value for event in portal.record(launch).events]


def test_a_lost_hint_costs_no_more_than_the_interval(portal: MiniPortal, node: NodeProcess) -> None:
    node.start()
    portal.wait_heartbeat()
    portal.wait_complete(portal.launch("/bin/echo unhinted", hint=False), timeout_s=6)


def test_a_stop_ends_the_run(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    launch = started(portal, node, counting(tmp_path, 100_000))
    pid = pid_of(portal, launch)
    portal.stop(launch)
    portal.wait_state(launch, "stopped")
    assert not Path(f"/proc/{pid}").exists()


def test_a_job_that_leaves_the_order_goes_on(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    launch = started(portal, node, counting(tmp_path, 300))
    with portal.changed:
        portal.launches.clear()
        portal.serial += 1
        portal.publish()
    portal.hint()
    assert bytes(portal.wait_complete(launch).logs["rank-0"]) == lines(300)


def test_a_flushed_broker_loses_nothing(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    launch = started(portal, node, counting(tmp_path, 500))
    for size in (500, 2500):
        log_reaches(portal, launch, size)
        portal.pause()  # so that there is something to lose
        wait_until(lambda: portal.unread() >= 3, what="reports that nobody read")
        portal.client.flushall()
        portal.resume()
    record = portal.wait_complete(launch, timeout_s=40)
    assert bytes(record.logs["rank-0"]) == lines(500)
    assert states(portal, launch) == ["starting", "running", "succeeded"]


def test_an_ingest_that_is_down_finds_everything_when_it_is_back(portal: MiniPortal, node: NodeProcess,
                                                                 tmp_path: Path) -> None:
    launch = started(portal, node, counting(tmp_path, 200))
    portal.pause()
    wait_until(lambda: not Path(f"/proc/{pid_of(portal, launch)}").exists(), what="the job's end")
    portal.resume()
    record = portal.wait_complete(launch)
    assert bytes(record.logs["rank-0"]) == lines(200)
    assert record.repeated_bytes == 0, "nobody said that anything was lost"


def test_a_killed_worker_finds_its_job_again(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    launch = started(portal, node, counting(tmp_path, 600))
    pid = pid_of(portal, launch)
    for size in (1000, 3000):
        log_reaches(portal, launch, size)
        node.kill()
        assert Path(f"/proc/{pid}").exists()
        node.start()
        portal.hint()
    record = portal.wait_complete(launch, timeout_s=40)
    assert bytes(record.logs["rank-0"]) == lines(600)
    assert states(portal, launch) == ["starting", "running", "succeeded"]
    assert pid_of(portal, launch) == pid


def test_a_job_that_ends_while_the_worker_is_away_is_reported_as_it_was(portal: MiniPortal, node: NodeProcess,
                                                                        tmp_path: Path) -> None:
    launch = started(portal, node, counting(tmp_path, 100))
    pid = pid_of(portal, launch)
    node.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the job's end")
    node.start()
    record = portal.wait_complete(launch)
    assert bytes(record.logs["rank-0"]) == lines(100)
    assert states(portal, launch)[-1] == "succeeded" and record.events[-1].exit_code == 0


def test_a_worker_that_is_asked_to_end_does_so_at_once_and_leaves_its_jobs(portal: MiniPortal, node: NodeProcess,
                                                                           tmp_path: Path) -> None:
    launch = started(portal, node, counting(tmp_path, 400))
    began = time.monotonic()
    assert node.terminate() == 0
    assert time.monotonic() - began < 5
    assert Path(f"/proc/{pid_of(portal, launch)}").exists()
    node.start()
    assert bytes(portal.wait_complete(launch).logs["rank-0"]) == lines(400)


def test_what_the_portal_has_is_forgotten_here(portal: MiniPortal, node: NodeProcess) -> None:
    node.start()
    portal.wait_heartbeat()
    launch = portal.launch("/bin/echo done")
    portal.wait_complete(launch)
    spool = node.state_dir / "spool" / launch.attempt
    portal.wait(lambda: launch.attempt in portal.heartbeats[-1].attempts)
    with portal.changed:
        portal.launches.clear()
        portal.forget.append(launch.attempt)
        portal.serial += 1
        portal.publish()
    portal.hint()
    wait_until(lambda: not spool.exists(), what="the spool is gone")
    portal.wait(lambda: launch.attempt not in portal.heartbeats[-1].attempts)


def test_the_node_reports_what_it_has_and_again_when_the_portal_forgot(portal: MiniPortal, node: NodeProcess) -> None:
    node.start()
    portal.wait(lambda: portal.inventories and portal.readings >= 8)
    inventory = portal.inventories[-1]
    assert len(inventory.gpus) == 8 and inventory.simulated
    count = len(portal.inventories)
    with portal.changed:
        portal.digest = "of something else"
        portal.publish()
    portal.wait(lambda: len(portal.inventories) > count)
    assert portal.inventories[-1].digest == inventory.digest


def test_a_deaf_worker_leaves_to_be_started_anew_but_not_for_ever(portal: MiniPortal, node: NodeProcess) -> None:
    node.env["GPUYARD_NODE_DEAF_AFTER_S"] = "2"
    launch = started(portal, node, "/bin/sleep 60")
    portal.pause()  # heartbeats go out and none comes back
    assert node.process is not None
    assert node.process.wait(20) == 75
    portal.resume()
    second = node.start()
    portal.wait_heartbeat()
    portal.wait_heartbeat()
    portal.pause()
    wait_until(lambda: portal.unread() >= 10, 20, "heartbeats that nobody hears")
    assert second.poll() is None, "one restart in five minutes"
    assert Path(f"/proc/{pid_of(portal, launch)}").exists()


Lone = tuple[MiniPortal, NodeProcess]


class Broker:
    """A broker of the test's own, to be stopped."""

    def __init__(self, home: Path) -> None:
        self.server = Valkey(home / "valkey", durable=False)
        self.url = self.server.start()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    yield broker
    broker.server.stop()


@pytest.fixture
def lone(tmp_path: Path, broker: Broker) -> Iterator[Lone]:
    portal = MiniPortal(broker.url)
    node = NodeProcess(tmp_path, portal, broker.url)
    portal.meet(node.public_key)
    yield portal, node
    portal.close()
    node.leave_nothing()


def test_a_broker_that_is_away_stops_no_job(broker: Broker, lone: Lone, tmp_path: Path) -> None:
    portal, node = lone
    launch = started(portal, node, counting(tmp_path, 300))
    log_reaches(portal, launch, 500)
    broker.server.stop()
    wait_until(lambda: not Path(f"/proc/{pid_of(portal, launch)}").exists(), what="the job's end")
    assert node.process is not None and node.process.poll() is None
    broker.server.start()  # empty
    record = portal.wait_complete(launch, timeout_s=40)
    assert bytes(record.logs["rank-0"]) == lines(300)
    assert states(portal, launch) == ["starting", "running", "succeeded"]


def test_a_worker_starts_without_its_broker_and_looks_after_its_jobs(broker: Broker, lone: Lone,
                                                                     tmp_path: Path) -> None:
    portal, node = lone
    launch = started(portal, node, counting(tmp_path, 100))
    node.kill()
    broker.server.stop()
    node.start()
    events = node.state_dir / "spool" / launch.attempt / "events.jsonl"
    wait_until(lambda: b'"succeeded"' in events.read_bytes(), what="the end is noted without the broker")
    broker.server.start()
    assert bytes(portal.wait_complete(launch, timeout_s=40).logs["rank-0"]) == lines(100)


def test_a_worker_without_its_broker_ends_when_it_is_asked(broker: Broker, lone: Lone) -> None:
    _, node = lone
    broker.server.stop()
    node.start()
    wait_until(lambda: "Cannot connect" in node.log, what="a failed connection")
    began = time.monotonic()
    assert node.terminate() == 0
    assert time.monotonic() - began < 5
