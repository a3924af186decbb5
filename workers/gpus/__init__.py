"""Drivers of GPUs. A driver is a file and a line here, imported when asked for: its library may be absent."""

from collections.abc import Collection
from importlib import import_module
from typing import cast

from workers.gpus.amd_boards import AMD_CATALOGUE
from workers.gpus.base import DriverUnavailable, GpuDriver, GpuList, OrderFailed

__all__ = ["AUTO", "DRIVERS", "SIMULATED", "DriverUnavailable", "GpuDriver", "GpuList", "OrderFailed", "load"]

SIMULATED = "simulated"
AUTO = "auto"
"""Whatever this machine has, of both makers too."""

DRIVERS = {
    AUTO: "workers.gpus.either.EitherDriver",
    "nvml": "workers.gpus.nvml.NvmlDriver",
    "amdsmi": "workers.gpus.amdsmi.AmdSmiDriver",
    # The same reading path: the simulator lies beneath the vendor's binding.
    SIMULATED: "workers.gpus.nvml.NvmlDriver",
}


def load(kind: str, *, topology: str | None = None, node: str = "", skip: Collection[int] = ()) -> GpuDriver:
    """-> a driver that is not started. `topology` and `node` shape the simulation; GPUs in `skip` are never asked."""
    if kind not in DRIVERS:
        raise DriverUnavailable(f"There is no GPU driver {kind!r}; the drivers are {', '.join(DRIVERS)}.")
    if kind == SIMULATED and topology in AMD_CATALOGUE.topologies:
        import_module("workers.gpus.simulated_amd").install(topology, node)
        kind = "amdsmi"
    elif kind == SIMULATED:
        import_module("workers.gpus.simulated").install(topology, node)
    module, _, name = DRIVERS[kind].rpartition(".")
    return cast(GpuDriver, getattr(import_module(module), name)(skip=skip))
