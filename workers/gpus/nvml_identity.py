"""What an NVIDIA GPU is, and how it is joined to the others: asked once per enumeration."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import msgspec
import pynvml

from wire.hardware import NvLink
from wire.reports import GpuInfo, Link
from workers.gpus import procfs
from workers.gpus.nvml_values import INVALID, NOT_SUPPORTED, Probe, memory_calls, text

ARCHITECTURES = {2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper",
                 10: "blackwell", 13: "rubin"}
VIRTUAL = {pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH: "passthrough",
           pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU: "vgpu"}
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
SWITCH = "switch"
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""By NVML's numbering of versions, in which 2.2 and 3.1 have numbers of their own."""

REMOTE_KINDS = {pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu", pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu",
                pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: SWITCH}
NODE_WORDS = 4  # of 64 NUMA nodes each
SHARED = "shared_with_host"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or a slice between two enumerations; only so long is a handle good."""

    uuid: str
    index: int
    handle: Any
    info: GpuInfo
    silent: str = ""  # why it is not asked
    nvlinks: list[NvLink] = field(default_factory=list)

    @property
    def is_slice(self) -> bool:
        return self.info.parent_uuid is not None

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({self.uuid})"


def info_of(handle: Any, uuid: str, index: int) -> GpuInfo:
    probe = Probe()
    major_minor = probe("compute_capability", lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    memory_total_bytes = memory_of(handle, probe)
    mig_capable, mig_enabled = mig_facts(handle)
    info = GpuInfo(
        uuid=uuid, index=index, vendor="nvidia",
        name=probe("name", lambda: text(pynvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
        pci_bus_id=probe("pci_bus_id", lambda: bus_id(pynvml.nvmlDeviceGetPciInfo(handle))),
        memory_total_bytes=memory_total_bytes,
        compute_capability="{}.{}".format(*major_minor) if major_minor else None,
        architecture=probe("architecture", lambda: ARCHITECTURES.get(pynvml.nvmlDeviceGetArchitecture(handle))),
        serial=probe("serial", lambda: text(pynvml.nvmlDeviceGetSerial, handle)),
        vbios=probe("vbios", lambda: text(pynvml.nvmlDeviceGetVbiosVersion, handle)),
        numa_node=probe("numa_node", lambda: numa_node(handle)),
        cpu_affinity=probe("cpu_affinity", lambda: cpu_affinity(handle)),
        virtual=VIRTUAL.get(Probe()("virtual", lambda: pynvml.nvmlDeviceGetVirtualizationMode(handle)) or 0),
        mig_capable=mig_capable, mig_enabled=mig_enabled,
        missing=probe.missing,
    )
    return msgspec.structs.replace(info, **limits_of(handle, probe))


def memory_of(handle: Any, probe: Probe) -> int | None:
    """A chip that shares the machine's memory has none of its own and refuses the question."""
    memory = probe("memory_total_bytes", *memory_calls(handle))
    if memory is not None:
        return int(memory.total)
    if probe.missing["memory_total_bytes"] != NOT_SUPPORTED:
        return None
    probe.missing["memory_total_bytes"] = SHARED
    return procfs.memory_total_bytes()


def mig_facts(handle: Any) -> tuple[bool | None, bool | None]:
    """-> whether it can be cut, and whether it is. A board without MIG refuses the question."""
    probe = Probe()
    mode = probe("mig", lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if mode is not None:
        return True, bool(mode[0])
    return (False, False) if probe.missing["mig"] == NOT_SUPPORTED else (None, None)


def limits_of(handle: Any, probe: Probe) -> dict[str, Any]:
    span = probe("power_limit_min_mw", lambda: pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))
    if span is None:
        probe.missing["power_limit_max_mw"] = probe.missing["power_limit_min_mw"]
    numbers: dict[str, tuple[Callable[[], int], ...]] = {
        "power_limit_mw": (lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle),
                           lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle)),
        "power_limit_default_mw": (lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle),),
        "temperature_slowdown_c": (threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),),
        "temperature_shutdown_c": (threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),),
        "sm_clock_max_mhz": (lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),),
        "memory_clock_max_mhz": (lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM),),
    }
    found: dict[str, Any] = {name: probe(name, *calls) for name, calls in numbers.items()}
    found["power_limit_min_mw"], found["power_limit_max_mw"] = span or (None, None)
    return found


def threshold(handle: Any, kind: int) -> Callable[[], int]:
    return lambda: int(pynvml.nvmlDeviceGetTemperatureThreshold(handle, kind))


