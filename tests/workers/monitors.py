"""Runs a monitor on a simulated node in a process of its own, as it patches the binding for everybody: `monitors.py
MONITOR TOPOLOGY PID [SCRIPT]` prints what our driver reads and what the monitor shows, as JSON."""

import importlib
import json
import sys
from io import StringIO
from typing import Any

from workers.gpus import nvml, procfs, simulated
from workers.gpus.boards import CATALOGUE
from workers.gpus.holders import Holder
from workers.gpus.machine import Machine
from workers.gpus.procfs import Stat

NOW = 100.0
BUSY = 0.5


class StandingNode:
    """Its clock stands still, so that two who look at it one after the other see the same."""

    def __init__(self, topology: str, pid: int, script: str) -> None:
        self.machine = Machine(CATALOGUE.topologies[topology], "monitored", clock=lambda: NOW, scan=self.scan)
        self._pid = pid
        simulated.install(topology, "monitored", machine=self.machine, script=script)

    def scan(self, _uuids: frozenset[str]) -> list[Holder]:
        """One process on GPU 1, or on its first slice, that has kept half a core busy since the boot."""
        gpu = self.machine.gpus[1]
        uuid = gpu.slices[0].uuid if gpu.slices else gpu.uuid
        ticks = round(BUSY * procfs.uptime_s() * procfs.CLOCK_TICKS)
        return [Holder(self._pid, (uuid,), Stat(1, 0, ticks, 1 << 30))]


def ours() -> list[dict[str, Any]]:
    driver = nvml.NvmlDriver()
    driver.start()
    infos = {info.uuid: info for info in driver.enumerate().infos}
    return [
        {
            "uuid": reading.uuid, "name": infos[reading.uuid].name, "bus_id": infos[reading.uuid].pci_bus_id,
            "parent": infos[reading.uuid].parent_uuid,
            "power_limit": infos[reading.uuid].power_limit_mw, "memory_used": reading.memory_used_bytes,
            "memory_total": reading.memory_total_bytes, "temperature": reading.temperature_c,
            "utilization": reading.utilization_percent, "power": reading.power_mw, "sm_clock": reading.sm_clock_mhz,
            "memory_clock": reading.memory_clock_mhz, "fan": reading.fan_percent,
            "pids": [process.pid for process in reading.processes or []],
        }
        for reading in driver.read() if reading.uuid in infos
    ]


def nvitop() -> list[dict[str, Any]]:
    def shown(device: Any) -> dict[str, Any]:
        return {
            "uuid": device.uuid(), "name": device.name(), "bus_id": number(device.bus_id()),
            "power_limit": number(device.power_limit()), "memory_used": number(device.memory_used()),
            "memory_total": number(device.memory_total()), "temperature": number(device.temperature()),
            "utilization": number(device.gpu_utilization()), "power": number(device.power_usage()),
            "sm_clock": number(device.sm_clock()), "memory_clock": number(device.memory_clock()),
            "fan": number(device.fan_speed()), "pids": sorted(device.processes()),
        }

    devices = importlib.import_module("nvitop").Device.all()
    return [shown(one) for device in devices for one in (device, *device.mig_devices())]


def gpustat() -> dict[str, Any]:
    found = importlib.import_module("gpustat").GPUStatCollection.new_query()
    text, data = StringIO(), StringIO()
    found.print_formatted(text, no_color=True, show_pid=True, show_power=True)
    found.print_json(data)
    return {"text": text.getvalue(), **json.loads(data.getvalue())}


def number(value: Any) -> Any:
    return None if str(value) == "N/A" else value


def main() -> None:
    monitor, topology, pid, *script = sys.argv[1:]
    StandingNode(topology, int(pid), *script or [""])
    found = {"ours": ours()}  # first: from then on the binding is another
    found["theirs"] = {"nvitop": nvitop, "gpustat": gpustat}[monitor]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
