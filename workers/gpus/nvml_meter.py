"""One NVIDIA GPU, second by second: what it reads, and what is remembered between two readings."""

import time
from collections.abc import Callable
from typing import Any

import pynvml

from wire.reports import GpuReading
from workers.gpus.nvml_identity import Device
from workers.gpus.nvml_processes import ProcessList
from workers.gpus.nvml_values import (
    ALL_LINKS,
    LOST,
    NOT_SUPPORTED,
    FieldKey,
    Fields,
    FieldValue,
    Probe,
    memory_calls,
)
from workers.gpus.plausible import NONSENSE, drop_nonsense

FIRST_SAMPLE, COUNTER_RESET = "first_sample", "counter_reset"
SELDOM_S = 5.0
KIB = 1024

ENERGY: FieldKey = (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0)
POWER_NOW: FieldKey = (pynvml.NVML_FI_DEV_POWER_INSTANT, 0)
PLAIN_FIELDS: dict[str, FieldKey] = {
    "memory_temperature_c": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0),
    "pcie_replays": (pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 0),
    "ecc_corrected": (pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 0),
    "ecc_uncorrected": (pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0),
    "power_violation_ns": (pynvml.NVML_FI_DEV_PERF_POLICY_POWER, 0),
    "thermal_violation_ns": (pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL, 0),
}
RATES: dict[str, tuple[FieldKey, int]] = {  # -> field, bytes per unit
    "pcie_transmitted_bytes_per_s": ((pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0), 1),
    "pcie_received_bytes_per_s": ((pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0), 1),
    "nvlink_transmitted_bytes_per_s": ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS), KIB),
    "nvlink_received_bytes_per_s": ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS), KIB),
}
FIELDS = [ENERGY, POWER_NOW, *PLAIN_FIELDS.values(), *(key for key, _ in RATES.values())]

VITAL = ("utilization_percent", "memory_used_bytes", "temperature_c", "power_mw", "sm_clock_mhz")
HIDDEN_BY_MIG = dict.fromkeys(("utilization_percent", "temperature_c", "power_mw", "sm_clock_mhz", "memory_clock_mhz",
                               "energy_mj"), NOT_SUPPORTED)


