"""Child processes: started so that they do not outlive us, ended politely, then firmly."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allinone.faults import disk_errors_named

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Account:
    """Whom a child runs as; group and supplementary groups are always set with the user."""

    name: str
    uid: int
    gid: int


@dataclass
class Child:
    """One process and the file that takes what it says. `orphan_signal` reaches it when this process dies.

    The kernel ties that signal to the *thread* that started the child: start children from a thread that stays.
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str]
    cwd: Path | None = None
    account: Account | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    orphan_signal: signal.Signals = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        with disk_errors_named(self.log), self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env=dict(self.env),
                start_new_session=True,
                preexec_fn=die_with_parent(self.orphan_signal),
                **as_account(self.account),
            )

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def exit_code(self) -> int | None:
        """None while it runs, and before it was started."""
        return self.process.poll() if self.process else None

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self, timeout_s: float = 8.0) -> None:
        self.signal(self.stop_signal)
        self.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Waits for its end; past the deadline it is killed."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)

    def last_words(self, lines: int = 5) -> str:
        return tail(self.log, lines)


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    parent = os.getpid()

    def prepare() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return prepare


def adopt_orphans() -> None:
    """From now on a grandchild whose parent ended becomes our child instead of init's, and can be found."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def as_account(account: Account | None) -> dict[str, Any]:
    # Without extra_groups a child of root keeps root's supplementary groups.
    return {"user": account.uid, "group": account.gid, "extra_groups": []} if account else {}


def wait_until(done: Callable[[], bool], timeout_s: float, pause_s: float = 0.02) -> bool:
    """-> whether `done()` became true within the time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


def tail(path: Path, lines: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
