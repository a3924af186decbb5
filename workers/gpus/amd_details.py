"""What an AMD GPU is, and what of it changes slowly: links, PCIe, memory errors, partitions."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wire.hardware import GpuHardware, NvLink
from wire.reports import GpuInfo
from workers.gpus.amd_library import NOT_SUPPORTED, Probe, number, numbers, whole, words

MIB, KIB = 1 << 20, 1 << 10
ROCR_UUID = re.compile(r"GPU-[0-9a-fA-F]{1,16}")
ARCHITECTURES = {"gfx906": "gcn5", "gfx908": "cdna1", "gfx90a": "cdna2", "gfx940": "cdna3", "gfx941": "cdna3",
                 "gfx942": "cdna3", "gfx950": "cdna4", "gfx1030": "rdna2", "gfx1100": "rdna3", "gfx1101": "rdna3",
                 "gfx1200": "rdna4", "gfx1201": "rdna4"}
VIRTUAL = {"GUEST": "vgpu", "PASSTHROUGH": "passthrough"}
PCIE_GENERATIONS = {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}  # by MT/s
LINK_UP, LINK_DOWN = "U", "D"
RESERVED, PENDING, UNRESERVABLE = 0, 1, 2  # AMDSMI_MEM_PAGE_STATUS_*

PCI_DEVICES = Path("/sys/bus/pci/devices")

OTHER_DIE = "reported by the other die"
TWO_DIES = ("MI250",)
"""Cards with two dies, each a GPU of its own. The power of the card is told by one of them."""

NEVER_KNOWN = ("nvlink_count", "nvlink_version", "mig_capable")
HARDWARE_NEVER_KNOWN = ("ecc_corrected_total", "ecc_uncorrected_total", "rows_remapped_correctable", "persistence_mode",
                        "recovery_action")


def uuid_of(smi: Any, handle: Any) -> str | None:
    """The name by which ROCR_VISIBLE_DEVICES knows it, if it has one: the serial number of the chip."""
    return Probe()(
        "uuid",
        lambda: rocr_uuid(smi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"]),
        lambda: rocr_uuid(f"GPU-{int(words(asic(smi, handle)['asic_serial']) or '0', 16):016x}"),
        lambda: words(smi.amdsmi_get_gpu_device_uuid(handle)),
    )


def rocr_uuid(text: str) -> str | None:
    return text if ROCR_UUID.fullmatch(text) and int(text[4:], 16) else None


def info_of(smi: Any, handle: Any, uuid: str, index: int) -> GpuInfo:
    probe = Probe()
    name = name_of(smi, handle, probe)
    target = probe("compute_capability", lambda: words(asic(smi, handle)["target_graphics_version"]))
    info = GpuInfo(
        uuid=uuid, index=index, vendor="amd", name=name, compute_capability=target,
        architecture=probe("architecture", lambda: ARCHITECTURES.get(target or "")),
        pci_bus_id=probe("pci_bus_id", lambda: smi.amdsmi_get_gpu_device_bdf(handle)),
        memory_total_bytes=probe("memory_total_bytes", *memory_calls(smi, handle, "total")),
        serial=probe("serial", lambda: words(smi.amdsmi_get_gpu_board_info(handle)["product_serial"]),
                     lambda: words(asic(smi, handle)["asic_serial"])),
        numa_node=probe("numa_node", lambda: numa_node(smi, handle)),
        virtual=VIRTUAL.get(Probe()("virtual", lambda: smi.amdsmi_get_gpu_virtualization_mode(handle)["mode"].name)
                            or ""),
        cpu_affinity=probe("cpu_affinity", lambda: Probe()("library", lambda: cpu_affinity(smi, handle)),
                           lambda: cores_near(smi.amdsmi_get_gpu_device_bdf(handle))),
        vbios=probe("vbios", lambda: words(smi.amdsmi_get_gpu_vbios_info(handle)["version"])),
    )
    add_limits(smi, handle, info, probe)
    info.missing = {**probe.missing, **dict.fromkeys(NEVER_KNOWN, NOT_SUPPORTED)}
    return info


def add_limits(smi: Any, handle: Any, info: GpuInfo, probe: Probe) -> None:
    caps = Probe()("caps", lambda: smi.amdsmi_get_power_cap_info(handle)) or {}
    for name, key in (("power_limit_mw", "power_cap"), ("power_limit_min_mw", "min_power_cap"),
                      ("power_limit_max_mw", "max_power_cap"), ("power_limit_default_mw", "default_power_cap")):
        setattr(info, name, probe(name, cap_of(caps, key)))
        # The least may be zero; of the others it means that this die does not know.
        if not getattr(info, name) and key != "min_power_cap":
            setattr(info, name, None)
            probe.missing[name] = OTHER_DIE if has_two_dies(info.name) else NOT_SUPPORTED
    kinds, metrics, clocks = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric, smi.AmdSmiClkType
    info.temperature_slowdown_c = probe("temperature_slowdown_c", lambda: degrees(
        smi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, metrics.CRITICAL)))
    info.temperature_shutdown_c = probe("temperature_shutdown_c", lambda: degrees(
        smi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, metrics.EMERGENCY)))
    info.sm_clock_max_mhz = probe("sm_clock_max_mhz", lambda: whole(
        smi.amdsmi_get_clock_info(handle, clocks.GFX)["max_clk"]))
    info.memory_clock_max_mhz = probe("memory_clock_max_mhz", lambda: whole(
        smi.amdsmi_get_clock_info(handle, clocks.MEM)["max_clk"]))


def cap_of(caps: dict[str, Any], key: str) -> Callable[[], int | None]:
    def milliwatts() -> int | None:
        microwatts = whole(caps.get(key))
        return None if microwatts is None else microwatts // 1000
    return milliwatts


def asic(smi: Any, handle: Any) -> dict[str, Any]:
    return dict(smi.amdsmi_get_gpu_asic_info(handle))


def name_of(smi: Any, handle: Any, probe: Probe) -> str:
    found = probe("name", lambda: words(asic(smi, handle)["market_name"]),
                  lambda: words(smi.amdsmi_get_gpu_board_info(handle)["product_name"]))
    if found is None:
        return "AMD GPU"
    # Some versions leave the maker out.
    return found if found.upper().startswith("AMD") else f"AMD {found}"


def has_two_dies(name: str) -> bool:
    return any(word in name for word in TWO_DIES)


def memory_calls(smi: Any, handle: Any, what: str) -> tuple[Callable[[], int | None], ...]:
    """`what` is total or used. The second call tells it in MiB."""
    function = {"total": "amdsmi_get_gpu_memory_total", "used": "amdsmi_get_gpu_memory_usage"}[what]

    def in_mib() -> int | None:
        found = whole(smi.amdsmi_get_gpu_vram_usage(handle)[f"vram_{what}"], 32)
        return None if found is None else found * MIB

    return (lambda: whole(getattr(smi, function)(handle, smi.AmdSmiMemoryType.VRAM), 64), in_mib)


def numa_node(smi: Any, handle: Any) -> int | None:
    node = whole(smi.amdsmi_topo_get_numa_node_number(handle))
    return node if node is not None and node >= 0 else None


def degrees(value: Any) -> int | None:
    found = number(value)
    if found is None or found <= 0:
        return None
    return round(found / 1000 if found > 1000 else found)  # some versions answer in thousandths


def cpu_affinity(smi: Any, handle: Any) -> str | None:
    masks = list(smi.amdsmi_get_cpu_affinity_with_scope(handle, smi.AmdSmiAffinityScope.NUMA_SCOPE))
    return ranges(64 * place + bit for place, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1) or None


def cores_near(bus_id: str) -> str | None:
    """As the kernel knows them: the library has to be able to count the processors first, and often is not."""
    path = PCI_DEVICES / bus_id / "local_cpulist"
    return (path.read_text().strip() or None) if path.exists() else None


def ranges(cores: Iterable[int]) -> str:
    """0, 1, 2, 8 -> "0-2,8"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def hardware_of(smi: Any, handle: Any, uuid: str) -> GpuHardware:
    probe = Probe()
    pcie = Probe()("pcie", lambda: smi.amdsmi_get_pcie_info(handle)) or {}
    metric, static = pcie.get("pcie_metric", {}), pcie.get("pcie_static", {})
    hardware = GpuHardware(
        uuid=uuid,
        links=probe("links", lambda: xgmi_links(smi, handle)) or [],
        pcie_generation=probe("pcie_generation", lambda: PCIE_GENERATIONS.get(whole(metric.get("pcie_speed")) or 0)),
        pcie_width=probe("pcie_width", lambda: whole(metric.get("pcie_width"))),
        pcie_generation_max=probe("pcie_generation_max",
                                  lambda: PCIE_GENERATIONS.get(whole(static.get("max_pcie_speed")) or 0)),
        pcie_width_max=probe("pcie_width_max", lambda: whole(static.get("max_pcie_width"))),
        ecc_enabled=probe("ecc_enabled", lambda: bool(smi.amdsmi_get_gpu_ecc_enabled(handle))),
        partition=probe("partition", lambda: partition(smi, handle)),
    )
    add_bad_pages(hardware, probe("rows_remapped_uncorrectable", lambda: bad_pages(smi, handle)), probe)
    hardware.missing = {**probe.missing, **dict.fromkeys(HARDWARE_NEVER_KNOWN, NOT_SUPPORTED)}
    return hardware


