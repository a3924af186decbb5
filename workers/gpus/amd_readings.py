"""One AMD GPU at one moment. Most of it comes from one call; what that lacks is asked for by itself.

Two calls are left alone on purpose: the violation status waits 100 ms between two samples, the PCIe throughput a
second.
"""

from dataclasses import dataclass, field
from typing import Any

from wire.reports import GpuInfo, GpuProcess, GpuReading
from workers.gpus.amd_details import OTHER_DIE, degrees, has_two_dies, memory_calls, sum_of
from workers.gpus.amd_library import GONE, LOST, NOT_SUPPORTED, Probe, largest, number, percent, whole
from workers.gpus.plausible import drop_nonsense

KIB = 1 << 10
MAX_PID = 1 << 22  # the kernel's own limit
ECC_EVERY_S = 10.0
FIRST_SAMPLE, COUNTER_RESET, UNRELIABLE = "first_sample", "counter_reset", "unreliable"

# The bits by which the portal knows why clocks are held back.
POWER_CAP, HARDWARE_SLOWDOWN, THERMAL, HARDWARE_THERMAL = 0x4, 0x8, 0x20, 0x40
HELD_BACK = {"ppt_residency_acc": POWER_CAP, "socket_thm_residency_acc": THERMAL, "vr_thm_residency_acc": THERMAL,
             "hbm_thm_residency_acc": THERMAL, "prochot_residency_acc": HARDWARE_THERMAL}
TIME_BASE = "accumulation_counter"
XGMI = {"nvlink_received_bytes_per_s": "xgmi_read_data_acc", "nvlink_transmitted_bytes_per_s": "xgmi_write_data_acc"}

NEVER_KNOWN = ("memory_reserved_bytes", "encoder_percent", "decoder_percent", "performance_state",
               "pcie_received_bytes_per_s", "pcie_transmitted_bytes_per_s")

Metrics = dict[str, Any]


@dataclass(slots=True)
class Meter:
    """Counters of the reading before, so that this one can tell rates and times."""

    at: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    power_ns: float = 0.0
    thermal_ns: float = 0.0
    ecc_at: float | None = None
    ecc: dict[str, Any] = field(default_factory=dict)
    ecc_reason: str = NOT_SUPPORTED

    def advance(self, at: float, metrics: Metrics) -> "Passed":
        names = (TIME_BASE, *HELD_BACK, *XGMI.values())
        counters = {name: value for name in names if (value := sum_of(metrics.get(name))) is not None}
        elapsed = at - self.at if self.at is not None and at > self.at else None
        gained = {name: counters[name] - self.counters[name] for name in counters if name in self.counters}
        self.at, self.counters = at, counters
        # A counter that fell began anew: what passed is not known.
        passed = Passed(elapsed, {name: value for name, value in gained.items() if value >= 0}, frozenset(counters))
        self.power_ns += 1e9 * passed.held_back_s(POWER_CAP)
        self.thermal_ns += 1e9 * passed.held_back_s(THERMAL | HARDWARE_THERMAL)
        return passed


@dataclass(frozen=True, slots=True)
class Passed:
    """Since the reading before."""

    elapsed_s: float | None
    gained: dict[str, float]
    known: frozenset[str]

    def held_back_s(self, bits: int) -> float:
        ticks = self.gained.get(TIME_BASE)
        if not ticks or self.elapsed_s is None:
            return 0.0
        held = max((self.gained.get(name, 0.0) for name, bit in HELD_BACK.items() if bit & bits), default=0.0)
        return self.elapsed_s * min(1.0, held / ticks)

    def reasons(self) -> int | None:
        told = [bit for name, bit in HELD_BACK.items() if self.gained.get(name, 0.0) > 0]
        if not any(name in self.gained for name in HELD_BACK):
            return None
        return sum(set(told))

    def reason(self, name: str) -> str:
        """Why there is no rate."""
        if name not in self.known:
            return NOT_SUPPORTED
        return FIRST_SAMPLE if self.elapsed_s is None else COUNTER_RESET

    def per_second(self, name: str) -> float | None:
        gained = self.gained.get(name)
        return None if gained is None or not self.elapsed_s else gained / self.elapsed_s


@dataclass(slots=True)
class Device:
    uuid: str
    index: int
    handle: Any
    info: GpuInfo
    silent: str = ""  # why it is not asked
    meter: Meter = field(default_factory=Meter)


