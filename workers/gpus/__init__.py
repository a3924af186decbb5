"""Drivers of GPUs. A driver is a file and a line here, imported when asked for: its library may be absent."""

from collections.abc import Collection
from importlib import import_module
from typing import cast

from workers.gpus.base import DriverUnavailable, GpuDriver, GpuList

__all__ = ["DRIVERS", "SIMULATED", "DriverUnavailable", "GpuDriver", "GpuList", "load"]

SIMULATED = "simulated"

DRIVERS = {
    "nvml": "workers.gpus.nvml.NvmlDriver",
    # The same reading path: the simulator lies beneath the vendor's binding.
    SIMULATED: "workers.gpus.nvml.NvmlDriver",
}


def load(kind: str, *, topology: str | None = None, node: str = "", skip: Collection[int] = ()) -> GpuDriver:
    """-> a driver that is not started. `topology` and `node` shape the simulation; GPUs in `skip` are never asked."""
    if kind not in DRIVERS:
        raise DriverUnavailable(f"There is no GPU driver {kind!r}; the drivers are {', '.join(DRIVERS)}.")
    if kind == SIMULATED:
        import_module("workers.gpus.simulated").install(topology, node)
    module, _, name = DRIVERS[kind].rpartition(".")
    return cast(GpuDriver, getattr(import_module(module), name)(skip=skip))
