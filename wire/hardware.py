"""Hardware in detail, and the orders that change it. Slow-moving: sent on a change and every half minute.

`None` means not known, its reason stands in `missing`. Identity is the UUID; PCI bus ids are as the driver writes them.
"""

import msgspec

# --- what a node has -------------------------------------------------------------------------------------------------


class NvLink(msgspec.Struct, kw_only=True):
    """One NVLink (or XGMI link) of a GPU. Bytes and errors count since the driver was loaded."""

    link: int
    active: bool | None = None
    version: int | None = None
    remote_kind: str | None = None  # gpu | switch | cpu
    remote_pci_bus_id: str | None = None
    transmitted_bytes: int | None = None
    received_bytes: int | None = None
    replay_errors: int | None = None
    recovery_errors: int | None = None
    crc_errors: int | None = None


class MigProfile(msgspec.Struct, kw_only=True):
    """A profile that the driver offers on a GPU, with every place where it may start."""

    name: str  # 1g.10gb
    id: int
    slices: int  # compute slices
    memory_bytes: int
    instances_max: int
    placements: list[int] = []
    size: int = 1  # memory slices that it covers from its start


class MigInstance(msgspec.Struct, kw_only=True):
    """One slice that exists: a GPU instance with its compute instance."""

    uuid: str
    profile: str
    start: int
    size: int
    gpu_instance: int
    compute_instance: int


class MigStatus(msgspec.Struct, kw_only=True):
    enabled: bool
    pending: bool  # what it will be after the next reset
    profiles: list[MigProfile] = []
    instances: list[MigInstance] = []


class GpuHardware(msgspec.Struct, kw_only=True, omit_defaults=True):
    uuid: str
    links: list[NvLink] = []
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    ecc_enabled: bool | None = None
    ecc_corrected_total: int | None = None  # over the life of the card
    ecc_uncorrected_total: int | None = None
    rows_remapped_correctable: int | None = None
    rows_remapped_uncorrectable: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    recovery_action: int | None = None  # NVML field 230: 0 none, 1 reset, 2 reboot, 3 drain p2p, 4 drain and reset
    persistence_mode: bool | None = None
    mig: MigStatus | None = None
    partition: str | None = None  # of an AMD GPU: compute and memory, as in CPX/NPS4
    missing: dict[str, str] = {}


class Nic(msgspec.Struct, kw_only=True):
    """A network card, and how far it is from each GPU: PIX, PXB, PHB, NODE or SYS by GPU UUID."""

    name: str  # mlx5_0 or eth0
    pci_bus_id: str | None = None
    numa_node: int | None = None
    rdma: bool = False
    link_layer: str | None = None  # InfiniBand | Ethernet
    rate_gbps: float | None = None
    state: str | None = None
    distances: dict[str, str] = {}


class Hardware(msgspec.Struct, kw_only=True, tag="hardware"):
    at: float
    gpus: list[GpuHardware] = []
    nics: list[Nic] = []


class HealthEvent(msgspec.Struct, kw_only=True, tag="health"):
    """Something happened to a GPU or a node. `key` makes a repeat harmless: the same key is the same event."""

    at: float
    key: str
    # xid | sxid | ecc | row_remap | throttle | lost | hang | slow_link | link_down | recovery | driver | back
    kind: str
    gpu_uuid: str | None = None
    pci_bus_id: str | None = None
    code: int | None = None  # the Xid, the recovery action, or of row_remap 1 pending, 2 failed
    message: str = ""
    source: str = ""  # nvml | kernel_log | reader
    count: int = 1  # how often it happened so far: a storm is one event whose count grows


# --- what a node is told ---------------------------------------------------------------------------------------------


class MigSlice(msgspec.Struct, frozen=True):
    profile: str
    start: int


class MigOrder(msgspec.Struct, kw_only=True, tag="mig"):
    """Cut this GPU so. An empty layout switches MIG off. The portal gives it only when nothing of it is allocated."""

    id: str
    gpu_uuid: str
    layout: list[MigSlice] = []


class ReleaseOrder(msgspec.Struct, kw_only=True, tag="release"):
    """Let go of the vendor's library for a while, so that an administrator can reset a GPU or change its mode."""

    id: str
    duration_s: float = 60.0


class StopForeignOrder(msgspec.Struct, kw_only=True, tag="stop_foreign"):
    """End a process that no attempt explains: TERM, then KILL after the grace, if it still is the same process."""

    id: str
    gpu_uuid: str
    pid: int
    start_time: float
    grace_s: float = 30.0


Order = MigOrder | ReleaseOrder | StopForeignOrder


class OrderResult(msgspec.Struct, kw_only=True, tag="order"):
    """How an order went. Repeated until the order is gone from the desired state; kept on the node by its id."""

    id: str
    at: float
    state: str  # running | done | failed | undone (failed, and the former layout is back)
    message: str = ""
