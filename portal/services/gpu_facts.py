"""What is worth saying about one GPU beside its meters: live facts, and what it is. Unknown has its reason."""

from dataclasses import dataclass
from typing import Any

from portal.services.cells import Cell, missing_words
from wire.states import GpuState

NOT_TOLD = "its node has not told yet"
CLOCK_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "too warm",
    0x40: "too hot, slowed by the hardware",
    0x80: "power brake from outside",
    0x100: "display clock",
    0x200: "board limit",
    0x400: "voltage reliability",
}
ALARMING_REASONS = 0x8 | 0x20 | 0x40 | 0x80
RECOVERY = {1: "reset the GPU", 2: "reboot the machine", 3: "drain its peers", 4: "drain and reset"}


@dataclass(frozen=True)
class Fact:
    """`text` None: not known, for the reason `why`. `alarming`: somebody should look at it."""

    name: str
    text: str | None
    why: str = ""
    alarming: bool = False
    copy: bool = False


def live_facts(cell: Cell) -> list[Fact]:
    """What changes from reading to reading, or tells that something is wrong."""
    found = [memory_temperature(cell), clocks(cell), held_back(cell), pcie(cell), nvlink(cell), ecc(cell)]
    known = [fact for fact in found if fact is not None]
    if cell.gpu.state == GpuState.LOST:  # what was true of it before it was lost tells nothing now
        return [Fact(fact.name, None, missing_words("gpu_lost")) for fact in known]
    return known + troubles(cell.gpu.hardware)


def identity(cell: Cell) -> list[Fact]:
    gpu, details, hardware = cell.gpu, cell.gpu.details, cell.gpu.hardware
    told = Told(details)
    return [
        Fact("Model", gpu.name),
        Fact("UUID", gpu.uuid, copy=True),
        Fact("PCI id", gpu.pci_bus_id or None, told.why("pci_bus_id"), copy=bool(gpu.pci_bus_id)),
        told.fact("Serial", "serial"),
        told.fact("VBIOS", "vbios"),
        told.fact("Architecture", "architecture"),
        told.fact("Compute capability", "compute_capability"),
        Fact("NUMA node", None if gpu.numa_node is None else str(gpu.numa_node), told.why("numa_node")),
        told.fact("CPU cores near it", "cpu_affinity"),
        Fact("Power limit", power_range(cell), told.why("power_limit_max_mw")),
        Fact("Slows down, shuts down at", thresholds(details), told.why("temperature_slowdown_c")),
        Fact("Persistence mode", on_off(hardware.get("persistence_mode")), why_of(hardware, "persistence_mode")),
        Fact("ECC over its life", ecc_total(hardware), why_of(hardware, "ecc_uncorrected_total")),
        Fact("Rows remapped", rows_remapped(hardware), why_of(hardware, "rows_remapped_uncorrectable")),
        *([Fact("Partition", str(hardware["partition"]))] if hardware.get("partition") else []),
        *([Fact("Guest", f"{details['virtual']}: sees part of a card")] if details.get("virtual") else []),
    ]


# --- live -------------------------------------------------------------------------------------------------------------


def memory_temperature(cell: Cell) -> Fact | None:
    value = cell.latest.get("memory_temperature_c")
    if value is None and "memory_temperature_c" not in cell.latest.get("missing", {}):
        return None
    return Fact("Memory temp", None if value is None else f"{value:.0f} °C", cell.why_missing("memory_temperature_c"))


def clocks(cell: Cell) -> Fact:
    now, most = cell.latest.get("sm_clock_mhz"), cell.gpu.details.get("sm_clock_max_mhz")
    text = None if now is None else f"{now:,} of {most:,} MHz" if most else f"{now:,} MHz"
    return Fact("SM clock", text, cell.why_missing("sm_clock_mhz"))


def held_back(cell: Cell) -> Fact:
    bits = cell.latest.get("throttle_reasons")
    if bits is None:
        return Fact("Held back by", None, cell.why_missing("throttle_reasons"))
    return Fact("Held back by", reasons_in_words(bits) or "nothing", alarming=bool(bits & ALARMING_REASONS))


def reasons_in_words(bits: int) -> str:
    """An unknown bit is kept, as a number."""
    words = [words for bit, words in CLOCK_REASONS.items() if bits & bit]
    rest = bits & ~sum(CLOCK_REASONS)
    return ", ".join([*words, hex(rest)] if rest else words)


