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
