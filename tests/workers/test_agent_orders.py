"""What a node takes orders from: only what its own portal signed, for it, now, and not older than what it knows."""

import base64
import json
import time
from pathlib import Path

import pytest
from node_harness import MiniPortal, NodeProcess, wait_until

from wire import names, signing
from wire.desired import HintBody, Launch
from wire.signing import Action, Signer


def ready(portal: MiniPortal, node: NodeProcess) -> None:
    node.start()
    portal.wait_heartbeat()


def codes(portal: MiniPortal) -> set[str]:
    return {report.code for report in portal.rejected}


def touching(tmp_path: Path) -> tuple[str, Path]:
    """A command that leaves a trace if it ever runs."""
    trace = tmp_path / "it-ran"
    return f"/usr/bin/touch {trace}", trace


def forged(portal: MiniPortal, launch: Launch) -> object:
    desired = portal.desired()
    desired.launches.append(launch)
    desired.serial += 1
    return desired


def a_launch(command: str) -> Launch:
    return Launch(attempt="f0f0", job=77, epoch=1, name="n", user="mallory", launcher="script", command=command)


@pytest.mark.parametrize(("code", "sender", "audience", "action", "age_s"), [
    ("bad_signature", "stranger", "node1", Action.DESIRED, 0),
    ("wrong_audience", "portal", "node2", Action.DESIRED, 0),
    ("wrong_action", "portal", "node1", Action.HINT, 0),
    ("expired", "portal", "node1", Action.DESIRED, 300),
    ("clock_skew", "portal", "node1", Action.DESIRED, -300),
])
def test_an_order_that_is_not_in_order_starts_nothing_and_is_reported(
        portal: MiniPortal, node: NodeProcess, tmp_path: Path, code: str, sender: str, audience: str, action: Action,
        age_s: float) -> None:
    ready(portal, node)
    command, trace = touching(tmp_path)
    key = portal.private_key if sender == "portal" else signing.new_private_key()
    signer = Signer(key, names.PORTAL, clock=lambda: time.time() - age_s)
    sealed = portal.seal(forged(portal, a_launch(command)), action, audience=audience, signer=signer)

    def put_until_reported() -> bool:  # the portal's own order takes its place time and again
        portal.put(sealed)
        portal.hint()
        return code in codes(portal)

    wait_until(put_until_reported, what=f"{code} reported: {portal.describe()}")
    portal.wait_complete(portal.launch("/bin/echo a good order is still taken"))
    assert not trace.exists() and "f0f0" not in portal.records