def pcie(cell: Cell) -> Fact:
    told = cell.gpu.hardware
    generation, width = told.get("pcie_generation"), told.get("pcie_width")
    if generation is None or width is None:
        return Fact("PCIe", None, why_of(told, "pcie_generation"))
    most_generation, most_width = told.get("pcie_generation_max"), told.get("pcie_width_max")
    now, most = f"gen {generation} ×{width}", f"gen {most_generation} ×{most_width}"
    narrow = bool(most_width and width < most_width)
    full = most_generation is None or most_width is None or now == most
    return Fact("PCIe", now if full else f"{now} of {most}", alarming=narrow)


def nvlink(cell: Cell) -> Fact | None:
    """Absent where there is none."""
    told = cell.gpu.hardware
    name = "XGMI" if cell.gpu.vendor == "amd" else "NVLink"
    links = told.get("links") or []
    if not links:
        why = told.get("missing", {}).get("links")
        return Fact(name, None, missing_words(why)) if why else None
    up = sum(one.get("active") is True for one in links)
    if all(one.get("active") is None for one in links):
        return Fact(name, None, why_of(told, "links"))
    return Fact(name, f"{up} of {len(links)} up", alarming=up < len(links) and not cell.split)


def ecc(cell: Cell) -> Fact:
    told = cell.gpu.hardware
    if told.get("ecc_enabled") is False:
        return Fact("ECC", "off")
    broken, corrected = cell.latest.get("ecc_uncorrected"), cell.latest.get("ecc_corrected")
    if broken is None:
        return Fact("ECC", None, cell.why_missing("ecc_uncorrected"))
    text = f"{broken:,} uncorrected" + (f", {corrected:,} corrected" if corrected else "")
    return Fact("ECC", text, alarming=broken > 0)


def troubles(told: dict[str, Any]) -> list[Fact]:
    """What there is only if something is wrong."""
    found = []
    if told.get("row_remap_failed"):
        found.append(Fact("Row remap", "failed", alarming=True))
    elif told.get("row_remap_pending"):
        found.append(Fact("Row remap", "pending, needs a reset", alarming=True))
    if told.get("recovery_action"):
        action = int(told["recovery_action"])
        found.append(Fact("Driver asks to", RECOVERY.get(action, f"do action {action}"), alarming=True))
    return found


# --- what it is -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """wire.reports.GpuInfo as a dict, with what is missing and why."""

    details: dict[str, Any]

    def fact(self, name: str, key: str) -> Fact:
        value = self.details.get(key)
        return Fact(name, None if value in (None, "") else str(value), self.why(key))

    def why(self, key: str) -> str:
        return why_of(self.details, key)


def why_of(told: dict[str, Any], key: str) -> str:
    if not told:
        return NOT_TOLD
    return missing_words(told.get("missing", {}).get(key, "the driver does not say"))


def power_range(cell: Cell) -> str | None:
    details, limit = cell.gpu.details, cell.gpu.power_limit_mw
    low, high = details.get("power_limit_min_mw"), details.get("power_limit_max_mw")
    if limit is None:
        return None
    span = f" ({low / 1000:.0f} to {high / 1000:.0f} W possible)" if low and high else ""
    return f"{limit / 1000:.0f} W{span}"


def thresholds(details: dict[str, Any]) -> str | None:
    slow, shut = details.get("temperature_slowdown_c"), details.get("temperature_shutdown_c")
    known = [f"{value:.0f} °C" for value in (slow, shut) if value is not None]
    return ", ".join(known) or None


def on_off(value: bool | None) -> str | None:
    return None if value is None else "on" if value else "off"


def ecc_total(told: dict[str, Any]) -> str | None:
    broken, corrected = told.get("ecc_uncorrected_total"), told.get("ecc_corrected_total")
    if broken is None:
        return None
    return f"{broken:,} uncorrected" + (f", {corrected:,} corrected" if corrected is not None else "")


def rows_remapped(told: dict[str, Any]) -> str | None:
    broken, worn = told.get("rows_remapped_uncorrectable"), told.get("rows_remapped_correctable")
    if broken is None:
        return None
    return f"{broken} for uncorrected errors" + (f", {worn} for corrected ones" if worn is not None else "")
