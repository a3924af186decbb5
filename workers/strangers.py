"""Ending a process that no attempt explains: exactly the one that was meant, or none."""

import os
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import psutil

from wire.hardware import StopForeignOrder
from workers.gpus import procfs

ATTEMPT_VARIABLE = "GPUYARD_ATTEMPT_ID"
SAME_START_WITHIN_S = 2.0  # the clock of the machine may have been set meanwhile
KILLED_WITHIN_S = 10.0
LOOK_EVERY_S = 0.05


class Attempts(Protocol):
    def active(self) -> list[str]: ...

    def processes(self, attempt: str) -> set[int]: ...


@dataclass(frozen=True)
class Outcome:
    state: str  # done | failed
    message: str


def end_stranger(order: StopForeignOrder, attempts: Attempts) -> Outcome:
    """TERM, then KILL after the grace. psutil checks before each signal that the number still means this process."""
    pid = order.pid
    process = meant(order)
    if process is None:
        return Outcome("done", f"Process {pid} was gone already.")
    refusal = why_not(pid, attempts)
    if refusal:
        return Outcome("failed", refusal)
    try:
        process.terminate()
        if has_ended(process, order.grace_s):
            return Outcome("done", f"Process {pid} ended when it was asked to.")
        process.kill()
    except psutil.NoSuchProcess:
        return Outcome("done", f"Process {pid} ended.")
    except psutil.AccessDenied:
        owner = procfs.user(pid)
        return Outcome("failed", f"Process {pid} of {owner} cannot be ended: the node agent needs root for that.")
    if has_ended(process, KILLED_WITHIN_S):
        return Outcome("done", f"Process {pid} did not end within {order.grace_s:.0f} s and was killed.")
    return Outcome("failed", f"Process {pid} was killed and does not go away: it hangs in the kernel or a driver.")


def meant(order: StopForeignOrder) -> psutil.Process | None:
    """None: it is gone, and perhaps its number was given to another one."""
    try:
        process = psutil.Process(order.pid)
        same = abs(process.create_time() - order.start_time) <= SAME_START_WITHIN_S
    except psutil.NoSuchProcess:
        return None
    return process if same and not is_over(process) else None


def why_not(pid: int, attempts: Attempts) -> str:
    """-> why this process is not a stranger to be ended."""
    if pid <= 1 or pid in own_line():
        return f"Process {pid} belongs to this node itself."
    environment = procfs.environment(pid)
    if environment is None:
        return f"It cannot be seen whose process {pid} is, so it is left alone: the node agent needs root for that."
    attempt = procfs.variable(environment, ATTEMPT_VARIABLE)
    for active in attempts.active():
        if active == attempt or pid in attempts.processes(active):
            return f"Process {pid} belongs to attempt {active}, which runs."
    return ""


def own_line() -> set[int]:
    """This process and those above it."""
    return {os.getpid()} | {parent.pid for parent in psutil.Process().parents()}


def has_ended(process: psutil.Process, within_s: float) -> bool:
    """Not by `wait`: a process whose parent never asks how it ended stays a zombie, and holds nothing any more."""
    deadline, turn = time.monotonic() + within_s, threading.Event()
    while not is_over(process):
        if time.monotonic() >= deadline:
            return False
        turn.wait(LOOK_EVERY_S)
    return True


def is_over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
