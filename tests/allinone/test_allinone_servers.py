"""The embedded servers: started twice, killed, and stopped without a trace."""

import os
import signal
from pathlib import Path

import psycopg
import pytest
import redis

from allinone import postgres, valkey
from allinone.children import wait_until
from allinone.faults import Fault
from allinone.postgres import Postgres
from allinone.valkey import Valkey


@pytest.fixture
def open_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the account of the server may enter; pytest's own are closed."""
    path = tmp_path_factory.mktemp("servers")
    for folder in (path, *path.parents):
        if folder.owner() == Path.home().owner() and folder.stat().st_mode & 0o001 == 0 and "pytest" in str(folder):
            folder.chmod(folder.stat().st_mode | 0o011)
    return path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_was_committed_is_there_after_a_second_start(open_dir: Path) -> None:
    server = Postgres(open_dir / "postgres")
    try:
        with psycopg.connect(server.start()) as link:
            link.execute("CREATE TABLE t AS SELECT 7 AS n")
        server.stop()
        with psycopg.connect(server.start()) as link:
            assert link.execute("SELECT n FROM t").fetchone() == (7,)
            row = link.execute("SELECT current_setting('fsync'), current_setting('listen_addresses')").fetchone()
            assert row == ("on", "")
    finally:
        server.stop()


def test_a_killed_postgres_comes_back_with_its_data(open_dir: Path) -> None:
    server = Postgres(open_dir / "postgres")
    try:
        with psycopg.connect(server.start()) as link:
            link.execute("CREATE TABLE t AS SELECT 7 AS n")
        assert server.child is not None
        server.child.signal(signal.SIGKILL)
        server.child.join(5)
        with psycopg.connect(server.start()) as link:
            assert link.execute("SELECT n FROM t").fetchone() == (7,)
    finally:
        server.stop()


def test_postgres_leaves_no_process_and_its_folder_is_closed() -> None:
    with postgres.temporary() as server:
        assert server.child is not None and server.child.pid is not None
        pid = server.child.pid
        assert server.data_dir.stat().st_mode & 0o077 == 0
        assert server.sockets.stat().st_mode & 0o077 == 0
        if os.geteuid() == 0:
            assert server.data_dir.stat().st_uid != 0
            status = Path(f"/proc/{pid}/status").read_text()
            groups = next(line for line in status.splitlines() if line.startswith("Groups:"))
            assert groups.split()[1:] == [], "root's supplementary groups stayed with the server"
    assert not alive(pid)
    assert not server.data_dir.exists()


def test_a_broken_cluster_is_a_sentence_with_the_log(open_dir: Path) -> None:
    server = Postgres(open_dir / "postgres")
    server.start()
    server.stop()
    (server.data_dir / "PG_VERSION").write_text("9.1\n")
    with pytest.raises(Fault, match=r"did not start(.|\n)*version"):
        server.start()


def test_valkey_keeps_port_password_and_data(tmp_path: Path) -> None:
    server = Valkey(tmp_path / "valkey")
    try:
        url = server.start()
        client = redis.Redis.from_url(url)
        client.set("k", "v")
        client.close()
        server.stop()
        assert server.start() == url
        client = redis.Redis.from_url(url)
        assert client.get("k") == b"v"
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        client.close()
    finally:
        server.stop()


def test_valkey_takes_another_port_when_its_own_is_taken(tmp_path: Path) -> None:
    server, other = Valkey(tmp_path / "one"), Valkey(tmp_path / "two")
    try:
        server.start()
        server.stop()
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "port").write_text(str(server.port))
        other.start()
        assert server.start() != other.url
        assert server.port != other.port
    finally:
        server.stop()
        other.stop()


def test_valkey_asks_for_its_password_which_is_in_no_command_line() -> None:
    with valkey.temporary() as server:
        assert server.child is not None and server.child.pid is not None
        pid = server.child.pid
        assert server.password not in Path(f"/proc/{pid}/cmdline").read_text()
        assert (server.root / "valkey.conf").stat().st_mode & 0o077 == 0
        stranger = redis.Redis(port=server.port)
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        stranger.close()
    assert wait_until(lambda: not alive(pid), 5)
