"""Ranks as plain processes of this machine, held by a control group where there is one and by a subreaper everywhere.

The caller is the subreaper: whatever the command starts, however it detaches, ends up below the caller. So «the caller
has no child left» is proof that nothing of the run lives, also where control groups are out of reach.
"""

import ctypes
import os
import resource

from workers.plan import Pairs, Plan
from workers.runtimes import cgroups, tree
from workers.runtimes.base import LaunchFailed, Runtime

PR_SET_CHILD_SUBREAPER = 36
SYS_CLONE3 = {"x86_64": 435, "aarch64": 435}
CLONE_INTO_CGROUP = 0x200000000
CLONE_ARGS_FLAGS, CLONE_ARGS_EXIT_SIGNAL, CLONE_ARGS_CGROUP, CLONE_ARGS_WORDS = 0, 4, 10, 11
SIGHUP, SIGINT, SIGPIPE, SIGTERM, SIGCHLD, SIGXFSZ = 1, 2, 13, 15, 17, 25
SIG_DFL, SIG_IGN = 0, 1
OPEN_FILES = 65536

# Keeps the interpreter locked across the call: after clone3 the child goes on as the one thread it is.
LIBC = ctypes.PyDLL(None, use_errno=True)


class ProcessRuntime(Runtime):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        if LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise LaunchFailed(f"the kernel refuses a subreaper: {os.strerror(ctypes.get_errno())}")
        self.cgroup = cgroups.create(plan.share, plan.limits.cgroups)
        self.main: int | None = None

    def start(self, output_fd: int) -> int:
        report, complaint = os.pipe()
        pid = self._fork()
        if pid == 0:
            _become(self.plan, output_fd, complaint)
        os.close(complaint)
        self.main = pid
        with os.fdopen(report, "rb") as file:
            sentence = file.read().decode("utf-8", "replace")
        if sentence:
            os.waitpid(pid, 0)
            self.main = None
            raise LaunchFailed(sentence)
        return pid

    def signal(self, number: int) -> None:
        if self.plan.stops_tree:
            self.signal_tree(number)
        elif self.main is not None and self.main_status is None:
            tree.send(self.main, number)

    def signal_tree(self, number: int) -> None:
        for pid in self.members():
            tree.send(pid, number)

    def wait(self) -> bool:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self.cgroup is None or not self.cgroup.pids()
            if pid == 0:
                return False
            if pid == self.main:
                self.main_status = status

    def kill_tree(self) -> None:
        if self.cgroup is not None:
            self.cgroup.kill()
        tree.kill_descendants(os.getpid())

    def members(self) -> list[int]:
        held = self.cgroup.pids() if self.cgroup is not None else []
        return sorted({*held, *tree.descendants(os.getpid())})

    def clean_up(self) -> None:
        if self.cgroup is not None:
            self.cgroup.remove()

    def oom_kills(self) -> int | None:
        return self.cgroup.oom_kills() if self.cgroup is not None else None

    def settle(self) -> None:
        if self.cgroup is not None:
            cgroups.leave_unit(self.cgroup)

    def record(self) -> Pairs:
        return self.cgroup.pairs() if self.cgroup is not None else []

    def _fork(self) -> int:
        """-> 0 in the child. Being born in the group costs nothing; moving there halts the machine for milliseconds."""
        if self.cgroup is None:
            return os.fork()
        pid = _clone_into(self.cgroup) if self.cgroup.version == "v2" else -1
        if pid >= 0:
            return pid
        pid = os.fork()
        if pid == 0:
            try:
                self.cgroup.enter()
            except OSError:
                pass  # the subreaper holds it all the same
        return pid