def reading_of(smi: Any, device: Device, at: float) -> GpuReading:
    if device.silent:
        return GpuReading(uuid=device.uuid, at=at, missing={"gpu": device.silent})
    handle, probe, batch = device.handle, Probe(), Probe()
    metrics: Metrics = batch("metrics", lambda: smi.amdsmi_get_gpu_metrics_info(handle)) or {}
    reading = GpuReading(
        uuid=device.uuid, at=at,
        memory_used_bytes=probe("memory_used_bytes", *memory_calls(smi, handle, "used")),
        memory_total_bytes=device.info.memory_total_bytes, power_limit_mw=device.info.power_limit_mw,
        pcie_replays=probe("pcie_replays", lambda: whole(metrics.get("pcie_replay_count_acc"), 64)),
        fan_percent=probe("fan_percent", lambda: fan_percent(smi, handle)),
        processes=processes_on(smi, handle, probe),
    )
    add_activity(smi, handle, metrics, reading, probe)
    add_power(smi, device, metrics, reading, probe)
    add_counters(device.meter, at, metrics, reading, probe)
    add_errors(smi, device, at, reading, probe)
    if device.info.power_limit_mw is None:
        probe.missing["power_limit_mw"] = device.info.missing.get("power_limit_mw", NOT_SUPPORTED)
    reading.missing = {**dict.fromkeys(NEVER_KNOWN, NOT_SUPPORTED), **probe.missing}
    drop_nonsense(reading)
    if is_gone(batch, probe):
        reading.missing["gpu"] = LOST
    elif (reason := refusal(batch, probe)) and reading.temperature_c is None and reading.processes is None:
        reading.missing["gpu"] = reason
    return reading


def is_gone(batch: Probe, probe: Probe) -> bool:
    answers = batch.missing.get("metrics"), probe.missing.get("memory_used_bytes")
    return LOST in answers or all(answer in GONE for answer in answers)


def refusal(batch: Probe, probe: Probe) -> str:
    """The one answer to all that matters, if it is not an answer."""
    answers = {batch.missing.get("metrics", ""), probe.missing.get("memory_used_bytes", "")}
    return answers.pop() if len(answers) == 1 and NOT_SUPPORTED not in answers else ""


def add_activity(smi: Any, handle: Any, metrics: Metrics, reading: GpuReading, probe: Probe) -> None:
    kinds, now = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
    clocks = smi.AmdSmiClkType
    reading.utilization_percent = probe(
        "utilization_percent", lambda: percent(metrics.get("average_gfx_activity")),
        lambda: percent(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]))
    reading.memory_utilization_percent = probe(
        "memory_utilization_percent", lambda: percent(metrics.get("average_umc_activity")),
        lambda: percent(smi.amdsmi_get_gpu_activity(handle)["umc_activity"]))
    # The hottest spot: newer boards have no other sensor.
    reading.temperature_c = probe(
        "temperature_c", lambda: degrees(metrics.get("temperature_hotspot")),
        lambda: degrees(smi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, now)),
        lambda: degrees(smi.amdsmi_get_temp_metric(handle, kinds.EDGE, now)))
    reading.memory_temperature_c = probe(
        "memory_temperature_c", lambda: degrees(metrics.get("temperature_mem")),
        lambda: degrees(smi.amdsmi_get_temp_metric(handle, kinds.VRAM, now)))
    reading.sm_clock_mhz = probe(
        "sm_clock_mhz", lambda: whole(largest(metrics.get("current_gfxclk"))),
        lambda: whole(largest(metrics.get("current_gfxclks"))),
        lambda: whole(smi.amdsmi_get_clock_info(handle, clocks.GFX)["clk"]))
    reading.memory_clock_mhz = probe(
        "memory_clock_mhz", lambda: whole(metrics.get("current_uclk")),
        lambda: whole(smi.amdsmi_get_clock_info(handle, clocks.MEM)["clk"]))


