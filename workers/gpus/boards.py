"""Boards and node topologies of the simulated driver, from boards.json."""

from pathlib import Path

import msgspec

from workers.gpus.base import DriverUnavailable

MIB = 1 << 20


class Board(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: int  # NVML_DEVICE_ARCH_*
    compute_capability: str
    memory_mib: int
    reserved_mib: int
    power_limit_w: int
    idle_power_w: int
    sm_clock_mhz: int
    idle_sm_clock_mhz: int
    memory_clock_mhz: int
    nvlinks: int
    pci_device_id: str
    has_serial: bool
    mig_memory_mib: dict[str, int]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """`matrix` is what people see (NV18, PIX, …), `pcie` the PCIe level beneath it."""

    board: str
    nvswitch: bool
    numa: list[int]
    matrix: list[str]
    pcie: list[str]
    mig: dict[str, list[str]] = {}

    def joined(self, a: int, b: int) -> str:
        return self.matrix[a].split()[b]

    def pcie_level(self, a: int, b: int) -> str:
        return self.pcie[a].split()[b]


class Catalogue(msgspec.Struct, frozen=True):
    boards: dict[str, Board]
    topologies: dict[str, Topology]


CATALOGUE = msgspec.json.decode(Path(__file__).with_name("boards.json").read_bytes(), type=Catalogue)


def topology_named(name: str | None) -> Topology:
    if name not in CATALOGUE.topologies:
        raise DriverUnavailable(
            f"There is no simulated topology {name!r}; choose one of {', '.join(sorted(CATALOGUE.topologies))}."
        )
    return CATALOGUE.topologies[name]
