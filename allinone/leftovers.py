"""Processes of jobs that would outlive the portal: found by the mark in their environment, and ended with it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from allinone.children import wait_until
from allinone.supervision import reap_adopted

MARK = b"GPUYARD_ATTEMPT_ID="
KILL_S = 3.0


def of_jobs(state_dir: Path) -> set[int]:
    """Shims and ranks of an attempt whose spool lies below this state directory, whoever their parent is now."""
    spool = os.fsencode(str(state_dir / "node" / "spool")) + b"/"
    others = (pid for pid in every_pid() if pid != os.getpid())
    return {pid for pid in others if belongs(read(pid, "environ"), read(pid, "cmdline"), spool)}


def belongs(environ: bytes, argv: bytes, spool: bytes) -> bool:
    marked = any(variable.startswith(MARK) for variable in environ.split(b"\0"))
    return spool in argv or (marked and spool in environ)


def descendants(root: int) -> set[int]:
    """Everything below `root`. With adopt_orphans() this holds even what was detached on purpose."""
    children: dict[int, list[int]] = {}
    for pid in every_pid():
        parent = parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    open_ends = [root]
    while open_ends:
        for child in children.get(open_ends.pop(), []):
            if child not in found:
                found.add(child)
                open_ends.append(child)
    return found


def end(find: Callable[[], set[int]], grace_s: float) -> set[int]:
    """TERM, time to obey, then KILL until nothing new appears. -> what could not be ended (stuck in the kernel)."""
    ended = send(find(), signal.SIGTERM)
    if ended:
        wait_until(lambda: not find(), grace_s)
    deadline = time.monotonic() + KILL_S
    while (left := find()) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        reap_adopted(set())
        time.sleep(0.02)
    return left


def send(pids: set[int], number: signal.Signals) -> set[int]:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return pids


def every_pid() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in {"Z", "X"} else int(fields[1])


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