class Leftover:
    """What a shim left behind when it died: found by its group, by the mark in its environment, by its session."""

    def __init__(self, marks: dict[str, str], shim: dict[str, str], status: dict[str, str] | None) -> None:
        self._marks = marks
        self._cgroup = cgroups.of_record(shim)
        self._session = _identity(status)

    def pids(self) -> list[int]:
        found = set(self._cgroup.pids() if self._cgroup is not None else [])
        found.update(tree.marked(self._marks))
        if self._session is not None:
            found.update(tree.in_session(*self._session))
        for pid in list(found):
            found.update(tree.descendants(pid))
        return sorted(pid for pid in found if not tree.is_zombie(pid))

    def kill(self) -> None:
        """One round; to be repeated until `pids` is empty."""
        pids = self.pids()
        if self._cgroup is not None:
            self._cgroup.kill()
        tree.kill_checked(pids)

    def clean_up(self) -> None:
        if self._cgroup is not None:
            self._cgroup.remove()


def live_members(shim: dict[str, str]) -> set[int]:
    """The pids of a run whose shim lives."""
    group = cgroups.of_record(shim)
    held = group.pids() if group is not None else []
    return set(held) or set(tree.descendants(int(shim["pid"])))


def ignore_endings() -> None:
    """When a run ends is the shim's to decide, not that of a terminal or a unit that signals it in passing."""
    for number in (SIGHUP, SIGINT, SIGTERM):
        LIBC.signal(number, ctypes.c_void_p(SIG_IGN))


def _identity(status: dict[str, str] | None) -> tuple[int, int] | None:
    if not status or "pid" not in status or "start_time" not in status:
        return None
    return int(status["pid"]), int(status["start_time"])


def _clone_into(group: cgroups.Cgroup) -> int:
    """-> the pid, 0 in the child, -1 if this kernel cannot."""
    number = SYS_CLONE3.get(os.uname().machine)
    if number is None:
        return -1
    try:
        directory = os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    arguments = (ctypes.c_uint64 * CLONE_ARGS_WORDS)()
    arguments[CLONE_ARGS_FLAGS] = CLONE_INTO_CGROUP
    arguments[CLONE_ARGS_EXIT_SIGNAL] = SIGCHLD
    arguments[CLONE_ARGS_CGROUP] = directory
    size = ctypes.c_size_t(ctypes.sizeof(arguments))
    pid = int(LIBC.syscall(ctypes.c_long(number), ctypes.byref(arguments), size))
    if pid != 0:
        os.close(directory)
    return pid


def _become(plan: Plan, output_fd: int, complaint: int) -> None:
    """The child's last steps in Python. Never returns; what goes wrong is told as a sentence."""
    sentence = "the command could not be started"
    try:
        os.setsid()
        _own_streams(output_fd)
        _own_signals_and_limits()
        _own_worth()
        sentence = f"the working directory {plan.cwd} cannot be entered"
        os.chdir(plan.cwd)
        sentence = f"{plan.argv[0]} cannot be executed"
        os.execve(plan.argv[0], plan.argv, plan.env)
    except OSError as error:
        os.write(complaint, f"{sentence}: {_plain(error)}".encode("utf-8", "replace")[:2000])
    except BaseException as error:
        os.write(complaint, f"{sentence}: {error}".encode("utf-8", "replace")[:2000])
    finally:
        os._exit(127)


def _own_streams(output_fd: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)


def _own_signals_and_limits() -> None:
    for number in (SIGHUP, SIGINT, SIGPIPE, SIGTERM, SIGXFSZ):
        LIBC.signal(number, ctypes.c_void_p(SIG_DFL))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, OPEN_FILES) if hard >= 0 else OPEN_FILES, hard))


def _own_worth() -> None:
    """A worker is often shielded from the kernel's out-of-memory killer, and set to its own umask; a job is not."""
    os.umask(0o022)
    fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    if os.read(fd, 8).startswith(b"-"):
        os.write(fd, b"0")
    os.close(fd)


def _plain(error: OSError) -> str:
    if error.errno == 8:  # ENOEXEC
        return "it is neither a program nor a script that begins with #!"
    return error.strerror or str(error)
