"""`python -m bench.ingest --nodes 1000 --gpus 8 --seconds 30`: what taking in a fleet's telemetry costs.

A PostgreSQL and a Valkey of its own, the real `manage.py ingest`, and a process that plays the nodes: every node signs
and sends its readings once a second. All GPUs are held by jobs, as in a busy cluster. `lag_ms` is from the moment of a
reading to the moment at which its row was written; `cpu_percent` is of one core, the ingest process alone, signature
checks included. Rolling up is the control worker's; `rollup_cpu_percent` is what it would take of a core.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import psycopg
import redis

from allinone.postgres import Postgres
from allinone.valkey import Valkey

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 120.0
# When a row was written, by the database's own clock; the portal knows nothing of this column.
STAMP = "ALTER TABLE portal_sampleblock ADD COLUMN written_at float8 DEFAULT extract(epoch FROM clock_timestamp())"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ingest", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--seconds", type=float, default=30.0, help="of telemetry")
    parser.add_argument("--heartbeats", action="store_true", help="each node also sends one every five seconds")
    parser.add_argument("--profile", help="where py-spy lays its samples of the ingest process")
    wanted = parser.parse_args()
    with servers() as home:
        run("manage.py", "migrate", "-v", "0")
        run("-m", "bench.ingest_fleet", "make", str(home), str(wanted.nodes), str(wanted.gpus))
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database:
            database.execute(STAMP)
            print(json.dumps(measured(home, wanted, database)))
    return 0


@contextmanager
def servers() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="gpuyard-bench-"))
    home.chmod(0o711)
    postgres, valkey = Postgres(home / "pg"), Valkey(home / "valkey", durable=False)
    try:
        os.environ["DATABASE_URL"], os.environ["REDIS_URL"] = postgres.start(), valkey.start()
        os.environ["GPUYARD_STATE_DIR"] = str(home / "state")
        yield home
    finally:
        valkey.stop()
        postgres.stop()
        shutil.rmtree(home, ignore_errors=True)


def run(*words: str) -> str:
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def process(*words: str) -> Iterator[psutil.Popen]:
    child = psutil.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


def measured(home: Path, wanted: argparse.Namespace, database: psycopg.Connection[Any]) -> dict[str, object]:
    seconds = wanted.seconds
    with process("manage.py", "ingest") as ingest:
        ingest.stdout.readline()  # it is running
        before = cpu_s(ingest)
        played = ("-m", "bench.ingest_load", str(home), str(seconds), "1" if wanted.heartbeats else "0")
        with process(*played) as load, profiled(ingest.pid, wanted.profile, seconds):
            sent = json.loads(load.stdout.readline())
        wait_until_taken()
        used_s = cpu_s(ingest) - before  # until all is taken in: what is put off is not saved
    found = stored(database)
    return {
        "bench": "ingest", "nodes": wanted.nodes, "gpus": wanted.gpus, "seconds": seconds,
        "lag_ms_p50": found["p50"], "lag_ms_p99": found["p99"],
        "cpu_percent": round(100 * used_s / seconds, 1),
        "rows_per_s": round(found["rows"] / seconds, 1), "samples_per_s": round(sent["samples"] / seconds, 1),
        "lost": sent["samples"] - found["samples"], "sent_late_ms_max": sent["late_ms_max"],
        "heartbeats": wanted.heartbeats,
        "rollup_cpu_percent": json.loads(run("-m", "bench.ingest_fleet", "roll-up", str(wanted.nodes)))["cpu_percent"],
        "cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2),
    }  # fmt: skip


@contextmanager
def profiled(pid: int, file: str | None, seconds: float) -> Iterator[None]:
    if not file:
        yield
        return
    spy = str(Path(sys.executable).with_name("py-spy"))
    how = ["record", "--pid", str(pid), "--duration", str(int(seconds)), "-f", "raw", "-o", file, "-r", "200"]
    with subprocess.Popen([spy, *how], stdout=subprocess.DEVNULL):
        yield


def cpu_s(ingest: psutil.Popen) -> float:
    times = ingest.cpu_times()
    return float(times.user + times.system)


def wait_until_taken() -> None:
    """Every stream is empty; what is still in memory is written when ingest ends."""
    client = redis.Redis.from_url(os.environ["REDIS_URL"])
    deadline = time.monotonic() + DEADLINE_S
    while any(client.xlen(key) for key in client.scan_iter("up.*", count=2000)):
        if time.monotonic() > deadline:
            raise SystemExit(f"Streams are not empty after {DEADLINE_S:.0f} s: ingest does not keep up.")
        time.sleep(0.1)


def stored(database: psycopg.Connection[Any]) -> dict[str, Any]:
    """Every sample of every row, each with its lag."""
    lags: list[float] = []
    count = 0
    with database.transaction(), database.cursor("blocks") as cursor:
        cursor.execute("SELECT written_at, payload FROM portal_sampleblock")
        for written_at, payload in cursor:
            count += 1
            for rows in msgspec.msgpack.decode(payload).values():
                lags.extend(written_at - row[0] for row in rows)
    lags.sort()
    return {"samples": len(lags), "rows": count} | {
        f"p{part}": round(1000 * lags[min(len(lags) - 1, len(lags) * part // 100)], 1) for part in (50, 99)
    }


if __name__ == "__main__":
    sys.exit(main())
