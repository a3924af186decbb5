"""The little that is needed from /proc. A process that has gone, or is not ours to read, is None."""

import os
import pwd
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COMMAND_LIMIT = 200
CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?=$|[./:])", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stat:
    parent: int
    start_ticks: int
    cpu_ticks: int
    resident_bytes: int


def pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def entries() -> list[tuple[int, int]]:
    """Each pid with a number that another process of the same pid will not have."""
    return [(int(entry.name), entry.inode()) for entry in os.scandir("/proc") if entry.name.isdigit()]


def environment(pid: int) -> bytes | None:
    return _content(pid, "environ")


def variable(environment: bytes, name: str) -> str | None:
    """The value of one variable in a raw environment block."""
    start = f"{name}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(start):
            return entry[len(start):].decode(errors="replace")
    return None


def arguments(pid: int) -> list[str]:
    raw = _content(pid, "cmdline") or b""
    return [word.decode(errors="replace") for word in raw.rstrip(b"\0").split(b"\0") if word]


def command(pid: int) -> str | None:
    return " ".join(arguments(pid))[:COMMAND_LIMIT] or None


def user(pid: int) -> str | None:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def stat(pid: int) -> Stat | None:
    raw = _content(pid, "stat")
    if not raw:
        return None
    # The name is in parentheses and may hold anything, parentheses too.
    words = raw[raw.rindex(b")") + 2:].split()
    return Stat(
        parent=int(words[1]),
        start_ticks=int(words[19]),
        cpu_ticks=int(words[11]) + int(words[12]),
        resident_bytes=int(words[21]) * PAGE_BYTES,
    )


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def started_at(stat: Stat) -> float:
    """Seconds since the epoch. The kernel's own figure, so that it is the same at every look."""
    return _boot_time() + stat.start_ticks / CLOCK_TICKS


def container(pid: int) -> str | None:
    """The id of the container that a process runs in, as Docker, Podman, containerd and CRI-O write it."""
    found = CONTAINER.findall((_content(pid, "cgroup") or b"").decode(errors="replace"))
    return found[-1] if found else None


def memory_total_bytes() -> int | None:
    """Of the machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


@cache
def _boot_time() -> int:
    raw = Path("/proc/stat").read_text()
    return next(int(line.split()[1]) for line in raw.splitlines() if line.startswith("btime "))


def _content(pid: int, name: str) -> bytes | None:
    try:
        # A plain descriptor: a scan opens hundreds of these each second.
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(descriptor)
