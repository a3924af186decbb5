"""`python -m bench.latency --jobs 30`: from the HTTP request of a submit to the first line of the job's process.

Starts a portal of its own with a simulated node in a temporary folder, submits one-GPU jobs of the launcher `script`
one after the other while nothing else runs, and compares the time before the request with the time that the job's
process printed. Both come from this machine's clock.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allinone.faults import Fault
from allinone.options import SIMULATED, Options
from allinone.stack import MEMBER, Stack
from allinone.terminal import Terminal
from allinone.valkey import some_free_port
from client.api import ENDED, Client
from client.errors import ClientError

QUIET_S = 0.3  # without a request of ours, so that asking does not slow down what is measured
DEADLINE_S = 30.0
SPEC = {"name": "latency", "launcher": "script", "command": "date +%s.%N", "resources": {"gpus": 1}, "time_limit": "5m"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("--jobs", type=int, default=30, help="how many are measured")
    parser.add_argument("--warm-up", type=int, default=3, help="how many are run before, not measured")
    wanted = parser.parse_args()
    try:
        with portal() as stack, stack.client(MEMBER) as client:
            for _ in range(wanted.warm_up):
                measure(stack, client)
            runs = [measure(stack, client) for _ in range(wanted.jobs)]
    except (Fault, ClientError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(summary(runs)))
    return 0


@contextmanager
def portal() -> Iterator[Stack]:
    home = Path(tempfile.mkdtemp(prefix="gpuyard-bench-"))
    home.chmod(0o711)
    options = Options(state_dir=home / "var", port=some_free_port(), simulate=SIMULATED)
    try:
        with Stack(options, Terminal(sys.stderr)) as stack:
            yield stack
    finally:
        shutil.rmtree(home, ignore_errors=True)


def measure(stack: Stack, client: Client) -> dict[str, float]:
    """-> milliseconds to the answer of the submit, and to the first line of the job's process."""
    sent = time.time()
    job = client.submit(SPEC)
    answered = time.time()
    ended = wait_for_end(stack, client, job["id"])
    if ended["state"] != "succeeded":
        raise Fault(f"Job {job['id']} {ended['state']}: {(ended['reason'] or {}).get('message')}")
    printed = float(first_line(client, job["id"]))
    times = {f"{name}_ms": (ended["times"][f"{name}_s"] or 0.0) * 1000 for name in ("queued", "starting")}
    return {"answer_ms": (answered - sent) * 1000, "start_ms": (printed - sent) * 1000, **times}


def wait_for_end(stack: Stack, client: Client, job_id: int) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        stack.tend()
        time.sleep(QUIET_S)
        job = client.job(job_id)
        if job["state"] in ENDED:
            return job
    raise Fault(f"Job {job_id} has not ended after {DEADLINE_S:.0f} s; it is {client.job(job_id)['state']}.")


def first_line(client: Client, job_id: int) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        piece = client.logs(job_id, rank=0)
        if piece.complete:
            return piece.data.decode().splitlines()[0]
        time.sleep(QUIET_S)
    raise Fault(f"The log of job {job_id} is not whole after {DEADLINE_S:.0f} s.")


def summary(runs: list[dict[str, float]]) -> dict[str, object]:
    starts = sorted(run["start_ms"] for run in runs)
    return {
        "bench": "latency",
        "jobs": len(runs),
        "p50_ms": round(statistics.median(starts), 1),
        "p95_ms": round(starts[min(len(starts) - 1, int(0.95 * len(starts)))], 1),
        "min_ms": round(starts[0], 1),
        "max_ms": round(starts[-1], 1),
        **{f"{name}_p50_ms": median(runs, f"{name}_ms") for name in ("answer", "queued", "starting")},
        "cpus": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def median(runs: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(run[name] for run in runs), 1)


if __name__ == "__main__":
    sys.exit(main())
