"""Upward: what a node reports. One tagged union; every message may be repeated without harm.

Attempt events are keyed by (attempt, seq), log chunks by (attempt, stream, offset), telemetry by (gpu, time).
Times are seconds since the epoch (the node's clock, for display); order comes from seq and offset.
`None` means not known, never zero; the reason is in `missing`.
"""

import msgspec

from wire.hardware import Hardware, HealthEvent, OrderResult
from wire.states import AttemptState, EndReason


class GpuInfo(msgspec.Struct, kw_only=True):
    """What a GPU is: fixed until the next enumeration."""

    uuid: str
    index: int
    vendor: str  # nvidia | amd
    name: str  # as the driver says: "NVIDIA H100 80GB HBM3"
    pci_bus_id: str | None = None
    memory_total_bytes: int | None = None
    power_limit_mw: int | None = None
    compute_capability: str | None = None
    architecture: str | None = None
    serial: str | None = None
    numa_node: int | None = None
    parent_uuid: str | None = None  # of a MIG slice
    mig_profile: str | None = None
    mig_enabled: bool | None = None  # then it is not for jobs itself: its slices are
    mig_capable: bool | None = None
    virtual: str | None = None  # passthrough | vgpu: a guest sees part of a card
    cpu_affinity: str | None = None  # cores near it, as in "0-15,64-79"
    vbios: str | None = None
    power_limit_min_mw: int | None = None
    power_limit_max_mw: int | None = None
    power_limit_default_mw: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_shutdown_c: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    nvlink_count: int | None = None  # active ones
    nvlink_version: int | None = None
    missing: dict[str, str] = {}  # field -> reason: not_supported, no_permission, gpu_lost, timeout, error:<code>


class Link(msgspec.Struct, frozen=True):
    """How two GPUs are joined: `kind` is NV<n>, XGMI, PIX, PXB, PHB, NODE or SYS."""

    a: str
    b: str
    kind: str


class Inventory(msgspec.Struct, kw_only=True, tag="inventory"):
    digest: str  # of everything below it, so that an unchanged inventory is not sent twice
    boot_id: str
    hostname: str
    agent_version: str
    driver: str | None = None  # GPU driver version
    cuda: str | None = None
    gpus: list[GpuInfo] = []
    links: list[Link] = []
    nvswitch: bool = False
    cpu_count: int | None = None
    memory_total_bytes: int | None = None
    problem: str | None = None  # why there are fewer GPUs than there should be, with the advice
    simulated: bool = False


class Heartbeat(msgspec.Struct, kw_only=True, tag="heartbeat"):
    boot_id: str
    nonce: str  # comes back as Desired.echo
    serial: int  # of the newest desired state that was read
    at: float
    started_at: float  # of the worker process
    load_1m: float | None = None
    memory_used_bytes: int | None = None
    spool_free_bytes: int | None = None
    attempts: list[str] = []  # that have a spool directory here; ended ones until they are forgotten
    gpu_reader: str = "ok"  # ok | hung | failed: <sentence>


class RankExit(msgspec.Struct, kw_only=True):
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None  # last error line, from the rank's error file or its log
    ended_at: float | None = None


class Refusal(msgspec.Struct, kw_only=True):
    """Why a share was not started on this node. `code` is busy (it passes by itself), broken, or disk."""

    code: str
    message: str  # one sentence
    gpu_uuid: str | None = None


class AttemptEvent(msgspec.Struct, kw_only=True, tag="attempt"):
    """A step in the life of an attempt. `seq` counts from 1 without gaps per attempt."""

    attempt: str
    job: int
    epoch: int
    seq: int
    at: float
    state: AttemptState
    reason: EndReason | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None  # one line: the last error line, or why the launch failed
    ranks: list[RankExit] = []
    log_sizes: dict[str, int] = {}  # with an end: bytes of each stream, final
    refusals: list[Refusal] = []  # with PREFLIGHT
    pid: int | None = None
    monotonic_s: float | None = None  # since the attempt was accepted; durations come from this


class LogChunk(msgspec.Struct, kw_only=True, tag="log"):
    """Raw bytes of one stream. Streams are `rank-<n>` (stdout and stderr in order) and `launcher`."""

    attempt: str
    job: int
    epoch: int
    stream: str
    offset: int
    data: bytes
    crc32: int
    dropped_bytes: int = 0  # bytes before `offset` that were cut from the middle of a flood and can never come


class GpuProcess(msgspec.Struct, kw_only=True):
    pid: int
    memory_used_bytes: int | None = None
    user: str | None = None
    command: str | None = None
    attempt: str | None = None  # if it belongs to an attempt of the portal
    start_time: float | None = None  # seconds since the epoch
    container: str | None = None  # its id, if it runs in one
    gpu_instance: int | None = None
    compute_instance: int | None = None


class GpuReading(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One GPU at one moment."""

    uuid: str
    at: float
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    energy_mj: int | None = None
    throttle_reasons: int | None = None  # NVML's bits
    memory_reserved_bytes: int | None = None  # by the driver
    memory_utilization_percent: float | None = None
    encoder_percent: float | None = None
    decoder_percent: float | None = None
    memory_temperature_c: float | None = None
    fan_percent: float | None = None
    performance_state: int | None = None
    power_limit_mw: int | None = None
    pcie_received_bytes_per_s: float | None = None  # from counters, never from the call that waits 20 ms
    pcie_transmitted_bytes_per_s: float | None = None
    pcie_replays: int | None = None
    nvlink_received_bytes_per_s: float | None = None
    nvlink_transmitted_bytes_per_s: float | None = None
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    power_violation_ns: int | None = None
    thermal_violation_ns: int | None = None
    processes: list[GpuProcess] | None = None
    missing: dict[str, str] = {}


class Telemetry(msgspec.Struct, kw_only=True, tag="telemetry"):
    boot_id: str
    readings: list[GpuReading]


class Rejected(msgspec.Struct, kw_only=True, tag="rejected"):
    """An order that the node refused, so that nobody waits for it in silence."""

    at: float
    code: str  # one of signing.Refused's, stale_serial, or replayed
    message: str


Report = Inventory | Heartbeat | AttemptEvent | LogChunk | Telemetry | Rejected | Hardware | HealthEvent | OrderResult