def with_links(info: GpuInfo, links: list[NvLink]) -> GpuInfo:
    versions = [link.version for link in links if link.version is not None]
    missing = info.missing if links else {**info.missing, "nvlink_count": NOT_SUPPORTED}
    return msgspec.structs.replace(
        info, nvlink_count=sum(link.active is True for link in links) if links else None,
        nvlink_version=max(versions, default=None), missing=missing,
    )


def slice_of(parent: GpuInfo, handle: Any) -> Device | None:
    """A MIG slice; None if it was destroyed meanwhile. Where it sits and what it is made of is its GPU's."""
    probe = Probe()
    uuid = probe("uuid", lambda: text(pynvml.nvmlDeviceGetUUID, handle))
    if uuid is None:
        return None
    memory = probe("memory_total_bytes", *memory_calls(handle))
    name = probe("name", lambda: text(pynvml.nvmlDeviceGetName, handle)) or parent.name
    info = msgspec.structs.replace(
        parent, uuid=uuid, name=name, parent_uuid=parent.uuid, mig_enabled=None, mig_capable=None,
        # The driver names a slice after its GPU and profile: "NVIDIA A100-SXM4-80GB MIG 3g.40gb".
        mig_profile=name.rpartition(" MIG ")[2] if " MIG " in name else None,
        memory_total_bytes=memory.total if memory else None,
        power_limit_mw=None, power_limit_min_mw=None, power_limit_max_mw=None, power_limit_default_mw=None,
        nvlink_count=None, nvlink_version=None,
        missing={**parent.missing, **probe.missing, "power_limit_mw": NOT_SUPPORTED, "nvlink_count": NOT_SUPPORTED},
    )
    return Device(uuid, parent.index, handle, info)


def mig_handles(handle: Any) -> list[Any]:
    probe = Probe()
    count = probe("count", lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    found = [probe("slice", partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place))
             for place in range(count)]
    return [one for one in found if one is not None]


def nvlinks_of(handle: Any) -> list[NvLink]:
    """Every link that the GPU has, also those that are down."""
    links = []
    for number in range(pynvml.NVML_NVLINK_MAX_LINKS):
        probe = Probe()
        active = probe("state", partial(pynvml.nvmlDeviceGetNvLinkState, handle, number))
        if probe.missing.get("state") in {NOT_SUPPORTED, INVALID, "gpu_lost"}:
            break
        kind = probe("kind", partial(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number))
        peer = probe("peer", partial(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number))
        links.append(NvLink(
            link=number, active=None if active is None else bool(active),
            version=NVLINK_GENERATIONS.get(
                probe("version", partial(pynvml.nvmlDeviceGetNvLinkVersion, handle, number)) or 0),
            remote_kind=None if kind is None else REMOTE_KINDS.get(kind),
            remote_pci_bus_id=bus_id(peer) if peer else None,
        ))
    return links


def links_between(devices: list[Device]) -> list[Link]:
    """How each pair is joined. A pair that cannot be asked is left out."""
    ends = {device.uuid: link_ends(device.nvlinks) for device in devices}
    return [
        Link(a=a.uuid, b=b.uuid, kind=kind)
        for a, b in combinations(devices, 2)
        if (kind := nvlink_kind(a, b, ends) or pcie_kind(a.handle, b.handle))
    ]


def link_ends(links: Iterable[NvLink]) -> Counter[str]:
    """The PCI bus id at the other end of every active link, or SWITCH."""
    ends = Counter[str]()
    for link in links:
        if link.active and (end := SWITCH if link.remote_kind == SWITCH else link.remote_pci_bus_id):
            ends[end] += 1
    return ends


def nvlink_kind(a: Device, b: Device, ends: dict[str, Counter[str]]) -> str | None:
    """Links of the pair itself, or what both have to a switch."""
    direct = ends[a.uuid][b.info.pci_bus_id] if b.info.pci_bus_id else 0
    count = direct or min(ends[a.uuid][SWITCH], ends[b.uuid][SWITCH])
    return f"NV{count}" if count else None


def pcie_kind(a: Any, b: Any) -> str | None:
    return Probe()("level", lambda: LEVELS.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)))


def bus_id(pci: Any) -> str:
    raw = pci.busId
    return (raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)).upper()


def numa_node(handle: Any) -> int | None:
    words = pynvml.nvmlDeviceGetMemoryAffinity(handle, NODE_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE)
    nodes = members(words)
    # Several mean that the board does not belong to one.
    return nodes[0] if len(nodes) == 1 else None


def cpu_affinity(handle: Any) -> str | None:
    words = pynvml.nvmlDeviceGetCpuAffinity(handle, ((os.cpu_count() or 64) + 63) // 64)
    return ranges(members(words)) or None


def members(words: Iterable[int]) -> list[int]:
    return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 8] -> "0-2,8"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def cuda_version() -> str:
    number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{number // 1000}.{number % 1000 // 10}"
