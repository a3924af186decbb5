"""Figures that cannot be true, whoever made the board: a driver in trouble answers with anything."""

from wire.reports import GpuReading

NONSENSE = "nonsense"

BOUNDS: dict[str, tuple[float, float]] = {
    "utilization_percent": (0, 100), "memory_utilization_percent": (0, 100),
    "encoder_percent": (0, 100), "decoder_percent": (0, 100), "fan_percent": (0, 255),
    "power_mw": (0, 5_000_000), "power_limit_mw": (0, 5_000_000), "energy_mj": (0, 1 << 62),
    "temperature_c": (-60, 200), "memory_temperature_c": (-60, 200),
    "sm_clock_mhz": (0, 20_000), "memory_clock_mhz": (0, 40_000), "performance_state": (0, 15),
    "memory_total_bytes": (1, 1 << 46), "memory_used_bytes": (0, 1 << 46), "memory_reserved_bytes": (0, 1 << 46),
    "pcie_received_bytes_per_s": (0, 1e12), "pcie_transmitted_bytes_per_s": (0, 1e12),
    "nvlink_received_bytes_per_s": (0, 1e14), "nvlink_transmitted_bytes_per_s": (0, 1e14),
    "pcie_replays": (0, 1 << 53), "ecc_corrected": (0, 1 << 53), "ecc_uncorrected": (0, 1 << 53),
    "power_violation_ns": (0, 1 << 62), "thermal_violation_ns": (0, 1 << 62),
}
"""Outside of these a figure cannot be true, whatever the board."""


def drop_nonsense(reading: GpuReading) -> None:
    for name, (low, high) in BOUNDS.items():
        value = getattr(reading, name)
        if value is not None and not low <= value <= high:
            setattr(reading, name, None)
            reading.missing[name] = NONSENSE
    used, total = reading.memory_used_bytes, reading.memory_total_bytes
    if used is not None and total is not None and used > total:
        reading.memory_used_bytes = None
        reading.missing["memory_used_bytes"] = NONSENSE
