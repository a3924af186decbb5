"""Boards, MIG tables and node topologies of the simulated driver, from boards.json."""

from pathlib import Path

import msgspec

from workers.gpus.base import DriverUnavailable

MIB = 1 << 20

PCIE_GBYTES_PER_S = {1: 4.0, 2: 8.0, 3: 15.75, 4: 31.5, 5: 63.0, 6: 121.0}
"""Of sixteen lanes in one direction, by generation."""


class Board(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: int  # NVML_DEVICE_ARCH_*
    compute_capability: str
    memory_mib: int
    reserved_mib: int
    power_limit_w: int
    power_min_w: int
    power_max_w: int
    idle_power_w: int
    sm_clock_mhz: int
    idle_sm_clock_mhz: int
    memory_clock_mhz: int
    slowdown_c: int
    shutdown_c: int
    multiprocessors: int
    nvlinks: int
    nvlink_version: int | None
    nvlink_gbytes_per_s: int  # of one link in one direction
    pcie_generation: int
    pcie_width: int
    pci_device_id: str
    has_serial: bool
    has_ecc: bool
    has_memory_sensor: bool
    fans: int
    mig: str | None  # its table


class MigProfile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    constant: int  # NVML_GPU_INSTANCE_PROFILE_*
    id: int
    slices: int
    instances_max: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    jpeg: int
    ofa: int
    size: int
    starts: list[int]


class MigTable(msgspec.Struct, frozen=True, kw_only=True):
    slices: int
    memory_slots: int
    profiles: list[MigProfile]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """`matrix` is what people see (NV18, PIX, …), `pcie` the PCIe level beneath it."""

    board: str
    nvswitch: bool
    numa: list[int]
    matrix: list[str]
    pcie: list[str]
    cpu_affinity: list[str] = []
    virtual: bool = False  # a guest, with a part of a card
    mig: dict[str, list[str]] = {}  # GPU index -> profile@start, as the node is delivered

    def joined(self, a: int, b: int) -> str:
        return self.matrix[a].split()[b]

    def pcie_level(self, a: int, b: int) -> str:
        return self.pcie[a].split()[b]

    def link_ends(self, index: int, links: int) -> list[int | None]:
        """The GPU at the other end of each NVLink of a GPU; itself stands for a switch, None for an open end."""
        if self.nvswitch:
            return [index] * links
        ends: list[int | None] = []
        for peer, kind in enumerate(self.matrix[index].split()):
            if kind.startswith("NV"):
                ends += [peer] * int(kind[2:])
        return ends + [None] * (links - len(ends))


class Catalogue(msgspec.Struct, frozen=True):
    boards: dict[str, Board]
    mig_tables: dict[str, MigTable]
    topologies: dict[str, Topology]

    def mig_table(self, board: Board) -> MigTable | None:
        return self.mig_tables[board.mig] if board.mig else None


CATALOGUE = msgspec.json.decode(Path(__file__).with_name("boards.json").read_bytes(), type=Catalogue)


def topology_named(name: str | None) -> Topology:
    if name not in CATALOGUE.topologies:
        raise DriverUnavailable(
            f"There is no simulated topology {name!r}; choose one of {', '.join(sorted(CATALOGUE.topologies))}."
        )
    return CATALOGUE.topologies[name]
