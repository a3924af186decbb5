"""Whose the processes on a GPU are. In a container the pids are those of the host, and nothing is known of them."""

import time
from dataclasses import dataclass

from wire.reports import GpuProcess, GpuReading
from workers.gpus import procfs

ATTEMPT_VARIABLE = "GPUYARD_ATTEMPT_ID"
LOOK_AGAIN_AFTER_S = 5.0
"""A process may become another program; it cannot change whose it is."""


@dataclass(frozen=True, slots=True)
class Owner:
    start_ticks: int
    looked_at: float
    user: str | None
    command: str | None
    attempt: str | None
    start_time: float | None
    container: str | None


class Owners:
    def __init__(self) -> None:
        self._known: dict[int, Owner] = {}

    def named(self, reading: GpuReading) -> GpuReading:
        for process in reading.processes or ():
            self._describe(process)
        return reading

    def _describe(self, process: GpuProcess) -> None:
        stat = procfs.stat(process.pid)
        if stat is None:
            self._known.pop(process.pid, None)
            return
        known, now = self._known.get(process.pid), time.monotonic()
        if known is None or known.start_ticks != stat.start_ticks or now - known.looked_at >= LOOK_AGAIN_AFTER_S:
            self._forget_old(now)
            known = self._known[process.pid] = owner(process.pid, stat, now)
        process.user, process.command, process.attempt = known.user, known.command, known.attempt
        process.start_time, process.container = known.start_time, known.container

    def _forget_old(self, now: float) -> None:
        self._known = {pid: one for pid, one in self._known.items() if now - one.looked_at < 2 * LOOK_AGAIN_AFTER_S}


def owner(pid: int, stat: procfs.Stat, now: float) -> Owner:
    environment = procfs.environment(pid)
    return Owner(
        start_ticks=stat.start_ticks, looked_at=now, user=procfs.user(pid), command=procfs.command(pid),
        attempt=procfs.variable(environment, ATTEMPT_VARIABLE) if environment else None,
        start_time=procfs.started_at(stat), container=procfs.container(pid),
    )