def add_power(smi: Any, device: Device, metrics: Metrics, reading: GpuReading, probe: Probe) -> None:
    handle = device.handle
    reading.power_mw = probe(
        "power_mw", lambda: milliwatts(metrics, "current_socket_power", "average_socket_power"),
        lambda: milliwatts(smi.amdsmi_get_power_info(handle), "current_socket_power", "average_socket_power"))
    reading.energy_mj = probe("energy_mj", lambda: energy_mj(smi.amdsmi_get_energy_count(handle)))
    if has_two_dies(device.info.name):
        for name in ("power_mw", "energy_mj"):
            if probe.missing.get(name) == NOT_SUPPORTED:
                probe.missing[name] = OTHER_DIE


def milliwatts(told: dict[str, Any], *keys: str) -> int | None:
    """From watts. A board that is switched on never draws none: zero stands for a value that is not there."""
    return next((round(watts * 1000) for key in keys if (watts := number(told.get(key)))), None)


def energy_mj(told: dict[str, Any]) -> int | None:
    ticks = number(told.get("energy_accumulator", told.get("power")), 64)  # the older name
    microjoules = number(told.get("counter_resolution"))
    return round(ticks * microjoules / 1000) if ticks and microjoules else None


def fan_percent(smi: Any, handle: Any) -> float | None:
    speed, most = number(smi.amdsmi_get_gpu_fan_speed(handle, 0)), number(smi.amdsmi_get_gpu_fan_speed_max(handle, 0))
    return None if speed is None or not most else round(100 * speed / most, 1)


def add_counters(meter: Meter, at: float, metrics: Metrics, reading: GpuReading, probe: Probe) -> None:
    passed = meter.advance(at, metrics)
    for name, counter in XGMI.items():
        kib = passed.per_second(counter)
        setattr(reading, name, None if kib is None else kib * KIB)
        if kib is None:
            probe.missing[name] = passed.reason(counter)
    if TIME_BASE in passed.known:
        reading.power_violation_ns, reading.thermal_violation_ns = round(meter.power_ns), round(meter.thermal_ns)
        reading.throttle_reasons = passed.reasons()
        if reading.throttle_reasons is None:
            probe.missing["throttle_reasons"] = passed.reason("ppt_residency_acc")
        return
    probe.missing.update(power_violation_ns=NOT_SUPPORTED, thermal_violation_ns=NOT_SUPPORTED)
    reading.throttle_reasons = probe("throttle_reasons", lambda: held_back(metrics))


def held_back(metrics: Metrics) -> int | None:
    """The binding makes one yes or no of an older board's reasons: that it is held back is known, why is not."""
    for name in ("indep_throttle_status", "throttle_status"):
        if isinstance(told := metrics.get(name), bool):
            return HARDWARE_SLOWDOWN if told else 0
    return None


def add_errors(smi: Any, device: Device, at: float, reading: GpuReading, probe: Probe) -> None:
    """Each count is a file per part of the chip: not every second."""
    meter = device.meter
    if meter.ecc_at is None or at - meter.ecc_at >= ECC_EVERY_S or at < meter.ecc_at:
        slow = Probe()
        meter.ecc = slow("ecc", lambda: smi.amdsmi_get_gpu_total_ecc_count(device.handle)) or {}
        meter.ecc_at, meter.ecc_reason = at, slow.missing.get("ecc", NOT_SUPPORTED)
    for name, key in (("ecc_corrected", "correctable_count"), ("ecc_uncorrected", "uncorrectable_count")):
        value = whole(meter.ecc.get(key), 64)
        setattr(reading, name, value)
        if value is None:
            probe.missing[name] = meter.ecc_reason


def processes_on(smi: Any, handle: Any, probe: Probe) -> list[GpuProcess] | None:
    found = probe("processes", lambda: smi.amdsmi_get_gpu_process_list(handle))
    if found is None:
        return None
    sound = {pid: one for one in found if (pid := whole(one.get("pid"), 32)) is not None and 0 < pid <= MAX_PID}
    if len(sound) < len({one.get("pid") for one in found}):
        probe.missing["processes"] = UNRELIABLE
    return [GpuProcess(pid=pid, memory_used_bytes=process_bytes(one)) for pid, one in sorted(sound.items())]


def process_bytes(told: dict[str, Any]) -> int | None:
    """On the GPU alone: the older figure counts the memory of the machine too."""
    usage = told.get("memory_usage")
    if isinstance(usage, dict) and (used := whole(usage.get("vram_mem"), 64)) is not None:
        return used
    return whole(told.get("mem"), 64)
