"""What the supervisor and the shim write for each other: the plan of a run and small records on disk.

The shim is on the path of every job's start, so this module imports nothing that it does not need: `dataclasses`,
`typing`, `json` and `signal` would each cost more milliseconds than the fork itself.

A record is lines of `key=value`, closed by the line `end`. Without that line it is torn and counts as not written.
"""

import os
import time

LOCK = "lock"
PLAN = "plan"
SHIM = "shim"
STATUS = "status"
STUCK = "stuck"
EXIT = "exit"
STOP = "stop"
WAKE = "wake"
LOGS = "logs"
CHANGED = "changed"
"""FIFO beside the attempts: a byte in it means that some attempt has news."""

RESERVED_BYTES = 4096
"""Set aside for each record before a run starts, so that it can be stopped and its end be told on a full disk."""

RECORDS = (SHIM, STATUS, STUCK, STOP, EXIT)

END_LINE = b"end\n"

Pairs = list[tuple[str, str]]


class Limits:
    """How a run is ended and what it may write."""

    def __init__(self, grace_s: float = 45.0, time_limit_s: float | None = None,
                 log_cap_bytes: int = 512 * 1024 * 1024, cgroups: str = "auto",
                 unkillable_s: float = 60.0) -> None:
        self.grace_s = grace_s
        self.time_limit_s = time_limit_s
        self.log_cap_bytes = log_cap_bytes
        self.cgroups = cgroups  # auto | v2 | v1 | none
        self.unkillable_s = unkillable_s  # of killing, after which it is told that the kernel does not end the run


class Plan:
    """One command line of one node. `streams[0]` takes the output of the command itself."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: str, streams: list[str],
                 stops_tree: bool = True, limits: Limits | None = None) -> None:
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.streams = streams
        self.stops_tree = stops_tree  # False: the command hands SIGTERM on to its ranks itself
        self.limits = limits or Limits()
        self.runtime = "process"
        self.share = ""  # names the control group
        self.accepted_s = 0.0  # boot clock

    def encode(self) -> bytes:
        limits = self.limits
        pairs: Pairs = [("share", self.share), ("runtime", self.runtime), ("accepted_s", repr(self.accepted_s)),
                        ("cwd", self.cwd)]
        pairs += [("argv", word) for word in self.argv]
        pairs += [("env", f"{name}={value}") for name, value in self.env.items()]
        pairs += [("stream", name) for name in self.streams]
        pairs += [("stops_tree", "1" if self.stops_tree else "0"), ("grace_s", repr(limits.grace_s)),
                  ("log_cap_bytes", str(limits.log_cap_bytes)), ("cgroups", limits.cgroups),
                  ("unkillable_s", repr(limits.unkillable_s))]
        if limits.time_limit_s is not None:
            pairs.append(("time_limit_s", repr(limits.time_limit_s)))
        return encode(pairs)


def decode_plan(data: bytes) -> Plan:
    pairs = decode(data)
    if pairs is None:
        raise ValueError("the plan is torn")
    one = dict(pairs)
    limit = one.get("time_limit_s")
    plan = Plan(
        argv=_all(pairs, "argv"), env=dict(item.split("=", 1) for item in _all(pairs, "env")), cwd=one["cwd"],
        streams=_all(pairs, "stream"), stops_tree=one["stops_tree"] == "1",
        limits=Limits(float(one["grace_s"]), float(limit) if limit else None, int(one["log_cap_bytes"]),
                      one["cgroups"], float(one["unkillable_s"])),
    )
    plan.share, plan.runtime = one["share"], one["runtime"]
    plan.accepted_s = float(one["accepted_s"])
    return plan


def encode(pairs: Pairs) -> bytes:
    """Raises ValueError on a NUL: no argument, environment or path can hold one."""
    lines = "".join(f"{key}={_escape(value)}\n" for key, value in pairs)
    data = lines.encode("utf-8", "surrogateescape") + END_LINE
    if b"\0" in data:
        raise ValueError("a NUL byte cannot be part of a command, a path or an environment")
    return data


def decode(data: bytes) -> Pairs | None:
    """-> the pairs, None if the record is not there or torn. What lies behind its end is ignored."""
    body, end, _ = data.partition(b"\n" + END_LINE)
    if not end:
        return None
    lines = body.decode("utf-8", "surrogateescape").split("\n")
    return [(key, _unescape(value)) for key, _, value in (line.partition("=") for line in lines)]


def read_record(path: str) -> dict[str, str] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        pairs = decode(_read_all(fd))
    finally:
        os.close(fd)
    return None if pairs is None else dict(pairs)


def reserve(path: str, size_bytes: int = RESERVED_BYTES) -> None:
    """Makes a file of zeros whose blocks are allocated; durable with its directory."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    finally:
        os.close(fd)


def write_record(path: str, pairs: Pairs) -> None:
    """Into a reserved file, in place: it needs no free block. Durable when it returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, encode(pairs), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def nudge(fifo: str) -> bool:
    """Puts a byte into a FIFO without ever waiting. -> False if nobody reads it."""
    try:
        fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, b"!")
    except BlockingIOError:
        pass  # already full of news
    finally:
        os.close(fd)
    return True


def boot_clock_s() -> float:
    """Runs on through a suspend and never jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """In clock ticks since boot. With the boot id it makes a pid unique. -> None if there is no such process."""
    fields = stat_fields(pid)
    return None if fields is None else int(fields[19])


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: 0 state, 1 parent, 2 group, 3 session, 19 start time."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _all(pairs: Pairs, key: str) -> list[str]:
    return [value for name, value in pairs if name == key]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    parts = value.split("\\\\")
    return "\\".join(part.replace("\\n", "\n") for part in parts)


def _read_all(fd: int) -> bytes:
    chunks = []
    while chunk := os.read(fd, 1 << 20):
        chunks.append(chunk)
    return b"".join(chunks)
