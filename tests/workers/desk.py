"""A simulated node for the tests of drivers: its clock, processes and faults are set by the test."""

from collections.abc import Callable, Iterator

import pytest

from wire.hardware import GpuHardware
from wire.reports import GpuReading
from workers.gpus import GpuList, nvml, simulated
from workers.gpus.boards import CATALOGUE
from workers.gpus.faults import Faults
from workers.gpus.holders import Holder
from workers.gpus.machine import Machine
from workers.gpus.nvml_processes import Pids
from workers.gpus.procfs import Stat

GIB = 1 << 30


class SetDesk:
    def __init__(self, topology: str, script: str = "") -> None:
        self.faults, self.holders, self.now = Faults(), list[Holder](), 1000.0
        self.gone = set[int]()  # pids that /proc does not have
        self.machine = Machine(CATALOGUE.topologies[topology], "desk", clock=lambda: self.now, scan=self.scan)
        self.library = simulated.install(topology, "desk", lambda: self.faults, self.machine, script)
        self.driver = nvml.NvmlDriver(clock=lambda: self.now, pids=Pids(1 << 22, lambda pid: pid not in self.gone))
        self.driver.start()
        self.gpus: GpuList = self.driver.enumerate()

    def scan(self, _uuids: frozenset[str]) -> list[Holder]:
        return self.holders

    def uuid(self, index: int) -> str:
        return self.machine.gpus[index].uuid

    def hold(self, *holders: Holder, after_s: float = 1.0) -> None:
        self.holders = list(holders)
        self.now += after_s

    def reading(self, uuid: str) -> GpuReading:
        return next(reading for reading in self.driver.read() if reading.uuid == uuid)

    def hardware(self, index: int) -> GpuHardware:
        return next(found for found in self.driver.hardware() if found.uuid == self.uuid(index))


def holder(pid: int, *uuids: str, cpu_ticks: int = 0, team: str = "") -> Holder:
    return Holder(pid, uuids, Stat(parent=1, start_ticks=5, cpu_ticks=cpu_ticks, resident_bytes=GIB), team)


Make = Callable[..., SetDesk]


@pytest.fixture
def make_desk() -> Iterator[Make]:
    yield SetDesk
    simulated.uninstall()
