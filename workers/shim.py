"""The shim: looks after one attempt, detached from the worker, with no network and no secrets.

Started as a bare interpreter with the standard library alone (see supervisor.spawn). It holds the attempt's lock for
its life, starts the command, ends it when it must, and writes down how it ended. It is on the path of every job's
start: whatever is not needed for that comes after it.
"""

import os
import select
import sys
import time

from workers import plan as disk
from workers import runtimes
from workers.plan import Pairs, Plan
from workers.runtimes.base import LaunchFailed
from workers.runtimes.process import ignore_endings
from workers.trim import Trimmer

SIGTERM = 15

IDLE_S = 1.0  # stop requests come with a nudge; this is for a nudge that was lost
TRIM_S = 0.2
ENDING_S = 0.05
LEFTOVER_GRACE_S = 5.0  # for what the command left behind when it ended
FIRST_FREE_FD = 3

EXITED, EXIT_CODE, SIGNAL, LAUNCH_FAILED = "exited", "exit_code", "signal", "launch_failed"
STOP_REQUESTED, TIME_LIMIT, OUT_OF_MEMORY = "stop_requested", "time_limit", "out_of_memory"


class Shim:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        with open(self.path(disk.PLAN), "rb") as file:
            self.plan: Plan = disk.decode_plan(file.read())
        self.wake_fd = os.open(self.path(disk.WAKE), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.trimmers = [Trimmer(self.log_path(name), self.plan.limits.log_cap_bytes) for name in self.plan.streams]
        self.waiter = select.poll()
        self.waiter.register(self.wake_fd, select.POLLIN)
        self.started_s = time.monotonic()
        self.main_ended_s: float | None = None
        self.ending: str | None = None  # why we end it, while the command still lives
        self.term_since_s = 0.0
        self.kill_at_s: float | None = None
        self.killing_since_s: float | None = None
        self.unkillable = False
        # Last: it takes from the kernel what must be given back.
        self.runtime = runtimes.load(self.plan.runtime)(self.plan)

    def run(self) -> None:
        boot = disk.boot_id()
        pid = os.getpid()
        disk.write_record(self.path(disk.SHIM), [("pid", str(pid)), ("start_time", str(disk.start_time(pid))),
                                                 ("boot_id", boot), *self.runtime.record()])
        if disk.read_record(self.path(disk.STOP)) is not None:
            self.conclude(STOP_REQUESTED, [])
            return
        try:
            main = self.start()
        except LaunchFailed as error:
            self.conclude(LAUNCH_FAILED, [("message", str(error))])
            return
        self.note(disk.STATUS, [("pid", str(main)), ("start_time", str(disk.start_time(main)))])
        self.runtime.settle()
        self.watch(main)
        self.conclude(*self.outcome())

    def start(self) -> int:
        fds = [os.open(self.log_path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
               for name in self.plan.streams]
        try:
            return self.runtime.start(fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def watch(self, main: int) -> None:
        """Returns when nothing of the run lives."""
        main_fd = os.pidfd_open(main)
        self.waiter.register(main_fd, select.POLLIN)
        while not self.runtime.wait():
            now = time.monotonic()
            if self.runtime.main_status is None:
                self.check_stop(now)
                self.check_time(now)
            elif self.main_ended_s is None:
                self.waiter.unregister(main_fd)
                self.main_ended_s = now
                self.end_leftover(now)
            self.escalate(now)
            self.trim(now)
            self.sleep(now)
        os.close(main_fd)

    def check_stop(self, now: float) -> None:
        """A request that comes while we end it for another reason may still shorten the grace."""
        request = disk.read_record(self.path(disk.STOP))
        if request is not None:
            self.terminate(STOP_REQUESTED, float(request["grace_s"]), now)

    def check_time(self, now: float) -> None:
        limit = self.plan.limits.time_limit_s
        if limit is not None and now - self.started_s >= limit:
            self.terminate(TIME_LIMIT, self.plan.limits.grace_s, now)

    def terminate(self, why: str, grace_s: float, now: float) -> None:
        deadline = now + grace_s
        if self.ending is None:
            if self.runtime.wait() or self.runtime.main_status is not None:
                return  # it ended by itself at this very moment: that is its true result
            self.ending = why
            self.term_since_s = now
            self.runtime.signal(SIGTERM)
        elif why == STOP_REQUESTED:
            deadline = self.term_since_s + grace_s
        self.kill_at_s = min(self.kill_at_s or deadline, deadline)

    def end_leftover(self, now: float) -> None:
        self.runtime.signal_tree(SIGTERM)
        self.kill_at_s = min(self.kill_at_s or now + LEFTOVER_GRACE_S, now + LEFTOVER_GRACE_S)

    def escalate(self, now: float) -> None:
        if self.kill_at_s is None or now < self.kill_at_s:
            return
        self.killing_since_s = self.killing_since_s or now
        self.runtime.kill_tree()
        if now - self.killing_since_s > self.plan.limits.unkillable_s and not self.unkillable:
            self.unkillable = True
            pids = ", ".join(str(pid) for pid in self.runtime.members()[:10])
            self.note(disk.STUCK, [("message", f"the kernel does not end process {pids}; its GPUs stay taken")])

    def trim(self, now: float) -> None:
        if now - self.started_s < IDLE_S:
            return
        for trimmer in list(self.trimmers):
            try:
                trimmer.trim()
            except OSError as error:
                self.trimmers.remove(trimmer)
                print(error, file=sys.stderr)

    def sleep(self, now: float) -> None:
        wait_s = TRIM_S if self.trimmers else IDLE_S
        if self.unkillable:
            wait_s = IDLE_S
        elif self.main_ended_s is not None or self.killing_since_s is not None:
            wait_s = ENDING_S
        elif self.kill_at_s is not None:
            wait_s = min(wait_s, max(0.001, self.kill_at_s - now))
        for fd, _ in self.waiter.poll(wait_s * 1000):
            if fd == self.wake_fd:
                os.read(fd, 4096)

    def outcome(self) -> tuple[str, Pairs]:
        status = self.runtime.main_status
        code = 0 if status is None else os.waitstatus_to_exitcode(status)
        pairs: Pairs = [("exit_code", str(code))] if code >= 0 else [("signal", str(-code))]
        oom_kills = self.runtime.oom_kills()
        if oom_kills is not None:
            pairs.append(("oom_kills", str(oom_kills)))
        if self.ending is not None:
            return self.ending, pairs
        if oom_kills and code != 0:
            return OUT_OF_MEMORY, pairs
        if code < 0:
            return SIGNAL, pairs
        return (EXIT_CODE if code else EXITED), pairs

    def conclude(self, reason: str, pairs: Pairs) -> None:
        disk.write_record(self.path(disk.EXIT), [("reason", reason), *self.moment(), *pairs, *self.log_sizes()])
        self.runtime.clean_up()
        self.tell()

    def note(self, record: str, pairs: Pairs) -> None:
        disk.write_record(self.path(record), [*self.moment(), *pairs])
        self.tell()

    def moment(self) -> Pairs:
        return [("at", repr(time.time())), ("elapsed_s", repr(disk.boot_clock_s() - self.plan.accepted_s))]

    def log_sizes(self) -> Pairs:
        sizes = []
        for name in self.plan.streams:
            try:
                sizes.append((f"log.{name}", str(os.stat(self.log_path(name)).st_size)))
            except OSError:
                pass  # the run removed it
        return sizes

    def tell(self) -> None:
        disk.nudge(f"{os.path.dirname(self.directory)}/.{disk.CHANGED}")

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def log_path(self, stream: str) -> str:
        return f"{self.directory}/{disk.LOGS}/{stream}.log"


def main(directory: str, lock_fd: int) -> None:
    """`lock_fd` is the attempt's lock, taken by whoever starts us: there is no moment at which nobody holds it."""
    ignore_endings()
    os.set_inheritable(lock_fd, False)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= FIRST_FREE_FD and int(name) != lock_fd:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own
    shim = Shim(directory)
    shim.run()
