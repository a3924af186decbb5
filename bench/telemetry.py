"""`python -m bench.telemetry --gpus 8 --seconds 30`: what reading the GPUs of a simulated node costs.

`cpu_percent` is of one core, for the reading process and its children; the simulator's own work is in it. A tick is one
look at every GPU. Prints one JSON line.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import psutil

from workers.telemetry import Reader

TOPOLOGIES = {2: "A100-2-MIG", 4: "HGX-H100-4", 8: "DGX-H100-8", 16: "V100-DGX2-16"}
START_WITHIN_S = 30.0
SETTLE_TICKS = 2
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.telemetry", description=__doc__)
    parser.add_argument("--gpus", type=int, choices=sorted(TOPOLOGIES), default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one tick to the next")
    wanted = parser.parse_args()
    reader = Reader("simulated", TOPOLOGIES[wanted.gpus], "bench", interval_s=wanted.interval)
    reader.start()
    try:
        print(json.dumps(measured(reader, wanted.gpus, wanted.seconds)))
    finally:
        reader.stop()
    return 0


def measured(reader: Reader, gpus: int, seconds: float) -> dict[str, object]:
    wait_for(lambda: len(reader.ticks_s) >= SETTLE_TICKS)
    if reader.pid is None:
        raise RuntimeError(f"the reader does not run: {reader.status}")
    reader.ticks_s.clear()
    process = psutil.Process(reader.pid)
    used_s, began = cpu_seconds(process), time.monotonic()
    time.sleep(seconds)
    used_s, elapsed_s = cpu_seconds(process) - used_s, time.monotonic() - began
    ticks = sorted(reader.ticks_s)
    return {
        "bench": "telemetry", "gpus": gpus, "seconds": round(elapsed_s, 1),
        "cpu_percent": round(100 * used_s / elapsed_s, 2),
        "tick_ms_p50": round(1000 * statistics.median(ticks), 2),
        "tick_ms_p95": round(1000 * ticks[int(len(ticks) * 0.95)], 2),
        "ticks": len(ticks), "rss_mb": round(process.memory_info().rss / MIB, 1),
    }


def cpu_seconds(process: psutil.Process) -> float:
    times = [one.cpu_times() for one in [process, *process.children(recursive=True)]]
    return float(sum(one.user + one.system for one in times))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the reader has not read anything")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
