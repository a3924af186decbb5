"""Finding and ending processes by their place in the process table, where no control group holds them."""

import os

from workers.plan import start_time, stat_fields

SIGKILL, SIGSTOP = 9, 19
STOP_ROUNDS = 20


def descendants(root: int) -> list[int]:
    """Everything below `root`, without it."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        fields = stat_fields(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    front = [root]
    while front:
        below = children.get(front.pop(), [])
        found += below
        front += below
    return found


def kill_descendants(root: int) -> None:
    """Stops the whole tree first, so that nothing forks away while it is being ended."""
    stopped: set[int] = set()
    for _ in range(STOP_ROUNDS):
        new = [pid for pid in descendants(root) if pid not in stopped]
        if not new:
            break
        for pid in new:
            send(pid, SIGSTOP)
        stopped.update(new)
    for pid in descendants(root):
        send(pid, SIGKILL)


def marked(marks: dict[str, str]) -> list[int]:
    """Live processes that were started with all of these in their environment."""
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    return [pid for pid in all_pids() if wanted <= _environment(pid) and not is_zombie(pid)]


def in_session(session: int, since_ticks: int) -> list[int]:
    """Live processes of a session whose leader started at `since_ticks`; an older one only has the same number."""
    found = []
    for pid in all_pids():
        fields = stat_fields(pid)
        if fields and int(fields[3]) == session and int(fields[19]) >= since_ticks and fields[0] not in "ZX":
            found.append(pid)
    return found


def kill_checked(pids: list[int]) -> None:
    """Ends processes that are not our children: each must still be the one that was found."""
    for pid, started in [(pid, start_time(pid)) for pid in pids]:
        if started is not None and start_time(pid) == started:
            send(pid, SIGKILL)


def is_zombie(pid: int) -> bool:
    fields = stat_fields(pid)
    return fields is None or fields[0] in "ZX"


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _environment(pid: int) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()
