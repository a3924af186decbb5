"""A control group per attempt and node: the one handle on a process tree that no process can slip out of by forking."""

import os

from workers.plan import Pairs

PARENT = "gpuyard"
SHIMS = "shims"

V2_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
V1_ROOT = "/sys/fs/cgroup/freezer"


class Cgroup:
    def __init__(self, path: str, version: str) -> None:
        self.path = path
        self.version = version

    def pids(self) -> list[int]:
        try:
            return [int(line) for line in _read(f"{self.path}/cgroup.procs").split()]
        except OSError:
            return []

    def enter(self, pid: int = 0) -> None:
        """0 is the caller."""
        _write(f"{self.path}/cgroup.procs", str(pid))

    def kill(self) -> None:
        """One round; on v1 a process may still be forking while it is frozen, so it takes several."""
        if self.version == "v2":
            _try_write(f"{self.path}/cgroup.kill", "1")
        else:
            _try_write(f"{self.path}/freezer.state", "FROZEN")
        for pid in self.pids():  # kernels before 5.14 have no cgroup.kill
            _kill(pid)
        if self.version == "v1":
            _try_write(f"{self.path}/freezer.state", "THAWED")

    def oom_kills(self) -> int | None:
        """How many processes the kernel ended for want of memory. -> None where memory is not accounted."""
        try:
            events = dict(line.split() for line in _read(f"{self.path}/memory.events").splitlines())
        except OSError:
            return None
        return int(events.get("oom_kill", "0"))

    def remove(self) -> None:
        try:
            os.rmdir(self.path)
        except OSError:
            pass  # a zombie elsewhere may still hold it; an empty directory harms nobody

    def pairs(self) -> Pairs:
        return [("cgroup", self.path), ("cgroup_version", self.version)]


def create(share: str, wanted: str = "auto") -> Cgroup | None:
    """-> the group of one node's share of an attempt; None where this account may not make one, or `wanted` is none."""
    for version, root in _roots(wanted):
        parent = f"{root}/{PARENT}"
        path = f"{parent}/attempt-{share}"
        try:
            _make(parent)
            if version == "v2":
                _try_write(f"{parent}/cgroup.subtree_control", "+memory")
            _make(path)
        except OSError:
            continue
        if os.access(f"{path}/cgroup.procs", os.W_OK):
            return Cgroup(path, version)
    return None


def of_record(record: dict[str, str]) -> Cgroup | None:
    path = record.get("cgroup")
    return Cgroup(path, record.get("cgroup_version", "v2")) if path else None


def leave_unit(group: Cgroup) -> None:
    """Moves the caller out of the group of whoever started it, so that ending that unit does not end the shim."""
    shims = Cgroup(f"{os.path.dirname(group.path)}/{SHIMS}", group.version)
    try:
        _make(shims.path)
        shims.enter()
    except OSError:
        pass  # it then depends on how the unit is stopped


def _roots(wanted: str) -> list[tuple[str, str]]:
    found = []
    if wanted in ("auto", "v2"):
        found += [("v2", root) for root in V2_ROOTS if os.path.exists(f"{root}/cgroup.procs")]
    if wanted in ("auto", "v1") and os.path.exists(f"{V1_ROOT}/cgroup.procs"):
        found.append(("v1", V1_ROOT))
    return found


def _make(path: str) -> None:
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        pass


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except (ProcessLookupError, PermissionError):
        pass


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _try_write(path: str, text: str) -> None:
    try:
        _write(path, text)
    except OSError:
        pass
