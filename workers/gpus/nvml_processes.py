"""Who computes or draws on an NVIDIA GPU. The pids are the host's, also when this runs in a container."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from wire.reports import GpuProcess
from workers.gpus.nvml_values import Probe

UNRELIABLE = "unreliable"
NO_INSTANCE = 0xFFFFFFFF
NO_MEMORY = 0xFFFFFFFFFFFFFFFF
KERNELS_OWN_PID_NAMESPACE = 0xEFFFFFFC
KERNELS_MOST_PID = 1 << 22
SELDOM_S = 5.0
IsAlive = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Pids:
    """What this process can say of a pid of the host."""

    most: int
    is_alive: IsAlive


def pids_of_host() -> Pids:
    """In a container with pids of its own nothing is known of the host's but the kernel's limit."""
    if Path("/proc/self/ns/pid").stat().st_ino != KERNELS_OWN_PID_NAMESPACE:
        return Pids(KERNELS_MOST_PID, anyone)
    return Pids(int(Path("/proc/sys/kernel/pid_max").read_text()), is_alive)


def anyone(_pid: int) -> bool:
    return True


def is_alive(pid: int) -> bool:
    """Not by /proc, which may be mounted so that it hides the processes of others."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class ProcessList:
    """The processes of one GPU or slice, over time.

    Some drivers write the list in another layout than they announce; then pids and sizes are scrambled. What is
    impossible is left out, and the list is called unreliable. A process that has just ended may be listed for a moment.
    """

    def __init__(self, pids: Pids) -> None:
        self._pids = pids
        self._ghosts: set[int] = set()
        self._aside: list[Any] = []
        self._aside_at = float("-inf")

    def read(self, handle: Any, probe: Probe) -> list[GpuProcess] | None:
        computing = probe("processes", *listings(handle, "Compute"))
        if computing is None:
            return None
        found = [*computing, *self._seldom(handle, probe)]
        possible = {one.pid: one for one in reversed(found) if self._is_possible(one.pid)}
        ghosts = {pid for pid in possible if not self._pids.is_alive(pid)}
        if any(one.pid not in possible for one in found) or ghosts & self._ghosts:
            probe.missing["processes"] = UNRELIABLE
        self._ghosts = ghosts
        return [process_of(possible[pid]) for pid in sorted(possible.keys() - ghosts)]

    def _seldom(self, handle: Any, probe: Probe) -> list[Any]:
        """Clients of MPS and graphics come and go slowly."""
        now = time.monotonic()
        if now - self._aside_at >= SELDOM_S:
            aside = Probe(refused=probe.refused)
            lists = [aside(kind, *listings(handle, kind)) for kind in ("MPSCompute", "Graphics")]
            self._aside = [one for listed in lists if listed for one in listed]
            self._aside_at = now
        return [one for one in self._aside if not self._is_possible(one.pid) or self._pids.is_alive(one.pid)]

    def _is_possible(self, pid: int) -> bool:
        return 0 < pid <= self._pids.most


def process_of(raw: Any) -> GpuProcess:
    used = raw.usedGpuMemory
    return GpuProcess(
        pid=raw.pid, memory_used_bytes=None if used == NO_MEMORY else used,
        gpu_instance=instance(raw, "gpuInstanceId"), compute_instance=instance(raw, "computeInstanceId"),
    )


def instance(raw: Any, name: str) -> int | None:
    """Absent from the lists of old drivers."""
    number = getattr(raw, name, None)
    return None if number == NO_INSTANCE else number


def listings(handle: Any, kind: str) -> tuple[Callable[[], list[Any]], ...]:
    newest = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses")
    older = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v2", newest)
    return (lambda: newest(handle), lambda: older(handle))
