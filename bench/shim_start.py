"""`python -m bench.shim_start --jobs 30`: from the supervisor's launch to the first line of the job's process.

The node's part of a job's start alone, with no portal and no broker. `ended_p50_ms` is until the end of the job, which
ends at once, is told. Prints one JSON line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

from wire.desired import Launch
from workers.spool import Spool
from workers.supervisor import Supervisor

QUIET_S = 0.2
COMMAND = "date +%s.%N"


class Settings:
    job_path = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shim_start", description=__doc__)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--cgroups", choices=["auto", "v2", "v1", "none"], default="auto")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuyard-bench-") as folder:
        spool = Spool(Path(folder) / "spool")
        supervisor = Supervisor(spool, Settings(), wanted.cgroups)
        measured = [one(spool, supervisor, job) for job in range(wanted.jobs + 1)][1:]
        supervisor.close()
    started = sorted(first for first, _ in measured)
    print(json.dumps({
        "jobs": wanted.jobs, "p50_ms": round(statistics.median(started), 1),
        "p95_ms": round(started[int(len(started) * 0.95)], 1), "min_ms": round(started[0], 1),
        "ended_p50_ms": round(statistics.median(end for _, end in measured), 1),
    }))
    return 0


def one(spool: Spool, supervisor: Supervisor, job: int) -> tuple[float, float]:
    """-> milliseconds to the first line, and to the report of the end."""
    launch = Launch(attempt=str(uuid.uuid4()), job=job, epoch=1, name="bench", user="bench", launcher="script",
                    command=COMMAND)
    time.sleep(QUIET_S)
    asked = time.time()
    supervisor.launch(launch)
    while supervisor.active():
        supervisor.wait(0.5)
        supervisor.poll()
    ended = time.time()
    directory = spool.find(launch.attempt)
    if directory is None:
        raise RuntimeError("the attempt has no directory")
    return (float(directory.log_path("rank-0").read_text()) - asked) * 1000, (ended - asked) * 1000


if __name__ == "__main__":
    sys.exit(main())
