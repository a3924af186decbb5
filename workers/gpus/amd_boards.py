"""Boards and node topologies of the simulated AMD driver, from amd_boards.json."""

from pathlib import Path

import msgspec


class AmdBoard(msgspec.Struct, frozen=True, kw_only=True):
    """What the library lists as one GPU: of a card with two dies, one of them. Power is the card's."""

    market_name: str
    target: str  # gfx942
    device_id: str
    compute_units: int
    memory_mib: int
    power_cap_w: int
    idle_power_w: int
    dies: int  # of the card
    sm_clock_mhz: int
    idle_sm_clock_mhz: int
    memory_clock_mhz: int
    clocks: int  # parts that report a clock of their own
    pcie_speed: int  # MT/s
    pcie_width: int
    xgmi_bit_rate: int  # Gb/s of a lane
    xgmi_max_bandwidth: int  # Gb/s of a link
    critical_c: int
    emergency_c: int
    metrics: str  # version of the table that is read in one go
    partition: tuple[str, str] | None  # compute and memory; None where the board cannot be cut


class AmdTopology(msgspec.Struct, frozen=True, kw_only=True):
    """`matrix` is what people see, `xgmi_links` how many links a pair has, `hops` what the library counts."""

    board: str
    numa: list[int]
    matrix: list[str]
    xgmi_links: list[str]
    hops: list[str]

    def joined(self, a: int, b: int) -> str:
        return self.matrix[a].split()[b]

    def links(self, a: int, b: int) -> int:
        return int(self.xgmi_links[a].split()[b])

    def hops_between(self, a: int, b: int) -> int:
        return int(self.hops[a].split()[b])

    def link_ends(self, index: int) -> list[int]:
        """The GPU at the other end of each link."""
        return [peer for peer in range(len(self.numa)) for _ in range(self.links(index, peer))]


class AmdCatalogue(msgspec.Struct, frozen=True):
    boards: dict[str, AmdBoard]
    topologies: dict[str, AmdTopology]


AMD_CATALOGUE = msgspec.json.decode(Path(__file__).with_name("amd_boards.json").read_bytes(), type=AmdCatalogue)
