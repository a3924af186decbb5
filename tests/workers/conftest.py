"""A portal in miniature and a worker process, for the tests of the node plane."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import MiniPortal, NodeProcess, node_url


@pytest.fixture
def portal(broker_url: str) -> Iterator[MiniPortal]:
    portal = MiniPortal(broker_url)
    yield portal
    portal.close()


@pytest.fixture
def node(tmp_path: Path, portal: MiniPortal, broker_url: str) -> Iterator[NodeProcess]:
    """A joined node, not yet started; its broker user has the rights of a node and no others."""
    node = NodeProcess(tmp_path, portal, node_url(broker_url, portal))
    portal.meet(node.public_key)
    yield node
    node.leave_nothing()
