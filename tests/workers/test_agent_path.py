"""The way of an order to a process and of its output home: a real worker, a broker with a node's rights, real jobs."""

import sys
from pathlib import Path

from node_harness import MiniPortal, NodeProcess

from wire.states import EndReason

PYTHON = sys.executable


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / f"job{abs(hash(text))}.py"
    path.write_text(text)
    return f"{PYTHON} -u {path}"


def test_a_hinted_job_runs_and_all_of_it_comes_home(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    node.start()
    portal.wait_heartbeat()
    launch = portal.launch(script(tmp_path, "import sys; print('hello'); print('oops', file=sys.stderr); sys.exit(3)"))
    record = portal.wait_complete(launch)
    assert [event.state for event in record.events] == ["starting", "running", "failed"]
    end = record.events[-1]
    assert (end.reason, end.exit_code) == (EndReason.EXIT_CODE, 3)
    assert bytes(record.logs["rank-0"]) == b"hello\noops\n"
    assert record.repeated_bytes == 0 and record.repeated_events == 0


def test_a_flood_comes_home_with_its_middle_cut(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    """32 MB against a cap of 1 MB: what was cut is counted, all the rest is what was written."""
    node.start()
    portal.wait_heartbeat()
    # A quiet stretch in the middle: the shim looks at the size a few times a second.
    flood = (
        "import os, time\n"
        "for n in range(500_000):\n"
        "    if n == 400_000: time.sleep(3)\n"
        "    os.write(1, b'%063d\\n' % n)"
    )
    launch = portal.launch(script(tmp_path, flood), log_cap_bytes=1024 * 1024)
    record = portal.wait_complete(launch, timeout_s=60)
    log = bytes(record.logs["rank-0"])
    assert len(log) == 500_000 * 64 == record.events[-1].log_sizes["rank-0"]
    assert 0 < record.dropped["rank-0"] < len(log)
    present = [number for number in range(500_000) if log[64 * number:64 * number + 64].strip(b"\0")]
    torn = [number for number in present if log[64 * number:64 * number + 64] != b"%063d\n" % number]
    assert present[0] == 0 and present[-1] == 499_999
    assert torn == [], "holes begin and end on whole lines here, since 64 divides a block"


def test_a_job_may_truncate_its_own_log(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    node.start()
    portal.wait_heartbeat()
    gate = tmp_path / "gate"
    text = f"""
import os, time
os.write(1, b"before\\n" * 100)
while not os.path.exists({str(gate)!r}):
    time.sleep(0.01)
os.ftruncate(1, 0)
os.write(1, b"after\\n")
"""
    launch = portal.launch(script(tmp_path, text))
    record = portal.record(launch)
    portal.wait(lambda: len(record.logs.get("rank-0", b"")) == 700)
    gate.touch()
    portal.wait_complete(launch)
    assert bytes(record.logs["rank-0"]) == b"before\n" * 100 + b"after\n"
    assert record.events[-1].state == "succeeded"


def test_many_jobs_at_once_come_home_whole(portal: MiniPortal, node: NodeProcess, tmp_path: Path) -> None:
    node.start()
    portal.wait_heartbeat()
    counter = "import os\nfor n in range(2000):\n    os.write(1, b'%s %d\\n' % (os.environb[b'GPUYARD_JOB_ID'], n))"
    command = script(tmp_path, counter)
    launches = [portal.launch(command) for _ in range(6)]
    for launch in launches:
        log = bytes(portal.wait_complete(launch, timeout_s=60).logs["rank-0"])
        assert log == b"".join(b"%d %d\n" % (launch.job, number) for number in range(2000))
