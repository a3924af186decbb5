"""What goes wrong with a GPU without the driver saying so: seen in its readings and details, whoever made it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from wire.hardware import GpuHardware, HealthEvent
from wire.reports import GpuReading

HELD_BACK = 0x08 | 0x40 | 0x80
"""Slowed by the hardware: heat, or the power supply. A power cap kept by the driver is everyday life."""

HELD_BACK_BY = {0x40: "its temperature", 0x80: "the power supply (power brake)"}
THROTTLED_AFTER_S = 30.0
CALM_AFTER_S = 60.0
UNDER_LOAD_PERCENT = 20.0
AWAY_ON_PURPOSE = {"released"}
ACTIONS = {1: "reset it", 2: "reboot the node", 3: "drain its peers", 4: "drain it, then reset it"}


@dataclass(slots=True)
class Patient:
    """What is remembered of one GPU."""

    silent: str = ""
    ecc_uncorrected: int | None = None
    held_back_since: float | None = None
    calm_since: float | None = None
    throttle_told: bool = False
    utilization_percent: float | None = None
    links_up: set[int] = field(default_factory=set)
    slow_looks: int = 0
    remaps_told: set[str] = field(default_factory=set)
    recovery_action: int | None = None


class Symptoms:
    def __init__(self) -> None:
        self._patients: dict[str, Patient] = {}

    def of_readings(self, readings: Iterable[GpuReading]) -> list[HealthEvent]:
        events: list[HealthEvent] = []
        for reading in readings:
            patient = self._patients.setdefault(reading.uuid, Patient())
            silent = reading.missing.get("gpu", "")
            if silent in AWAY_ON_PURPOSE:
                continue
            events += presence(patient, reading, silent)
            if not silent:
                patient.utilization_percent = reading.utilization_percent
                events += memory_errors(patient, reading) + throttling(patient, reading)
        return events

    def of_hardware(self, found: Iterable[GpuHardware], at: float) -> list[HealthEvent]:
        events: list[HealthEvent] = []
        for hardware in found:
            patient = self._patients.setdefault(hardware.uuid, Patient())
            for look in (row_remaps, lost_links, slow_link, recovery):
                events += look(patient, hardware, at)
        return events


def presence(patient: Patient, reading: GpuReading, silent: str) -> list[HealthEvent]:
    before, patient.silent = patient.silent, silent
    if silent and not before:
        return [event(reading.uuid, "lost", reading.at, f"The GPU does not answer any more ({silent}).")]
    if before and not silent:
        return [event(reading.uuid, "back", reading.at, "The GPU answers again.")]
    return []


def memory_errors(patient: Patient, reading: GpuReading) -> list[HealthEvent]:
    count = reading.ecc_uncorrected
    if count is None:
        return []
    before, patient.ecc_uncorrected = patient.ecc_uncorrected, count
    if before is None or count <= before:  # it starts anew with the driver
        return []
    new = count - before
    return [event(reading.uuid, "ecc", reading.at,
                  f"{new} uncorrectable memory error{'s' if new > 1 else ''}, {count} since the driver was loaded.")]


def throttling(patient: Patient, reading: GpuReading) -> list[HealthEvent]:
    bits = (reading.throttle_reasons or 0) & HELD_BACK
    if not bits:
        patient.held_back_since = None
        patient.calm_since = reading.at if patient.calm_since is None else patient.calm_since
        if reading.at - patient.calm_since >= CALM_AFTER_S:
            patient.throttle_told = False
        return []
    patient.calm_since = None
    if patient.held_back_since is None:
        patient.held_back_since = reading.at
    if patient.throttle_told or reading.at - patient.held_back_since < THROTTLED_AFTER_S:
        return []
    patient.throttle_told = True
    causes = " and ".join(words for bit, words in HELD_BACK_BY.items() if bits & bit) or "the board itself"
    return [event(reading.uuid, "throttle", reading.at,
                  f"The hardware has been slowing the GPU down for {THROTTLED_AFTER_S:.0f} s because of {causes}.")]


def row_remaps(patient: Patient, hardware: GpuHardware, at: float) -> list[HealthEvent]:
    """Keyed by the count of rows: the same finding after a restart of the reader is the same event."""
    rows = f"{hardware.rows_remapped_correctable}+{hardware.rows_remapped_uncorrectable}"
    findings = []
    if hardware.row_remap_pending:
        findings.append((1, "pending", "Rows of its memory are to be remapped: reset the GPU when it is free."))
    if hardware.row_remap_failed:
        findings.append((2, "failed", "A row of its memory could not be remapped: the board has to be replaced."))
    keys = {f"row_remap/{hardware.uuid}/{state}/{rows}": (code, words) for code, state, words in findings}
    told, patient.remaps_told = patient.remaps_told, set(keys)
    return [
        HealthEvent(at=at, key=key, kind="row_remap", gpu_uuid=hardware.uuid, code=code, message=words, source="reader")
        for key, (code, words) in keys.items() if key not in told
    ]


def lost_links(patient: Patient, hardware: GpuHardware, at: float) -> list[HealthEvent]:
    up = {link.link for link in hardware.links if link.active}
    down = {link.link for link in hardware.links if link.active is False}
    fallen = sorted(patient.links_up & down)
    patient.links_up = (patient.links_up - down) | up
    if not fallen:
        return []
    words = f"NVLink {fallen[0]} is" if len(fallen) == 1 else f"NVLinks {', '.join(map(str, fallen))} are"
    return [event(hardware.uuid, "link_down", at, f"{words} down, {len(up)} of {len(hardware.links)} are up.")]


def slow_link(patient: Patient, hardware: GpuHardware, at: float) -> list[HealthEvent]:
    """An idle GPU slows its link to save power, so it counts under load alone, and when it lasts."""
    now, most = ((hardware.pcie_generation, hardware.pcie_width),
                 (hardware.pcie_generation_max, hardware.pcie_width_max))
    if (patient.utilization_percent or 0.0) < UNDER_LOAD_PERCENT:
        return []
    slower = any(have is not None and could is not None and have < could
                 for have, could in zip(now, most, strict=True))
    patient.slow_looks = patient.slow_looks + 1 if slower else 0
    if patient.slow_looks != 2:
        return []
    return [event(hardware.uuid, "slow_link", at,
                  f"Under load its PCIe link runs at {link_words(now)}, it could at {link_words(most)}.")]


def link_words(link: tuple[int | None, int | None]) -> str:
    generation, width = link
    return f"generation {'?' if generation is None else generation} x{'?' if width is None else width}"


def recovery(patient: Patient, hardware: GpuHardware, at: float) -> list[HealthEvent]:
    action = hardware.recovery_action
    if action is None:
        return []
    before, patient.recovery_action = patient.recovery_action, action
    if not action or action == before:
        return []
    found = event(hardware.uuid, "recovery", at, f"The driver wants something done: {ACTIONS.get(action, action)}.")
    found.code = action
    return [found]


def event(uuid: str, kind: str, at: float, message: str) -> HealthEvent:
    return HealthEvent(at=at, key=f"{kind}/{uuid}/{round(at * 1000)}", kind=kind, gpu_uuid=uuid, message=message,
                       source="reader")