def test_an_old_order_is_refused_also_after_a_restart(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    command, trace = touching(tmp_path)
    portal.serial = 5
    ready(portal, node)
    recorder = Signer(portal.private_key, names.PORTAL, clock=lambda: time.time() - 30)
    old = portal.seal(forged(portal, a_launch(command)), Action.DESIRED, signer=recorder)  # serial 6
    portal.serial = 9
    portal.wait_complete(portal.launch("/bin/echo newer"))
    node.kill()
    node.start()
    portal.wait_heartbeat()
    portal.pause()
    portal.put(old)
    portal.hint()
    wait_until(lambda: "stale_serial" in node.log, what="the refusal in the worker's log")
    portal.resume()
    portal.wait(lambda: "stale_serial" in codes(portal))
    assert not trace.exists()


def test_hints_are_checked_and_taken_once(portal: MiniPortal, node: NodeProcess) -> None:
    ready(portal, node)
    sealed = base64.b64encode(portal.seal(HintBody(serial=0), Action.HINT)).decode()
    portal.push_task(sealed)
    portal.push_task(sealed)
    portal.wait(lambda: "replayed" in codes(portal))
    stranger = Signer(signing.new_private_key(), names.PORTAL)
    portal.push_task(base64.b64encode(portal.seal(HintBody(serial=0), Action.HINT, signer=stranger)).decode())
    portal.wait(lambda: "bad_signature" in codes(portal))
    portal.push_task("§ not base64")
    portal.wait(lambda: "malformed" in codes(portal))
    portal.wait_complete(portal.launch("/bin/echo fine"))


def test_a_flood_of_bad_hints_is_reported_once(portal: MiniPortal, node: NodeProcess) -> None:
    ready(portal, node)
    for _ in range(50):
        portal.push_task("AAAA")
    portal.wait(lambda: not portal.client.llen(names.hint_queue(portal.node)))
    portal.wait_complete(portal.launch("/bin/echo fine"))
    assert [report.code for report in portal.rejected].count("malformed") == 1


def test_a_task_of_another_name_is_not_run(portal: MiniPortal, node: NodeProcess) -> None:
    ready(portal, node)
    portal.push_task("x", task="celery.backend_cleanup")
    portal.push_task("x", task="os.system")
    portal.wait_complete(portal.launch("/bin/echo fine"))
    assert node.process is not None and node.process.poll() is None


@pytest.mark.parametrize("garbage", [
    b"\x80\x04garbage that is not JSON", b"{}", b"[" * 1000, b"x" * 1_000_000,
    json.dumps({"body": "?", "headers": {}}).encode(),
])
def test_garbage_on_the_queue_touches_no_job(portal: MiniPortal, node: NodeProcess, garbage: bytes) -> None:
    ready(portal, node)
    launch = portal.launch("/bin/sleep 60")
    record = portal.wait_state(launch, "running")
    portal.push_raw(garbage)
    wait_until(lambda: not portal.client.llen(names.hint_queue(portal.node)), what="the garbage is gone")
    portal.hint()  # taken only after the garbage was dealt with, if the worker lives
    worker = node.process
    assert worker is not None
    wait_until(lambda: worker.poll() is not None or not portal.client.llen(names.hint_queue(portal.node)))
    pid = record.events[-1].pid
    assert pid is not None and Path(f"/proc/{pid}").exists()
    if worker.poll() is not None:  # the worker may die of it; whoever supervises it starts it again
        node.start()
    portal.wait_heartbeat()
    portal.stop(launch, grace_s=0.5)
    portal.wait_state(launch, "stopped")
    assert len([event for event in record.events if event.state == "running"]) == 1


def test_a_second_worker_on_the_same_state_says_so_and_leaves(portal: MiniPortal, node: NodeProcess) -> None:
    ready(portal, node)
    first = node.process
    second = node.start()
    assert second.wait(20) == 69
    assert "another worker already runs with the state directory" in node.log
    node.process = first
    portal.wait_heartbeat()


def test_a_wrong_setting_stops_the_start_with_one_sentence(portal: MiniPortal, node: NodeProcess) -> None:
    node.config.write_text(node.config.read_text().replace("redis://", "carrier-pigeon://"))
    assert node.start().wait(20) == 78
    assert node.log.strip().splitlines() == ["node worker: broker_url must begin with redis://, rediss:// or unix://"]


def test_the_worker_never_tries_what_a_node_may_not(portal: MiniPortal, node: NodeProcess) -> None:
    portal.client.execute_command("ACL", "LOG", "RESET")
    ready(portal, node)
    portal.wait_complete(portal.launch("/bin/echo fine"))
    assert node.terminate() == 0
    assert portal.client.execute_command("ACL", "LOG") == []


def test_no_secret_of_the_node_reaches_a_job(portal: MiniPortal, node: NodeProcess) -> None:
    ready(portal, node)
    launch = portal.launch("/usr/bin/env")
    log = bytes(portal.wait_complete(launch).logs["rank-0"]).decode()
    assert "GPUYARD_ATTEMPT_ID=" in log
    assert "passw0rd" not in log and "redis" not in log and "GPUYARD_NODE_CONFIG" not in log


def test_the_broker_is_in_no_command_line_and_no_environment(portal: MiniPortal, node: NodeProcess) -> None:
    ready(portal, node)
    assert node.process is not None
    proc = Path(f"/proc/{node.process.pid}")
    shown = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
    assert b"workers.app" in shown and b"redis" not in shown