def xgmi_links(smi: Any, handle: Any) -> list[NvLink] | None:
    """None for a board without any."""
    told = smi.amdsmi_get_link_metrics(handle)
    states = Probe()("states", lambda: smi.amdsmi_get_gpu_xgmi_link_status(handle)["status"]) or []
    own = smi.amdsmi_get_gpu_device_bdf(handle)
    links = told["links"][:whole(told["num_links"]) or 0]
    # The table of some boards has a place for the GPU itself.
    return [xgmi_link(place, link, states) for place, link in enumerate(links) if link.get("bdf") != own] or None


def xgmi_link(place: int, link: dict[str, Any], states: list[str]) -> NvLink:
    """The library counts in KiB what was read from and written to the peer."""
    read, written = whole(link.get("read"), 64), whole(link.get("write"), 64)
    state = states[place] if place < len(states) else None
    return NvLink(
        link=place, active=None if state not in (LINK_UP, LINK_DOWN, "X") else state == LINK_UP, remote_kind="gpu",
        remote_pci_bus_id=words(link.get("bdf")),
        received_bytes=None if read is None else read * KIB,
        transmitted_bytes=None if written is None else written * KIB,
    )


def partition(smi: Any, handle: Any) -> str | None:
    """How the chip is cut: compute (SPX, DPX, QPX, CPX) and memory (NPS1, NPS4), as in CPX/NPS4."""
    compute = words(smi.amdsmi_get_gpu_compute_partition(handle))
    memory = Probe()("memory", lambda: words(smi.amdsmi_get_gpu_memory_partition(handle)))
    return "/".join(word for word in (compute, memory) if word) or None


def bad_pages(smi: Any, handle: Any) -> list[int]:
    """The state of each. Some versions write a sentence where there is none."""
    found = smi.amdsmi_get_gpu_bad_page_info(handle)
    return [] if isinstance(found, str) else [int(page["status"]) for page in found]


def add_bad_pages(hardware: GpuHardware, states: list[int] | None, probe: Probe) -> None:
    """A page that was taken out of use is to this card what a remapped row is to another."""
    if states is None:
        reason = probe.missing["rows_remapped_uncorrectable"]
        probe.missing.update(row_remap_pending=reason, row_remap_failed=reason)
        return
    hardware.rows_remapped_uncorrectable = states.count(RESERVED)
    hardware.row_remap_pending = PENDING in states
    hardware.row_remap_failed = UNRESERVABLE in states


def sum_of(value: Any) -> float | None:
    found = numbers(value, 64)
    return sum(found) if found else None
