"""The nodes of `bench.ingest`: each signs and sends its readings once a second, all of them spread over the second."""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import redis

from wire.names import upstream_key
from wire.reports import GpuProcess, GpuReading, Heartbeat, Telemetry
from wire.signing import Action, Signer

SHARES = 50  # of a second: so many times a second, a share of the nodes sends
HEARTBEAT_EVERY_S = 5


class PlayedNode:
    def __init__(self, number: int, known: dict[str, Any]) -> None:
        self.number = number
        self.stream = upstream_key(known["name"])
        self._signer = Signer(bytes.fromhex(known["key"]), known["name"])
        self._gpus: list[str] = known["gpus"]
        self._processes = [
            [GpuProcess(pid=1000 + index, memory_used_bytes=60 << 30, user="bench", command="python train.py",
                        attempt=known["attempt"], start_time=1.7e9)]
            for index in range(len(self._gpus))
        ]  # fmt: skip
        self._sent = 0

    def seal(self, report: Telemetry | Heartbeat) -> bytes:
        self._sent += 1
        return self._signer.seal(report, audience="portal", action=Action.REPORT, epoch=self._sent)

    def telemetry(self) -> Telemetry:
        at = time.time()
        return Telemetry(boot_id="bench", readings=[self._reading(index, at) for index in range(len(self._gpus))])

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(boot_id="bench", nonce=str(self._sent), serial=0, at=time.time(), started_at=1.7e9)

    def _reading(self, index: int, at: float) -> GpuReading:
        use = random.randint(80, 100)
        return GpuReading(
            uuid=self._gpus[index], at=at, utilization_percent=use, memory_used_bytes=(60 << 30) + use,
            memory_total_bytes=80 << 30, power_mw=6500 * use, temperature_c=60 + use % 7, sm_clock_mhz=1980,
            memory_clock_mhz=2619, energy_mj=int(at * 650_000), throttle_reasons=0, memory_reserved_bytes=600 << 20,
            memory_utilization_percent=use / 2, memory_temperature_c=70, performance_state=0, power_limit_mw=700_000,
            pcie_received_bytes_per_s=1e9 + use, pcie_transmitted_bytes_per_s=2e9 + use, pcie_replays=0,
            nvlink_received_bytes_per_s=1e11 + use, nvlink_transmitted_bytes_per_s=1e11 + use, ecc_corrected=0,
            ecc_uncorrected=0, processes=self._processes[index],
        )  # fmt: skip


def main() -> int:
    home, seconds, heartbeats = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "1"
    nodes = [PlayedNode(*pair) for pair in enumerate(json.loads((home / "fleet.json").read_text()))]
    client = redis.Redis.from_url(os.environ["REDIS_URL"])
    begun, samples, late_s = time.monotonic(), 0, 0.0
    for tick in range(int(seconds * SHARES)):
        ahead_s = begun + tick / SHARES - time.monotonic()
        late_s = max(late_s, -ahead_s)
        time.sleep(max(0.0, ahead_s))
        share = nodes[tick % SHARES :: SHARES]
        with client.pipeline(transaction=False) as pipeline:
            for node in share:
                telemetry = node.telemetry()
                samples += len(telemetry.readings)
                pipeline.xadd(node.stream, {b"m": node.seal(telemetry)})
                if heartbeats and (tick // SHARES + node.number) % HEARTBEAT_EVERY_S == 0:
                    pipeline.xadd(node.stream, {b"m": node.seal(node.heartbeat())})
            pipeline.execute()
    print(json.dumps({"samples": samples, "late_ms_max": round(1000 * late_s)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
