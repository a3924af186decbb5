"""Connections that die without a word: the worker must not stay deaf, with its process alive, for ever."""

import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from node_harness import MiniPortal, NodeProcess, node_url, wait_until


class Proxy:
    """Passes bytes on. `freeze` swallows those of every connection there is; new connections work."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._frozen: set[socket.socket] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def freeze(self) -> int:
        """-> how many connections went silent."""
        self._frozen |= set(self._pairs)
        return len(self._frozen) // 2

    def close(self) -> None:
        self._stopping = True
        self._thread.join(10)
        for one in [self._server, *self._pairs]:
            one.close()

    def _run(self) -> None:
        while not self._stopping:
            ready, _, _ = select.select([self._server, *self._pairs], [], [], 0.1)
            for one in ready:
                if one is self._server:
                    self._accept()
                else:
                    self._pass_on(one)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(self._target)
        self._pairs[near], self._pairs[far] = far, near

    def _pass_on(self, one: socket.socket) -> None:
        try:
            data = one.recv(65536)
            if data and one not in self._frozen:
                self._pairs[one].sendall(data)
        except (OSError, KeyError):
            data = b""
        if not data:
            other = self._pairs.pop(one, None)
            one.close()
            if other is not None and one not in self._frozen:
                self._pairs.pop(other, None)
                other.close()


@pytest.fixture
def proxy(broker_url: str) -> Iterator[Proxy]:
    address = urlsplit(broker_url)
    proxy = Proxy(address.hostname or "127.0.0.1", address.port or 6379)
    yield proxy
    proxy.close()


@pytest.fixture
def remote(tmp_path: Path, portal: MiniPortal, broker_url: str, proxy: Proxy) -> Iterator[NodeProcess]:
    """A node behind the proxy."""
    node = NodeProcess(tmp_path, portal, node_url(f"redis://127.0.0.1:{proxy.port}", portal))
    portal.meet(node.public_key)
    yield node
    node.leave_nothing()


def test_a_worker_on_dead_connections_takes_orders_again(portal: MiniPortal, remote: NodeProcess, proxy: Proxy) -> None:
    remote.start()
    portal.wait_heartbeat()
    first = portal.launch("/bin/sleep 100")
    record = portal.wait_state(first, "running")
    assert proxy.freeze() >= 2, "the worker's own and Celery's"
    second = portal.launch("/bin/echo heard")
    portal.wait_complete(second, timeout_s=45)
    assert [event.state.value for event in record.events] == ["starting", "running"]

    def hint_is_taken() -> bool:  # Celery's own connections were silent as well; the order went around them
        portal.push_task("a hint that is refused, and so reported")
        with portal.changed:
            return portal.changed.wait_for(lambda: portal.rejected, 1.0) != []

    wait_until(hint_is_taken, 60, "Celery reads its queue again")
    assert remote.process is not None and remote.process.poll() is None