class Meter:
    def __init__(self, device: Device, processes: ProcessList, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._processes = processes
        self._rates = {name: Rate(unit) for name, (_, unit) in RATES.items()}
        self.renew(device)

    def renew(self, device: Device) -> None:
        """After an enumeration: the handle is another, and the driver may have learnt to answer."""
        self.device = device
        self._refused: dict[str, int] = {}
        self._fields = Fields(FIELDS)
        self._seldom: dict[str, int | float | None] = {}
        self._seldom_missing: dict[str, str] = {}
        self._seldom_at = float("-inf")

    def read(self) -> GpuReading:
        device, at = self.device, self._clock()
        if device.silent:
            return GpuReading(uuid=device.uuid, at=at, missing={"gpu": device.silent})
        probe = Probe(refused=self._refused)
        values = self._memory(probe)
        if device.is_slice:
            probe.missing |= HIDDEN_BY_MIG
        else:
            values |= self._figures(probe) | self._of_fields(probe, at) | self._seldom_values(probe)
        values["processes"] = self._processes.read(device.handle, probe)
        reading = GpuReading(uuid=device.uuid, at=at, missing=probe.missing, **values)
        drop_nonsense(reading)
        note_silence(reading, device.is_slice)
        return reading

    def _memory(self, probe: Probe) -> dict[str, Any]:
        memory = probe("memory_used_bytes", *memory_calls(self.device.handle))
        if memory is None:
            return {"memory_total_bytes": self.device.info.memory_total_bytes}
        return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total,
                "memory_reserved_bytes": getattr(memory, "reserved", None)}

    def _figures(self, probe: Probe) -> dict[str, Any]:
        handle = self.device.handle
        busy = probe("utilization_percent", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        return {
            "utilization_percent": float(busy.gpu) if busy else None,
            "memory_utilization_percent": float(busy.memory) if busy else None,
            "temperature_c": probe("temperature_c", *temperature_calls(handle)),
            "sm_clock_mhz": probe("sm_clock_mhz",
                                  lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": probe("memory_clock_mhz",
                                      lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            "throttle_reasons": probe("throttle_reasons",
                                      lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                                      lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }

    def _of_fields(self, probe: Probe, at: float) -> dict[str, Any]:
        handle, found = self.device.handle, self._fields.read(self.device.handle)
        values: dict[str, Any] = {
            "power_mw": probe("power_mw", lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
                              lambda: whole(found[POWER_NOW])),
            "energy_mj": whole(found[ENERGY]),
        }
        if values["energy_mj"] is None:
            values["energy_mj"] = probe("energy_mj", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        for name, key in PLAIN_FIELDS.items():
            values[name] = whole(found[key])
            if found[key].value is None:
                probe.missing[name] = found[key].reason
        for name, (key, _) in RATES.items():
            values[name], reason = self._rates[name].after(found[key], at)
            if reason:
                probe.missing[name] = reason
        return values

    def _seldom_values(self, probe: Probe) -> dict[str, Any]:
        """What changes slowly or costs more; in between the last answer stands."""
        now = time.monotonic()
        if now - self._seldom_at >= SELDOM_S:
            handle, aside = self.device.handle, Probe(refused=self._refused)
            self._seldom = {
                "encoder_percent": aside("encoder_percent", lambda: pynvml.nvmlDeviceGetEncoderUtilization(handle)[0]),
                "decoder_percent": aside("decoder_percent", lambda: pynvml.nvmlDeviceGetDecoderUtilization(handle)[0]),
                "performance_state": aside("performance_state", lambda: pynvml.nvmlDeviceGetPerformanceState(handle)),
                "fan_percent": aside("fan_percent", lambda: pynvml.nvmlDeviceGetFanSpeed(handle)),
                "power_limit_mw": aside("power_limit_mw", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
            }
            self._seldom_missing, self._seldom_at = aside.missing, now
        probe.missing |= self._seldom_missing
        return dict(self._seldom)


class Rate:
    """Bytes per second from a counter, by the driver's own clock where it has one."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._before: tuple[float, float] | None = None  # value, seconds
        self._rate: float | None = None

    def after(self, now: FieldValue, at: float) -> tuple[float | None, str]:
        """-> the rate, or None and why there is none."""
        if now.value is None:
            self._before = None
            return None, now.reason
        seconds = now.at_us / 1e6 if now.at_us > 0 else at
        before, self._before = self._before, (now.value, seconds)
        if before is None:
            self._rate = None
            return None, FIRST_SAMPLE
        grown, elapsed_s = now.value - before[0], seconds - before[1]
        if grown < 0 or elapsed_s < 0:
            self._rate = None
            return None, COUNTER_RESET
        if elapsed_s > 0:
            self._rate = grown * self._unit_bytes / elapsed_s
        # Else the driver has not sampled anew: what was true a moment ago still is.
        return self._rate, "" if self._rate is not None else FIRST_SAMPLE


def temperature_calls(handle: Any) -> tuple[Callable[[], float], ...]:
    return (lambda: float(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)),
            lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)))


def whole(found: FieldValue) -> int | None:
    try:
        return None if found.value is None else int(found.value)
    except (ValueError, OverflowError):  # NaN, infinity
        return -1 << 62  # outside of every bound


def note_silence(reading: GpuReading, is_slice: bool) -> None:
    """A GPU that answers nothing at all is gone, whatever the code it refuses with."""
    if LOST in reading.missing.values():
        reading.missing["gpu"] = LOST
        return
    vital = ("memory_used_bytes", "processes") if is_slice else VITAL
    reasons = {reading.missing.get(name, "") for name in vital} - {NOT_SUPPORTED}
    if len(reasons) == 1 and (reason := reasons.pop()) not in {"", NONSENSE}:
        reading.missing["gpu"] = reason
