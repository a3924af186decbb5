"""A simulated AMD node on a desk: its clock, processes and faults are the test's."""

from collections.abc import Callable, Iterator

import pytest

from wire.hardware import GpuHardware
from wire.reports import GpuReading
from workers.gpus import GpuList, simulated_amd
from workers.gpus.amd_boards import AMD_CATALOGUE
from workers.gpus.amdsmi import AmdSmiDriver
from workers.gpus.faults import Faults
from workers.gpus.holders import Holder
from workers.gpus.procfs import Stat
from workers.gpus.simulated_amd_machine import AmdMachine

MIB, GIB = 1 << 20, 1 << 30
ALWAYS_MISSING = {
    "memory_reserved_bytes", "encoder_percent", "decoder_percent", "performance_state", "pcie_received_bytes_per_s",
    "pcie_transmitted_bytes_per_s", "fan_percent"}


class Desk:
    """A simulated node whose clock, processes and faults the test sets."""

    def __init__(self, topology: str, script: str = "") -> None:
        self.faults, self.holders, self.now = Faults(), list[Holder](), 1000.0
        facts = AMD_CATALOGUE.topologies[topology]
        self.machine = AmdMachine(facts, "desk", clock=lambda: self.now, scan=lambda uuids: self.holders)
        self.library = simulated_amd.install(topology, "desk", lambda: self.faults, self.machine, script)
        self.driver = AmdSmiDriver(clock=lambda: self.now)

    def hold(self, *holders: Holder, after_s: float = 1.0) -> None:
        """These processes are there from now on, as is seen by the next scan."""
        self.holders = list(holders)
        self.now += after_s

    def listed(self) -> GpuList:
        self.driver.start()
        return self.driver.enumerate()

    def reading(self, index: int) -> GpuReading:
        return self.driver.read()[index]

    def hardware(self, index: int) -> GpuHardware:
        return self.driver.hardware()[index]


def holder(pid: int, *uuids: str, cpu_ticks: int = 0, resident: int = GIB, team: str = "job") -> Holder:
    return Holder(pid, uuids, Stat(parent=1, start_ticks=5, cpu_ticks=cpu_ticks, resident_bytes=resident), team)


@pytest.fixture
def desk() -> Iterator[Callable[[str], Desk]]:
    yield Desk
    simulated_amd.uninstall()
